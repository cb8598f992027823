// gemv_operand.cuh - weights and activations as operands of mma.sync m16n8k16: 16-byte packs of bf16, or of e4m3 widened to f16.
#pragma once
#include "vec.cuh"

// ---- weights ---------------------------------------------------------------------------------------------------------------------------
// PACK weights in 16 bytes feed STEPS instructions; step s takes weights 4s … 4s + 3 of a lane's packs. x · X_SCALE is rounded to an operand
// for normed inputs, x · PLAIN_SCALE for plain ones; the low part counts LOW.
struct MmaBf16 {
  using type = bf16;
  static constexpr int PACK = 8, STEPS = 2;
  static constexpr bool SCALED = false;
  static constexpr float X_SCALE = 1.f, PLAIN_SCALE = 1.f, LOW = 1.f;
  static DEVICE void operand(uint32_t (&a)[4], uint4 r0, uint4 r1, int s) {
    a[0] = s ? r0.z : r0.x, a[1] = s ? r1.z : r1.x, a[2] = s ? r0.w : r0.y, a[3] = s ? r1.w : r1.y;
  }
  static DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16_16816(c, a, b); }
  static DEVICE uint32_t pair(float lo, float hi) { return pack_bf16(lo, hi); }
  static DEVICE float first(uint32_t w) { return bf16_lo(w); }
  static DEVICE float second(uint32_t w) { return bf16_hi(w); }
};
struct MmaE4m3 {
  using type = e4m3;
  static constexpr int PACK = 16, STEPS = 4;
  static constexpr bool SCALED = true;
  static constexpr float X_SCALE = 1.f / 512.f, PLAIN_SCALE = 1.f / 16.f, LOW = 1.f / 2048.f;
  static DEVICE void operand(uint32_t (&a)[4], uint4 r0, uint4 r1, int s) {
    const uint32_t w0 = s == 0 ? r0.x : s == 1 ? r0.y : s == 2 ? r0.z : r0.w, w1 = s == 0 ? r1.x : s == 1 ? r1.y : s == 2 ? r1.z : r1.w;
    widen_e4m3x4(a[0], a[2], w0), widen_e4m3x4(a[1], a[3], w1);
  }
  static DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_f16_16816(c, a, b); }
  static DEVICE uint32_t pair(float lo, float hi) {
    const __half2_raw h = __half2_raw(__floats2half2_rn(lo, hi));
    return uint32_t(h.x) | uint32_t(h.y) << 16;
  }
  static DEVICE float first(uint32_t w) { return __half22float2(__half2(__half2_raw{uint16_t(w), uint16_t(w >> 16)})).x; }
  static DEVICE float second(uint32_t w) { return __half22float2(__half2(__half2_raw{uint16_t(w), uint16_t(w >> 16)})).y; }
};
