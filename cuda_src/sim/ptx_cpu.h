// ptx_cpu.h - CPU twins of the wrappers in include/ptx.cuh, under the same names and with the same arguments.
#pragma once
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

// ---- time and failure ---------------------------------------------------------------------------------------------------------
inline uint64_t global_timer_ns() { return simt::timer_ns(); }
inline void trap(SIMT_PLACE) { simt::fail(place, "trap: the kernel ended the launch"); }

#endif
