// ptx_cpu.h - CPU twins of the wrappers in include/ptx.cuh, under the same names and with the same arguments.
#pragma once
#include "async.h"
#include "mma_lane.h"
#include "simt.h"

#ifndef SIMT_SCAN

// ---- loads and stores: plain ones touch memory at once; the rest go through the runtime, which knows about ranks and polls ----
inline uint4 ld_stream_v4(const void* p, SIMT_PLACE) {
  simt::require_aligned(p, 16, place);
  return *static_cast<const uint4*>(p);
}
inline uint4 ld_global_v4(const void* p, SIMT_PLACE) {
  simt::require_aligned(p, 16, place);
  return *static_cast<const uint4*>(p);
}
inline float2 ld_global_f2(const void* p, SIMT_PLACE) {
  simt::require_aligned(p, 8, place);
  return *static_cast<const float2*>(p);
}
inline float4 ld_global_f4(const void* p, SIMT_PLACE) {
  simt::require_aligned(p, 16, place);
  return *static_cast<const float4*>(p);
}
inline uint4 ld_once_v4(const void* p, SIMT_PLACE) { return ld_global_v4(p, place); }
inline uint2 ld_once_v2(const void* p, SIMT_PLACE) {
  simt::require_aligned(p, 8, place);
  return *static_cast<const uint2*>(p);
}
inline uint32_t ld_once_u32(const void* p, SIMT_PLACE) {
  simt::require_aligned(p, 4, place);
  return *static_cast<const uint32_t*>(p);
}
// A hint has no effect here, but what it names must exist.
inline void prefetch_l2(const void* p, uint32_t bytes, SIMT_PLACE) {
  simt::require_aligned(p, 16, place);
  if (bytes % 16) simt::fail(place, "prefetch_l2 of %u bytes: the size is a multiple of 16", bytes);
  simt::require_memory(p, bytes, place);
}

// A copy reaches shared memory when its thread waits for its group, and no earlier.
inline void cp_async_v4(void* dst, const void* src, bool there, SIMT_PLACE) {
  simt::require_aligned(dst, 16, place);
  if (there) simt::require_aligned(src, 16, place);
  const uint4 value = there ? *static_cast<const uint4*>(src) : make_uint4(0, 0, 0, 0);
  simt::copy_async(dst, &value);
}
inline void cp_async_commit() { simt::copy_commit(); }
template <int N>
inline void cp_async_wait() {
  uint4 value;
  while (void* dst = simt::copy_arrived(N, &value)) *static_cast<uint4*>(dst) = value;
}

namespace simt {
template <class T>
inline T load_as(const void* p, Order order, Place place) {
  T v;
  load(&v, p, sizeof(T), order, place);
  return v;
}
}  // namespace simt

