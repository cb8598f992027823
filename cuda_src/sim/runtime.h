// runtime.h - what compiled kernels and the SIMT runtime agree on. Nothing here needs CUDA's headers.
//
// A kernel is compiled by the host's C++ compiler into a shared object of its own and linked against the runtime (the .cpp files of this
// folder). Every CUDA thread runs on a fibre; control leaves a thread only inside the functions declared below. One operating-system
// thread runs everything, so nothing needs a lock.
#pragma once
#include <cstddef>
#include <cstdint>

#define SIMT_API __attribute__((visibility("default")))

namespace simt {

// Where in the source a thread is: shown in every report, and the identity by which a barrier's or shuffle's participants are matched.
struct Place {
  const char* file;
  int line;
  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

struct Index3 {
  uint32_t x, y, z;
};

// What kernel code sees of its block and of itself.
struct BlockView {
  Index3 index, dim, grid;
  unsigned char* dyn_shared;
};
struct ThreadView {
  Index3 index;
  uint32_t lane;
  BlockView* view;
};
extern SIMT_API ThreadView* current;  // the running thread; set whenever kernel code runs

// ---- barriers and warp collectives -----------------------------------------------------------------------------------
enum class Vote : int { NONE, OR, AND, COUNT };
SIMT_API int barrier(Vote vote, int predicate, Place place);

// A warp collective: each lane of `mask` brings a pointer to its operand (on its own stack, alive while it waits); the last lane to
// arrive runs `finish` over all of them, which leaves every lane's result in its operand.
struct WarpOp {
  const char* name;
  void (*finish)(void* const* operands, uint32_t mask);
  bool orders_memory;  // __syncwarp does, shuffles and votes do not
};
SIMT_API void collective(uint32_t mask, const WarpOp& op, void* operand, Place place);
SIMT_API uint32_t live_lanes();

// ---- memory ----------------------------------------------------------------------------------------------------------
// One static shared array of the running block; `key` tells arrays apart. Starts as 0xff bytes: NaN in every float format.
SIMT_API void* static_shared(const void* key, const char* name, size_t bytes, size_t align);

enum class Order : int { RELAXED, ACQUIRE, RELEASE, ACQ_REL };
enum class Scope : int { BLOCK, GPU, SYSTEM };
// Loads that may poll: a thread that reads the same value again from the same place sleeps until something is written there.
SIMT_API void load(void* dst, const void* src, size_t bytes, Order order, Place place);
// Stores and reductions that may cross to another rank: they travel over that pair's link and may be late and out of order.
SIMT_API void store(void* dst, const void* src, size_t bytes, Order order, Place place);
SIMT_API void reduce_add_u32(uint32_t* dst, uint32_t value, Order order, Place place);
using Modify = uint64_t (*)(uint64_t old, uint64_t a, uint64_t b);
SIMT_API uint64_t atomic(void* p, size_t bytes, Modify modify, uint64_t a, uint64_t b, Order order, Place place);
SIMT_API void fence(Scope scope, Place place);

// ---- the launch, time, failure ---------------------------------------------------------------------------------------
SIMT_API void griddep_wait(Place place);
SIMT_API void griddep_launch();
SIMT_API void yield();
SIMT_API uint64_t timer_ns();
// Clusters. The barrier orders no memory: pushes carry their own order.
SIMT_API uint32_t cluster_rank();
SIMT_API void cluster_arrive(Place place);
SIMT_API void cluster_wait(Place place);
SIMT_API void* cluster_peer(const void* p, size_t bytes, uint32_t rank, Place place);  // the same place of dynamic shared memory in block `rank`
[[noreturn]] SIMT_API void fail(Place place, const char* format, ...) __attribute__((format(printf, 2, 3)));

inline void require_aligned(const void* p, size_t bytes, Place place) {
  if (__builtin_expect(reinterpret_cast<uintptr_t>(p) % bytes != 0, 0))
    fail(place, "misaligned %zu-byte vector access at %p", bytes, p);
}

// Fails unless the bytes lie within one allocation.
SIMT_API void require_memory(const void* p, size_t bytes, Place place);

// mma.sync m16n8k16 over the operands of 32 lanes (MmaLane, mma_lane.h): in the runtime, compiled once.
SIMT_API void mma_bf16_16816(void* const* operands, uint32_t mask);
SIMT_API void mma_f16_16816(void* const* operands, uint32_t mask);

// ---- what a kernel's shared object exports ---------------------------------------------------------------------------
struct Param {
  const char* name;
  char kind;            // 'p' pointer, 'i' signed, 'u' unsigned, 'f' floating, 's' struct
  uint32_t bytes;
  const char* pointee;  // pointers: the NumPy dtype that the memory must have, "any", or "" when it is no pointer
};
struct Entry {
  const char* name;
  int max_threads;  // __launch_bounds__, 0 when it has none
  int params;
  const Param* param;
  void (*call)(void* const* args);
};

}  // namespace simt
