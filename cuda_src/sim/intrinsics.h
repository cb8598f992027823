// intrinsics.h - CUDA's built-in functions: barriers, shuffles, votes, atomics, fences, bit casts, and the arithmetic that libm lacks.
#pragma once
#include "runtime.h"

#define SIMT_PLACE simt::Place place = simt::Place::here()

// ---- barriers -----------------------------------------------------------------------------------------------------------
inline void __syncthreads(SIMT_PLACE) { simt::barrier(simt::Vote::NONE, 0, place); }
inline int __syncthreads_or(int p, SIMT_PLACE) { return simt::barrier(simt::Vote::OR, p, place); }
inline int __syncthreads_and(int p, SIMT_PLACE) { return simt::barrier(simt::Vote::AND, p, place); }
inline int __syncthreads_count(int p, SIMT_PLACE) { return simt::barrier(simt::Vote::COUNT, p, place); }

// ---- warp collectives ----------------------------------------------------------------------------------------------------
namespace simt {

template <class T>
struct ShuffleLane {
  T in, out;
  int source;  // the lane to read
};

template <class T>
void finish_shuffle(void* const* operands, uint32_t mask) {
  for (uint32_t bits = mask; bits; bits &= bits - 1) {
    auto* lane = static_cast<ShuffleLane<T>*>(operands[__builtin_ctz(bits)]);
    if (__builtin_expect(!(mask >> lane->source & 1), 0)) fail({nullptr, 0}, "shuffle: lane %d reads lane %d, which is not in the mask 0x%08x",
                                                               __builtin_ctz(bits), lane->source, mask);
    lane->out = static_cast<ShuffleLane<T>*>(operands[lane->source])->in;
  }
}

template <class T>
struct Shuffle {
  static constexpr WarpOp IDX{"__shfl_sync", finish_shuffle<T>, false}, XOR{"__shfl_xor_sync", finish_shuffle<T>, false};
  static constexpr WarpOp UP{"__shfl_up_sync", finish_shuffle<T>, false}, DOWN{"__shfl_down_sync", finish_shuffle<T>, false};
};

template <class T>
inline T shuffle(const WarpOp& op, uint32_t mask, T value, int source, Place place) {
  ShuffleLane<T> lane{value, value, source};
  collective(mask, op, &lane, place);
  return lane.out;
}

struct VoteLane {
  int in;
  uint32_t out;
};
inline void finish_ballot(void* const* operands, uint32_t mask) {
  uint32_t ballot = 0;
  for (uint32_t bits = mask; bits; bits &= bits - 1)
    if (static_cast<VoteLane*>(operands[__builtin_ctz(bits)])->in) ballot |= bits & -bits;
  for (uint32_t bits = mask; bits; bits &= bits - 1) static_cast<VoteLane*>(operands[__builtin_ctz(bits)])->out = ballot;
}
inline void finish_nothing(void* const*, uint32_t) {}
static constexpr WarpOp BALLOT{"a warp vote", finish_ballot, false}, SYNCWARP{"__syncwarp", finish_nothing, true};

}  // namespace simt

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_PLACE) { simt::collective(mask, simt::SYNCWARP, nullptr, place); }
template <class T>
inline T __shfl_sync(unsigned mask, T v, int source, int width = 32, SIMT_PLACE) {
  const int lane = int(simt::current->lane);
  return simt::shuffle(simt::Shuffle<T>::IDX, mask, v, (lane & ~(width - 1)) + (source & (width - 1)), place);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, SIMT_PLACE) {
  const int lane = int(simt::current->lane), source = lane ^ lane_mask;
  return simt::shuffle(simt::Shuffle<T>::XOR, mask, v, (source & ~(width - 1)) > (lane & ~(width - 1)) ? lane : source, place);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMT_PLACE) {
  const int lane = int(simt::current->lane);
  return simt::shuffle(simt::Shuffle<T>::UP, mask, v, (lane & (width - 1)) < int(delta) ? lane : lane - int(delta), place);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMT_PLACE) {
  const int lane = int(simt::current->lane);
  return simt::shuffle(simt::Shuffle<T>::DOWN, mask, v, (lane & (width - 1)) + int(delta) >= width ? lane : lane + int(delta), place);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_PLACE) {
  simt::VoteLane lane{predicate, 0};
  simt::collective(mask, simt::BALLOT, &lane, place);
  return lane.out;
}
inline int __any_sync(unsigned mask, int predicate, SIMT_PLACE) { return __ballot_sync(mask, predicate, place) != 0; }
inline int __all_sync(unsigned mask, int predicate, SIMT_PLACE) { return __ballot_sync(mask, predicate, place) == mask; }
// Lanes that have not returned: the simulator has no notion of which of them happen to run together.
inline unsigned __activemask() { return simt::live_lanes(); }