inline uint32_t ld_volatile_u32(const uint32_t* p, SIMT_PLACE) { return simt::load_as<uint32_t>(p, simt::Order::RELAXED, place); }
inline uint4 ld_volatile_v4(const void* p, SIMT_PLACE) { return simt::load_as<uint4>(p, simt::Order::RELAXED, place); }
inline uint2 ld_volatile_v2(const void* p, SIMT_PLACE) { return simt::load_as<uint2>(p, simt::Order::RELAXED, place); }
inline uint32_t ld_acquire_sys_u32(const uint32_t* p, SIMT_PLACE) { return simt::load_as<uint32_t>(p, simt::Order::ACQUIRE, place); }
inline void st_volatile_u32(uint32_t* p, uint32_t v, SIMT_PLACE) { simt::store(p, &v, 4, simt::Order::RELAXED, place); }
inline void st_volatile_v4(void* p, uint4 v, SIMT_PLACE) { simt::store(p, &v, 16, simt::Order::RELAXED, place); }
inline void st_volatile_v2(void* p, uint2 v, SIMT_PLACE) { simt::store(p, &v, 8, simt::Order::RELAXED, place); }
inline void st_volatile_u64(uint64_t* p, uint64_t v, SIMT_PLACE) { simt::store(p, &v, 8, simt::Order::RELAXED, place); }
inline void st_release_sys_u32(uint32_t* p, uint32_t v, SIMT_PLACE) { simt::store(p, &v, 4, simt::Order::RELEASE, place); }
inline void st_release_sys_u64(uint64_t* p, uint64_t v, SIMT_PLACE) { simt::store(p, &v, 8, simt::Order::RELEASE, place); }
inline void red_release_sys_add_u32(uint32_t* p, uint32_t v, SIMT_PLACE) { simt::reduce_add_u32(p, v, simt::Order::RELEASE, place); }
inline uint32_t atom_inc_acq_rel_gpu(uint32_t* p, uint32_t wrap, SIMT_PLACE) {
  const auto modify = [](uint64_t old, uint64_t limit, uint64_t) -> uint64_t { return old >= limit ? 0 : old + 1; };
  return uint32_t(simt::atomic(p, 4, modify, wrap, 0, simt::Order::ACQ_REL, place));
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------------
inline void griddep_wait(SIMT_PLACE) { simt::griddep_wait(place); }
inline void griddep_wait_with(uint64_t addresses, SIMT_PLACE) {
  if (addresses) simt::griddep_wait(place);
}
inline void griddep_launch() { simt::griddep_launch(); }
template <class T>
inline void settle(T*&) {}
inline void settle(int&) {}

// ---- clusters -------------------------------------------------------------------------------------------------------------
// A push barrier is one word here: bytes that have arrived below, 1 + bytes expected above.
inline uint32_t cluster_rank() { return simt::cluster_rank(); }
inline void cluster_arrive(SIMT_PLACE) { simt::cluster_arrive(place); }
inline void cluster_wait(SIMT_PLACE) { simt::cluster_wait(place); }
namespace simt {
inline void add_u64(uint64_t* p, uint64_t value, Place place) {
  const auto modify = [](uint64_t old, uint64_t more, uint64_t) -> uint64_t { return old + more; };
  atomic(p, 8, modify, value, 0, Order::RELEASE, place);
}
template <class T>
inline void push(T* p, uint32_t rank, T v, uint64_t* barrier, Place place) {
  store(cluster_peer(p, sizeof(T), rank, place), &v, sizeof(T), Order::RELAXED, place);
  add_u64(static_cast<uint64_t*>(cluster_peer(barrier, 8, rank, place)), sizeof(T), place);
}
}  // namespace simt
inline void push_init(uint64_t* barrier, SIMT_PLACE) {
  const uint64_t none = 0;
  simt::store(barrier, &none, 8, simt::Order::RELEASE, place);
}
inline void push_expect(uint64_t* barrier, uint32_t bytes, SIMT_PLACE) { simt::add_u64(barrier, (uint64_t(bytes) + 1) << 32, place); }
inline void push_f4(float4* p, uint32_t rank, float4 v, uint64_t* barrier, SIMT_PLACE) { simt::push(p, rank, v, barrier, place); }
inline void push_f2(float2* p, uint32_t rank, float2 v, uint64_t* barrier, SIMT_PLACE) { simt::push(p, rank, v, barrier, place); }
inline void push_f1(float* p, uint32_t rank, float v, uint64_t* barrier, SIMT_PLACE) { simt::push(p, rank, v, barrier, place); }
inline bool push_arrived(uint64_t* barrier, SIMT_PLACE) {
  const uint64_t w = simt::load_as<uint64_t>(barrier, simt::Order::ACQUIRE, place);
  return w >> 32 == (w & 0xffffffffu) + 1;
}

// ---- arithmetic -------------------------------------------------------------------------------------------------------------
// ex2.approx.ftz: subnormal arguments and results are zero; otherwise within 2 ulp of what the GPU gives.
inline float ex2_approx(float x) {
  const float y = exp2f(fabsf(x) < 1.17549435e-38f ? 0.f : x);
  return y < 1.17549435e-38f ? 0.f : y;
}
// rcp.approx.ftz: the same for subnormals; otherwise within an ulp of what the GPU gives.
inline float rcp_approx(float x) {
  if (fabsf(x) < 1.17549435e-38f) x = copysignf(0.f, x);
  const float y = 1.f / x;
  return fabsf(y) < 1.17549435e-38f ? copysignf(0.f, y) : y;
}
inline void split_halves(uint16_t& lo, uint16_t& hi, uint32_t w) { lo = uint16_t(w), hi = uint16_t(w >> 16); }
// satfinite: an infinity becomes ±65504 too, a NaN stays one.
inline uint32_t cvt_f16x2_sat(float lo, float hi) {
  const auto one = [](float f) -> uint32_t {
    if (f != f) return 0x7fffu;
    const __half2_raw h = __half2_raw(__floats2half2_rn(fminf(fmaxf(f, -65504.f), 65504.f), 0.f));
    return h.x;
  };
  return one(lo) | one(hi) << 16;
}
namespace simt {
static constexpr WarpOp MMA_BF16_16816{"mma_bf16_16816", mma_bf16_16816, false};
static constexpr WarpOp MMA_F16_16816{"mma_f16_16816", mma_f16_16816, false};
}
inline void mma_bf16_16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIMT_PLACE) {
  simt::MmaLane lane{&c, &a, &b};
  simt::collective(0xffffffffu, simt::MMA_BF16_16816, &lane, place);
}
inline void mma_f16_16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIMT_PLACE) {
  simt::MmaLane lane{&c, &a, &b};
  simt::collective(0xffffffffu, simt::MMA_F16_16816, &lane, place);
}

