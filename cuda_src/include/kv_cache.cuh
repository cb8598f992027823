// kv_cache.cuh - one layer's cache of keys and values, and how a token's are appended to it.
//
//   bf16  k, v: [KV, max_len, HD]
//   e4m3  k, v: [KV, max_len, HD], and `fine`, bytes: [KV, max_len, 16] second parts of keys, [KV, HD/2] slots, [KV, 8] pairs.
//
// Scales are in the weights (qwen_raw/model/kv_fp8.py). A pair (d, d + HD/2) of a head whose slot s is not COARSE is stored twice: what
// rounding to e4m3 took off dimension d is the key's byte s of `fine`, that of d + HD/2 is byte 8 + s. pairs[s] is d.
// A value is rounded to bf16 first, as it would be without.
#pragma once
#include "vec.cuh"

constexpr int FINE_PAIRS = 8, FINE = 2 * FINE_PAIRS;
constexpr int COARSE = 255;  // the slot of a pair that has no second part

// `fine` of a cache, by KV head. The tables' sizes follow from HD.
DEVICE const uint8_t* fine_slots(const uint8_t* fine, int KV, int max_len, int half, int kv) { return fine + int64_t(KV) * max_len * FINE + kv * half; }
DEVICE const uint8_t* fine_pairs(const uint8_t* fine, int KV, int max_len, int half, int kv) {
  return fine + int64_t(KV) * max_len * FINE + KV * half + kv * FINE_PAIRS;
}

DEVICE uint8_t to_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
DEVICE float from_e4m3(uint8_t c) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(c), __NV_E4M3);
  return __half22float2(__half2(h)).x;
}

// Where K and V go. `head` counts K's heads, then V's; rows and dimensions are those of a head.
struct KvCache {
  void *k, *v;
  uint8_t* fine;
  int e4m3;  // else bf16, and `fine` is not looked at
  int KV, max_len;

  // Of the pair (d, d + half): known before its value is.
  DEVICE int slot(int head, int half, int d) const {
    return e4m3 && head >= 0 && head < KV ? fine_slots(fine, KV, max_len, half, head)[d] : COARSE;
  }
  // Dimensions d and d + half of row `pos`.
  DEVICE void append(int head, int64_t pos, int half, int d, float x, float y, int slot) const {
    const int64_t row = int64_t(head < KV ? head : head - KV) * max_len + pos;
    void* cache = head < KV ? k : v;
    const bf16 bx = __float2bfloat16_rn(x), by = __float2bfloat16_rn(y);
    if (!e4m3) {
      bf16* out = static_cast<bf16*>(cache) + row * 2 * half + d;
      out[0] = bx, out[half] = by;
      return;
    }
    uint8_t* out = static_cast<uint8_t*>(cache) + row * 2 * half + d;
    const float fx = __bfloat162float(bx), fy = __bfloat162float(by);
    const uint8_t cx = to_e4m3(fx), cy = to_e4m3(fy);
    out[0] = cx, out[half] = cy;
    if (slot == COARSE) return;
    uint8_t* rest = fine + row * FINE + slot;
    rest[0] = to_e4m3(fx - from_e4m3(cx)), rest[FINE_PAIRS] = to_e4m3(fy - from_e4m3(cy));
  }
  // The same for eight pairs from d on, a multiple of 8, given as bf16.
  DEVICE void append8(int head, int64_t pos, int half, int d, uint4 first, uint4 second) const {
    const int64_t row = int64_t(head < KV ? head : head - KV) * max_len + pos;
    void* cache = head < KV ? k : v;
    if (!e4m3) {
      bf16* out = static_cast<bf16*>(cache) + row * 2 * half + d;
      *reinterpret_cast<uint4*>(out) = first, *reinterpret_cast<uint4*>(out + half) = second;
      return;
    }
    float f[2][8];
    unpack_bf16(f[0], first), unpack_bf16(f[1], second);
    uint32_t code[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) code[i][j / 4] |= uint32_t(to_e4m3(f[i][j])) << (8 * (j % 4));
    uint8_t* out = static_cast<uint8_t*>(cache) + row * 2 * half + d;
#pragma unroll
    for (int i = 0; i < 2; i++) *reinterpret_cast<uint2*>(out + i * half) = make_uint2(code[i][0], code[i][1]);
    if (head >= KV) return;
    const uint2 slots = *reinterpret_cast<const uint2*>(fine_slots(fine, KV, max_len, half, head) + d);
    if ((slots.x & slots.y) == 0xffffffffu) return;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int slot = int((j < 4 ? slots.x : slots.y) >> (8 * (j % 4))) & 255;
      if (slot == COARSE) continue;
#pragma unroll
      for (int i = 0; i < 2; i++)
        fine[row * FINE + i * FINE_PAIRS + slot] = to_e4m3(f[i][j] - from_e4m3(uint8_t(code[i][j / 4] >> (8 * (j % 4)))));
    }
  }
};
