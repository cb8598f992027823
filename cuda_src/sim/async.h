// async.h - asynchronous machinery: a thread's own copies (cp.async), and Hopper's mbarriers, bulk tensor copies, warpgroup products.
//
// A copy is done when somebody looks at the barrier that counts it, a product when its warp waits for its group: as late as the rules
// allow, so that whoever reads too early, or gives a buffer away too early, sees the wrong values.
#pragma once
#include "runtime.h"

namespace simt {

// What a TensorMap holds in the simulator; qwen_raw/simt/device.py fills it in.
struct SimTensorMap {
  char* base;
  uint64_t strides[4];  // bytes, of dimensions 1 … rank - 1
  uint32_t dims[5], box[5];
  uint32_t rank, item, swizzle, magic;  // item: bytes of an element; swizzle: 128 or 0
};
static_assert(sizeof(SimTensorMap) <= 128, "a tensor map has 128 bytes");
constexpr uint32_t TENSOR_MAP_MAGIC = 0x7e4504a9;

// The offset of `p` in the block's dynamic shared memory, which stands for its 32-bit address.
SIMT_API uint32_t shared_address(const void* p, Place place);

// The running thread's copies of 16 bytes: one more; a group closed; the next copy that has arrived when all but the last `pending` groups
// have: its value and, returned, its target (nullptr: no more).
SIMT_API void copy_async(void* dst, const void* value);
SIMT_API void copy_commit();
SIMT_API void* copy_arrived(uint32_t pending, void* value);

SIMT_API void mbarrier_init(uint64_t* bar, uint32_t arrivals, Place place);
SIMT_API void mbarrier_arrive(uint64_t* bar, uint32_t expect_bytes, Place place);
SIMT_API bool mbarrier_try_wait(uint64_t* bar, uint32_t parity, Place place);
SIMT_API void mbarrier_arrive_at(uint64_t* bar, uint32_t rank, Place place);
// `blocks`: bit mask of the cluster's blocks that get the box, at the same place of their shared memory; 0: this one.
SIMT_API void tma_load(void* dst, const void* map, uint64_t* bar, uint32_t rank, const int* at, uint32_t blocks, Place place);
// A box on its way out is read, and written or added, when its thread waits for its group to be read.
SIMT_API void tma_store(const void* map, const void* src, uint32_t rank, const int* at, bool add, Place place);
SIMT_API void bulk_commit();
SIMT_API void bulk_wait_read(uint32_t pending);
SIMT_API void named_barrier(int id, int threads, bool wait, Place place);  // wait: until all have arrived

enum class Element : int { BF16, F16, E4M3 };
// One lane's part of wgmma m64nNk(32 bytes): `registers` sums at d, N = 2·registers.
struct WgmmaLane {
  float* d;
  int registers;
  uint64_t desc_a, desc_b;
  bool accumulate;
  Element element;
  const uint32_t* a = nullptr;  // if given: 16 bits a value in four registers instead of desc_a, and b's rows lie along N
};
SIMT_API void wgmma_issue(const WgmmaLane& lane, Place place);
SIMT_API void wgmma_commit(Place place);
SIMT_API void wgmma_wait(int groups, Place place);

}  // namespace simt
