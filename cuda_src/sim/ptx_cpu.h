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
// A hint has no effect here, but what it names must exist.
inline void prefetch_l2(const void* p, uint32_t bytes, SIMT_PLACE) {
  simt::require_aligned(p, 16, place);
  if (bytes % 16) simt::fail(place, "prefetch_l2 of %u bytes: the size is a multiple of 16", bytes);
  simt::require_memory(p, bytes, place);
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
inline uint32_t ld_acquire_sys_u32(const uint32_t* p, SIMT_PLACE) { return simt::load_as<uint32_t>(p, simt::Order::ACQUIRE, place); }
inline void st_volatile_u32(uint32_t* p, uint32_t v, SIMT_PLACE) { simt::store(p, &v, 4, simt::Order::RELAXED, place); }
inline void st_volatile_v4(void* p, uint4 v, SIMT_PLACE) { simt::store(p, &v, 16, simt::Order::RELAXED, place); }
inline void st_release_sys_u32(uint32_t* p, uint32_t v, SIMT_PLACE) { simt::store(p, &v, 4, simt::Order::RELEASE, place); }
inline void st_release_sys_u64(uint64_t* p, uint64_t v, SIMT_PLACE) { simt::store(p, &v, 8, simt::Order::RELEASE, place); }
inline void red_release_sys_add_u32(uint32_t* p, uint32_t v, SIMT_PLACE) { simt::reduce_add_u32(p, v, simt::Order::RELEASE, place); }
inline uint32_t atom_inc_acq_rel_gpu(uint32_t* p, uint32_t wrap, SIMT_PLACE) {
  const auto modify = [](uint64_t old, uint64_t limit, uint64_t) -> uint64_t { return old >= limit ? 0 : old + 1; };
  return uint32_t(simt::atomic(p, 4, modify, wrap, 0, simt::Order::ACQ_REL, place));
}

// ---- programmatic dependent launch ----------------------------------------------------------------------------------------
inline void griddep_wait(SIMT_PLACE) { simt::griddep_wait(place); }
inline void griddep_launch() { simt::griddep_launch(); }

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
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint64_t* bar, SIMT_PLACE) { simt::mbarrier_arrive(bar, 0, place); }
inline void mbarrier_arrive_expect_tx(uint64_t* bar, uint32_t bytes, SIMT_PLACE) { simt::mbarrier_arrive(bar, bytes, place); }
inline bool mbarrier_try_wait(uint64_t* bar, uint32_t parity, SIMT_PLACE) { return simt::mbarrier_try_wait(bar, parity, place); }
inline void tensor_map_prefetch(const TensorMap&) {}
inline void tma_load_2d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, SIMT_PLACE) {
  const int at[2] = {x, y};
  simt::tma_load(dst, &map, bar, 2, at, 0, place);
}
inline void tma_load_3d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, int z, SIMT_PLACE) {
  const int at[3] = {x, y, z};
  simt::tma_load(dst, &map, bar, 3, at, 0, place);
}
inline uint32_t cluster_rank() { return simt::cluster_rank(); }
inline void cluster_sync(SIMT_PLACE) { simt::cluster_sync(place); }
inline void mbarrier_arrive_at(uint64_t* bar, uint32_t rank, SIMT_PLACE) { simt::mbarrier_arrive_at(bar, rank, place); }
inline void tma_multicast_2d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, uint16_t blocks, SIMT_PLACE) {
  const int at[2] = {x, y};
  simt::tma_load(dst, &map, bar, 2, at, blocks, place);
}
inline void named_barrier(int id, int threads, SIMT_PLACE) { simt::named_barrier(id, threads, place); }
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

// ---- time and failure ---------------------------------------------------------------------------------------------------------
inline uint64_t global_timer_ns() { return simt::timer_ns(); }
inline void trap(SIMT_PLACE) { simt::fail(place, "trap: the kernel ended the launch"); }

#endif
