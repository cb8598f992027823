// gemv_x.cuh - what the engines of include/gemv.cuh share: weight types, x in registers, one pack's products, the reduction over a warp.
#pragma once
#include "gemv_sums.cuh"

// ---- weights ---------------------------------------------------------------------------------------------------------------------------
struct WeightBf16 {
  using type = bf16;
  static constexpr int PACK = 8;  // weights in 16 bytes
  static constexpr bool SCALED = false;
  static DEVICE void widen(float (&f)[8], uint4 w, int) { unpack_bf16(f, w); }
};
struct WeightE4m3 {
  using type = e4m3;
  static constexpr int PACK = 16;
  static constexpr bool SCALED = true;
  // Eight of the sixteen: half 0 or 1.
  static DEVICE void widen(float (&f)[8], uint4 w, int half) {
    float a[4], b[4];
    unpack_e4m3(a, half ? w.z : w.x);
    unpack_e4m3(b, half ? w.w : w.y);
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] = a[i], f[4 + i] = b[i];
  }
};

// ---- x in registers: C packs a thread ----------------------------------------------------------------------------------------------
// As fp32: normed inputs, exact.
template <class W, int C>
struct XFloat {
  float v[C][W::PACK];
  DEVICE void keep(int) {}
  DEVICE void eight(float (&f)[8], int c, int part) const {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = v[c][8 * part + i];
  }
};
// As the bf16 they are in memory: half the registers, for long K.
template <class W, int C>
struct XBf16 {
  uint4 v[C][W::PACK / 8];
  // Pack c stays bf16 between rows: widened once and for all it would take twice the registers.
  DEVICE void keep(int c) {
#pragma unroll
    for (int part = 0; part < W::PACK / 8; part++) opaque(v[c][part]);
  }
  DEVICE void eight(float (&f)[8], int c, int part) const { unpack_bf16(f, v[c][part]); }
};

// s plus pack c of a row times its stretch of x; even and odd elements in sums of their own, which halves the chain of dependent adds.
template <class W, class X>
DEVICE void dot_pack(float (&s)[2], uint4 w, const X& x, int c) {
#pragma unroll
  for (int part = 0; part < W::PACK / 8; part++) {
    float a[8], b[8];
    W::widen(a, w, part);
    x.eight(b, c, part);
#pragma unroll
    for (int i = 0; i < 8; i++) s[i % 2] = fmaf(a[i], b[i], s[i % 2]);
  }
}

// A thread's place in a row: packs t, t + width, … are its own.
struct Lane {
  int t, width;
  template <class W>
  DEVICE int k(int c) const { return (c * width + t) * W::PACK; }
};
DEVICE Lane block_lane() { return {int(threadIdx.x), int(blockDim.x)}; }

// x bf16 [K]; packs past the end are zero.
template <class W, int C>
DEVICE void fetch_x(XBf16<W, C>& x, const bf16* src, int K, Lane lane = block_lane()) {
#pragma unroll
  for (int c = 0; c < C; c++) {
    const int k = lane.k<W>(c);
#pragma unroll
    for (int part = 0; part < W::PACK / 8; part++) x.v[c][part] = k < K ? ld_global_v4(src + k + 8 * part) : make_uint4(0, 0, 0, 0);
  }
}

// x = h·g, the input of a linear but for RMSNorm's scalar; returns this thread's share of Σ h². h fp32 [K].
template <class W, int C>
DEVICE float fetch_weighted(XFloat<W, C>& x, const float* h, const XBf16<W, C>& g, int K, Lane lane = block_lane()) {
  float ss = 0.f;
#pragma unroll
  for (int c = 0; c < C; c++) {
    const int k = lane.k<W>(c);
#pragma unroll
    for (int part = 0; part < W::PACK / 8; part++) {
      float w[8];
      g.eight(w, c, part);
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const float4 v = k < K ? ld_global_f4(h + k + 8 * part + 4 * q) : make_float4(0.f, 0.f, 0.f, 0.f);
        float* out = &x.v[c][8 * part + 4 * q];
        out[0] = v.x * w[4 * q], out[1] = v.y * w[4 * q + 1], out[2] = v.z * w[4 * q + 2], out[3] = v.w * w[4 * q + 3];
        ss = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, ss))));
      }
    }
  }
  return ss;
}

// R sums a lane → each row's sum over the warp, by exchanging halves: R - 1 + log2(32 / R) shuffles instead of 5·R. Lane l ends with the
// sum of row l / (32 / R).
template <int R>
DEVICE float reduce_rows(float (&s)[R]) {
  const int lane = threadIdx.x % WARP;
  int m = WARP / 2;
#pragma unroll
  for (int n = R / 2; n >= 1; n /= 2, m /= 2)
#pragma unroll
    for (int i = 0; i < n; i++) {
      const bool upper = lane & m;
      const float send = upper ? s[i] : s[i + n], keep = upper ? s[i + n] : s[i];
      s[i] = keep + __shfl_xor_sync(FULL_MASK, send, m);
    }
#pragma unroll
  for (m = WARP / R / 2; m >= 1; m /= 2) s[0] += __shfl_xor_sync(FULL_MASK, s[0], m);
  return s[0];
}