// ---- Hopper: barriers that count bytes, bulk tensor copies, warpgroup products ------------------------------------------------
inline uint32_t shared_address(const void* p, SIMT_PLACE) { return simt::shared_address(p, place); }
inline void mbarrier_init(uint64_t* bar, uint32_t arrivals, SIMT_PLACE) { simt::mbarrier_init(bar, arrivals, place); }
inline void tma_prefetch(const TensorMap&) {}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint64_t* bar, SIMT_PLACE) { simt::mbarrier_arrive(bar, 0, place); }
inline void mbarrier_arrive_expect_tx(uint64_t* bar, uint32_t bytes, SIMT_PLACE) { simt::mbarrier_arrive(bar, bytes, place); }
inline bool mbarrier_try_wait(uint64_t* bar, uint32_t parity, SIMT_PLACE) { return simt::mbarrier_try_wait(bar, parity, place); }
inline void tma_load_2d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, SIMT_PLACE) {
  const int at[2] = {x, y};
  simt::tma_load(dst, &map, bar, 2, at, 0, place);
}
inline void tma_load_3d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, int z, SIMT_PLACE) {
  const int at[3] = {x, y, z};
  simt::tma_load(dst, &map, bar, 3, at, 0, place);
}
inline void mbarrier_arrive_at(uint64_t* bar, uint32_t rank, SIMT_PLACE) { simt::mbarrier_arrive_at(bar, rank, place); }
inline void tma_multicast_2d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, uint16_t blocks, SIMT_PLACE) {
  const int at[2] = {x, y};
  simt::tma_load(dst, &map, bar, 2, at, blocks, place);
}
inline void tma_store_2d(const TensorMap& map, const void* src, int x, int y, SIMT_PLACE) {
  const int at[2] = {x, y};
  simt::tma_store(&map, src, 2, at, false, place);
}
inline void tma_add_2d(const TensorMap& map, const void* src, int x, int y, SIMT_PLACE) {
  const int at[2] = {x, y};
  simt::tma_store(&map, src, 2, at, true, place);
}
inline void bulk_commit() { simt::bulk_commit(); }
template <int GROUPS>
inline void bulk_wait_read() {
  simt::bulk_wait_read(GROUPS);
}
inline void async_fence() {}
inline void named_barrier(int id, int threads, SIMT_PLACE) { simt::named_barrier(id, threads, true, place); }
inline void named_barrier_arrive(int id, int threads, SIMT_PLACE) { simt::named_barrier(id, threads, false, place); }
// Registers are not simulated; the counts must be legal.
template <int N>
inline void register_increase() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes a multiple of 8 from 24 to 256");
}
template <int N>
inline void register_decrease() {
  register_increase<N>();
}
inline void red_add_f32x2(float* p, float x, float y, SIMT_PLACE) {
  simt::require_aligned(p, 8, place);
  atomicAdd(p, x, place);
  atomicAdd(p + 1, y, place);
}
inline void wgmma_fence() {}
inline void wgmma_commit(SIMT_PLACE) { simt::wgmma_commit(place); }
template <int GROUPS>
inline void wgmma_wait(SIMT_PLACE) {
  simt::wgmma_wait(GROUPS, place);
}
template <int REGS>
inline void wgmma_results(float (&d)[REGS]) {
  (void)d;
}
template <int REGS>
inline void wgmma_operand(uint32_t (&a)[REGS]) {
  (void)a;
}
template <int REGS>
inline void wgmma_bf16_rows(float (&d)[REGS], const uint32_t (&a)[4], uint64_t desc_b, SIMT_PLACE) {
  simt::wgmma_issue({d, REGS, 0, desc_b, true, simt::Element::BF16, a}, place);
}
template <int REGS>
inline void wgmma_bf16(float (&d)[REGS], uint64_t desc_a, uint64_t desc_b, int accumulate, SIMT_PLACE) {
  simt::wgmma_issue({d, REGS, desc_a, desc_b, accumulate != 0, simt::Element::BF16}, place);
}
template <int REGS>
inline void wgmma_f16(float (&d)[REGS], uint64_t desc_a, uint64_t desc_b, int accumulate, SIMT_PLACE) {
  simt::wgmma_issue({d, REGS, desc_a, desc_b, accumulate != 0, simt::Element::F16}, place);
}
template <int REGS>
inline void wgmma_e4m3(float (&d)[REGS], uint64_t desc_a, uint64_t desc_b, int accumulate, SIMT_PLACE) {
  simt::wgmma_issue({d, REGS, desc_a, desc_b, accumulate != 0, simt::Element::E4M3}, place);
}


