// vec.cuh - 16-byte packs and the conversions bf16, f16, e4m3 → fp32 and back. Bits in, bits out: no half-precision arithmetic.
#pragma once
#include "ptx.cuh"

// The two bf16 of a 32-bit word: a bf16 is the upper half of a float.
DEVICE float bf16_lo(uint32_t w) { return __uint_as_float(w << 16); }
DEVICE float bf16_hi(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }

// Two floats → two bf16 in one word, round to nearest even (one cvt on sm_80+).
DEVICE uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return uint32_t(__bfloat16_as_ushort(v.x)) | uint32_t(__bfloat16_as_ushort(v.y)) << 16;
}

// Eight bf16 of a 16-byte pack → eight floats.
DEVICE void unpack_bf16(float (&f)[8], uint4 v) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f[2 * i] = bf16_lo(w[i]);
    f[2 * i + 1] = bf16_hi(w[i]);
  }
}
DEVICE uint4 pack_bf16x8(const float (&f)[8]) {
  return make_uint4(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7]));
}

// Eight f16 of a 16-byte pack → eight floats, and back, saturating: a value past ±65504 becomes that, not an infinity.
DEVICE void unpack_f16(float (&f)[8], uint4 v) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const __half2_raw h = {uint16_t(w[i]), uint16_t(w[i] >> 16)};
    const float2 p = __half22float2(__half2(h));
    f[2 * i] = p.x;
    f[2 * i + 1] = p.y;
  }
}
DEVICE uint32_t pack_f16(float lo, float hi) {
  const __half2_raw h = __half2_raw(__floats2half2_rn(fminf(fmaxf(lo, -65504.f), 65504.f), fminf(fmaxf(hi, -65504.f), 65504.f)));
  return uint32_t(h.x) | uint32_t(h.y) << 16;
}
DEVICE uint4 pack_f16x8(const float (&f)[8]) {
  return make_uint4(pack_f16(f[0], f[1]), pack_f16(f[2], f[3]), pack_f16(f[4], f[5]), pack_f16(f[6], f[7]));
}

// Four floats → four e4m3 in a word, to nearest even, ±448 at most (two cvt on sm_89+).
DEVICE uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  const uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t hi = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return lo | hi << 16;
}

// What makes a row with this largest magnitude e4m3: x·factor. A row of zeros (below 1e-30) stays one.
struct RowScale {
  float top, factor;
  DEVICE explicit RowScale(float largest) : top(largest), factor(largest > 1e-30f ? 448.f / largest : 0.f) {}
  // That gives x·unit back.
  DEVICE float scale(float unit) const { return factor > 0.f ? top * unit / 448.f : 1.f; }
};

// Two e4m3 → two f16 in a word, exactly (one F2FP on sm_89+, software below).
DEVICE uint32_t widen_e4m3(uint16_t w) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(w), __NV_E4M3);
  return uint32_t(h.x) | uint32_t(h.y) << 16;
}
// The four e4m3 of a word → two words of f16.
DEVICE void widen_e4m3x4(uint32_t& lo, uint32_t& hi, uint32_t w) {
  uint16_t a, b;
  split_halves(a, b, w);
  lo = widen_e4m3(a), hi = widen_e4m3(b);
}
// Four e4m3 of a word → four floats, exactly: e4m3 → f16 → f32.
DEVICE void unpack_e4m3(float (&f)[4], uint32_t w) {
  uint32_t h[2];
  widen_e4m3x4(h[0], h[1], w);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float2 p = __half22float2(__half2(__half2_raw{uint16_t(h[i]), uint16_t(h[i] >> 16)}));
    f[2 * i] = p.x;
    f[2 * i + 1] = p.y;
  }
}