// ---- atomics (relaxed, as CUDA's) and fences ------------------------------------------------------------------------------
#define SIMT_ATOMIC(name, T, to_bits, from_bits, expression)                                                                        \
  inline T name(T* p, T value, SIMT_PLACE) {                                                                                        \
    const auto modify = [](uint64_t old_, uint64_t a_, uint64_t) -> uint64_t {                                                      \
      const T old = from_bits(old_), a = from_bits(a_);                                                                             \
      return to_bits(expression);                                                                                                   \
    };                                                                                                                              \
    return from_bits(simt::atomic(p, sizeof(T), modify, to_bits(value), 0, simt::Order::RELAXED, place));                           \
  }
namespace simt {
inline uint64_t bits_of(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
inline float float_of(uint64_t b) { const uint32_t u = uint32_t(b); float f; memcpy(&f, &u, 4); return f; }
inline uint64_t bits_of(int v) { return uint32_t(v); }
inline int int_of(uint64_t b) { return int(uint32_t(b)); }
inline uint64_t bits_of(unsigned v) { return v; }
inline unsigned unsigned_of(uint64_t b) { return unsigned(b); }
inline uint64_t bits_of(unsigned long long v) { return v; }
inline unsigned long long u64_of(uint64_t b) { return b; }
}  // namespace simt
SIMT_ATOMIC(atomicAdd, int, simt::bits_of, simt::int_of, int(unsigned(old) + unsigned(a)))
SIMT_ATOMIC(atomicAdd, unsigned, simt::bits_of, simt::unsigned_of, old + a)
SIMT_ATOMIC(atomicAdd, unsigned long long, simt::bits_of, simt::u64_of, old + a)
SIMT_ATOMIC(atomicAdd, float, simt::bits_of, simt::float_of, old + a)
SIMT_ATOMIC(atomicMax, int, simt::bits_of, simt::int_of, (old > a ? old : a))
SIMT_ATOMIC(atomicMax, unsigned, simt::bits_of, simt::unsigned_of, (old > a ? old : a))
SIMT_ATOMIC(atomicMax, unsigned long long, simt::bits_of, simt::u64_of, (old > a ? old : a))
SIMT_ATOMIC(atomicMin, int, simt::bits_of, simt::int_of, (old < a ? old : a))
SIMT_ATOMIC(atomicMin, unsigned, simt::bits_of, simt::unsigned_of, (old < a ? old : a))
SIMT_ATOMIC(atomicInc, unsigned, simt::bits_of, simt::unsigned_of, (old >= a ? 0u : old + 1))
SIMT_ATOMIC(atomicExch, int, simt::bits_of, simt::int_of, (void(old), a))
SIMT_ATOMIC(atomicExch, unsigned, simt::bits_of, simt::unsigned_of, (void(old), a))
SIMT_ATOMIC(atomicExch, unsigned long long, simt::bits_of, simt::u64_of, (void(old), a))
SIMT_ATOMIC(atomicOr, unsigned, simt::bits_of, simt::unsigned_of, old | a)
SIMT_ATOMIC(atomicAnd, unsigned, simt::bits_of, simt::unsigned_of, old & a)
#undef SIMT_ATOMIC

template <class T>
inline T atomicCAS(T* p, T compare, T value, SIMT_PLACE) {
  static_assert(std::is_integral<T>::value, "atomicCAS works on integers");
  uint64_t a = 0, b = 0;
  memcpy(&a, &compare, sizeof(T));
  memcpy(&b, &value, sizeof(T));
  const auto modify = [](uint64_t old, uint64_t x, uint64_t y) -> uint64_t { return old == x ? y : old; };
  const uint64_t old = simt::atomic(p, sizeof(T), modify, a, b, simt::Order::RELAXED, place);
  T out;
  memcpy(&out, &old, sizeof(T));
  return out;
}

inline void __threadfence_system(SIMT_PLACE) { simt::fence(simt::Scope::SYSTEM, place); }
inline void __threadfence(SIMT_PLACE) { simt::fence(simt::Scope::GPU, place); }
inline void __threadfence_block(SIMT_PLACE) { simt::fence(simt::Scope::BLOCK, place); }
inline void __nanosleep(unsigned) { simt::yield(); }

// ---- bits and arithmetic ---------------------------------------------------------------------------------------------------
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
inline int __float_as_int(float f) { int i; memcpy(&i, &f, 4); return i; }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T>
inline T __ldg(const T* p) { return *p; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
#define SIMT_MIN_MAX(T)                                  \
  inline T min(T a, T b) { return b < a ? b : a; }       \
  inline T max(T a, T b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
SIMT_MIN_MAX(float)
#undef SIMT_MIN_MAX