namespace simt {
inline void finish_movmatrix(void* const* operands, uint32_t) {
  uint32_t in[32];
  for (int lane = 0; lane < 32; lane++) in[lane] = *static_cast<uint32_t*>(operands[lane]);
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t low = in[8 * t + g / 2] >> (16 * (g % 2)), high = in[8 * t + 4 + g / 2] >> (16 * (g % 2));
    *static_cast<uint32_t*>(operands[lane]) = (low & 0xffffu) | high << 16;
  }
}
static constexpr WarpOp MOVMATRIX{"movmatrix_trans", finish_movmatrix, false};
}  // namespace simt
inline uint32_t movmatrix_trans(uint32_t v, SIMT_PLACE) {
  simt::collective(0xffffffffu, simt::MOVMATRIX, &v, place);
  return v;
}

// Each lane names a row of 16 bytes: lane 8i + r row r of matrix i, whose elements (g, 2t) and (g, 2t + 1) are lane 4g + t's word i.
inline void stmatrix_x4(void* row, const uint32_t (&w)[4], SIMT_PLACE) {
  simt::require_aligned(row, 16, place);
  const int lane = int(threadIdx.x) % 32;
  for (int i = 0; i < 4; i++) {
    const uint64_t address = uint64_t(reinterpret_cast<uintptr_t>(row));
    const int source = 8 * i + lane / 4;
    const uint32_t low = __shfl_sync(FULL_MASK, uint32_t(address), source), high = __shfl_sync(FULL_MASK, uint32_t(address >> 32), source);
    reinterpret_cast<uint32_t*>(uintptr_t(uint64_t(high) << 32 | low))[lane % 4] = w[i];
  }
}

// ---- time and failure ---------------------------------------------------------------------------------------------------------
inline uint64_t global_timer_ns() { return simt::timer_ns(); }
inline void trap(SIMT_PLACE) { simt::fail(place, "trap: the kernel ended the launch"); }

#endif
