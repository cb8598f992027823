// gemv_epilogue.cuh - what becomes of a product's sums: shared by the launches of include/gemv.cuh and by include/layers.cuh.
#pragma once
#include "vec.cuh"

DEVICE bf16 swiglu(float gate, float up) { return __float2bfloat16_rn(gate / (1.f + expf(-gate)) * up); }

// Where Q, K and V of one token go.
struct QkvOut {
  bf16 *q, *k_cache, *v_cache;  // [H, HD], [KV, max_len, HD] twice
  int H, KV, log_half, max_len, pos;

  DEVICE bool rotates(int unit) const { return unit >> log_half < H + KV; }
  // Unit p: dimensions d = p % (HD/2) and d + HD/2 of head p / (HD/2), turned by {cos, sin} (V: {1, 0}).
  DEVICE void store(int unit, float x, float y, float2 cs) const {
    const int half = 1 << log_half, HD = 2 * half, head = unit >> log_half, d = unit % half;
    bf16* out = head < H        ? q + head * HD
                : head < H + KV ? k_cache + (int64_t(head - H) * max_len + pos) * HD
                                : v_cache + (int64_t(head - H - KV) * max_len + pos) * HD;
    out[d] = __float2bfloat16_rn(fmaf(x, cs.x, -y * cs.y));
    out[d + half] = __float2bfloat16_rn(fmaf(y, cs.x, x * cs.y));
  }
};
