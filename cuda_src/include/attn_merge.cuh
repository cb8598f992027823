// attn_merge.cuh - partial attention outputs, each relative to a maximum of its own, and their sum.
//
//   o = Σ 2^(m_i - m)·o_i,   l = Σ 2^(m_i - m)·l_i,   m = max m_i;   the output is o / l
#pragma once
#include "attn_keys.cuh"
#include "push.cuh"

// Four neighbouring dimensions of one row.
struct Partial {
  float4 o;
  float m, l;
};

// The partials o(i) with {m, l} = ml(i), i < count; N is the most there can be. All N are requested before anything is used, without
// predicates, of which a thread has only seven: those from `count` on must be finite, and count nothing.
template <int N, class O, class ML>
DEVICE Partial merge(const O& o, const ML& ml, int count) {
  float4 x[N];
  float2 s[N];
  Partial a = {make_float4(0.f, 0.f, 0.f, 0.f), NEG_INF, 0.f};
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = ml(i);
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = o(i);
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (i >= count) s[i].x = NEG_INF;
    a.m = fmaxf(a.m, s[i].x);
  }
  const float base = a.m == NEG_INF ? 0.f : a.m;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float f = ex2_approx(s[i].x - base);
    a.l = fmaf(f, s[i].y, a.l);
    a.o = make_float4(fmaf(f, x[i].x, a.o.x), fmaf(f, x[i].y, a.o.y), fmaf(f, x[i].z, a.o.z), fmaf(f, x[i].w, a.o.w));
  }
  return a;
}
DEVICE Partial merge(const Partial& a, const Partial& b) {
  return merge<2>([&](int i) { return i ? b.o : a.o; }, [&](int i) { return i ? make_float2(b.m, b.l) : make_float2(a.m, a.l); }, 2);
}

DEVICE void store_output(bf16* out, const Partial& a) {
  const float inv = __fdividef(1.f, a.l);
  *reinterpret_cast<uint2*>(out) = make_uint2(pack_bf16(a.o.x * inv, a.o.y * inv), pack_bf16(a.o.z * inv, a.o.w * inv));
}

// ---- the warps of a block ----------------------------------------------------------------------------------------------------------
// A warp's state in shared memory. Pack d of a row, four dimensions, is stored at d ^ swizzle(row): no two lanes of a store meet in a bank.
// The swizzle is the same for the two rows of a thread, and flips bits 0 and 2 only.
template <int HD, int NT>
struct WarpPartial {
  float4 o[8 * NT][HD / 4];
};
DEVICE int swizzle(int row) { return (row >> 1 & 1) | (row >> 2 & 1) << 2; }

// DIMS: neighbouring dimensions that a thread holds, 8 or 16.
template <int DIMS, int HD, int NT>
DEVICE void publish(WarpPartial<HD, NT>& to, float2 (&ml)[8 * NT], AttnState<HD, NT>& st) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int d = 4; d < WARP; d *= 2)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) st.l[n][c] += __shfl_xor_sync(FULL_MASK, st.l[n][c], d);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int row = 8 * n + 2 * t + c;
#pragma unroll
      for (int j = 0; j < HD / 64; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float(&a)[4] = st.o[n][4 * j + 2 * h];
          const float(&b)[4] = st.o[n][4 * j + 2 * h + 1];
          const int quad = DIMS == 8 ? 16 * j + 2 * g + h : 4 * g + 2 * j + h;
          to.o[row][quad ^ swizzle(2 * t)] = make_float4(a[c], a[2 + c], b[c], b[2 + c]);
        }
      if (g == 0) ml[row] = make_float2(st.m[n][c], st.l[n][c]);
    }
}

// ---- clusters of a launch ----------------------------------------------------------------------------------------------------------
// Partials that meet in global memory are their own flags: memory waits armed with the word HOLE, and whoever reads a partial arms it again.
// No arithmetic yields that NaN, but a NaN might have been given.
constexpr uint32_t HOLE = 0xffffffffu;
DEVICE uint32_t not_hole(float f) {
  const uint32_t w = __float_as_uint(f);
  return w == HOLE ? 0x7fffffffu : w;
}
DEVICE uint32_t largest(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }  // HOLE if a word is
