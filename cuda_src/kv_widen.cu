// kv_widen.cu - one layer's e4m3 cache as bf16, for attention that multiplies bf16 (attn_prefill_sm90.cu).
//
//   k[kv, key] = K[kv, key], with the second parts of the pairs that have one added, rounded once;  v[kv, key] = V[kv, key];  key < pos0 + T
//
// {pos0, T} is `span`, in device memory, so that a captured graph serves every length: rows from pos0 + T on stay as they are.
// grid: (any, 2·KV): K's heads, then V's; block: 256; a thread turns eight neighbours at a time.
// bytes moved: 3·HD for each of 2·KV heads' keys, and FINE for each of K's.
// PRECOND  HD a multiple of 16; all pointers 16-byte aligned; pos0 + T <= max_len. minimum arch: sm_80
#include "include/kv_cache.cuh"

KERNEL(256) void kv_widen_e4m3(bf16* k,                // [KV, max_len, HD]
                               bf16* v,                // [KV, max_len, HD]
                               const uint8_t* k_codes,  // [KV, max_len, HD]
                               const uint8_t* v_codes,  // [KV, max_len, HD]
                               const uint8_t* fine,     // kv_cache.cuh
                               const int32_t* span,     // {pos0, T}
                               int KV, int max_len, int HD) {
  const int head = int(blockIdx.y) % KV, half = HD / 2, packs = HD / 8;
  const bool keys = int(blockIdx.y) < KV;
  const int64_t first = int64_t(head) * max_len;
  const uint8_t* from = (keys ? k_codes : v_codes) + first * HD;
  bf16* to = (keys ? k : v) + first * HD;
  const uint8_t* slots = fine_slots(fine, KV, max_len, half, head);
  const int n = (span[0] + span[1]) * packs;
  for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += int(gridDim.x * blockDim.x)) {
    const int key = i / packs, d = i % packs * 8;
    const uint2 codes = *reinterpret_cast<const uint2*>(from + int64_t(i) * 8);
    float x[2][4], f[8];
    unpack_e4m3(x[0], codes.x), unpack_e4m3(x[1], codes.y);
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = x[j / 4][j % 4];
    if (keys) {
      const uint2 s = *reinterpret_cast<const uint2*>(slots + d % half);
      if ((s.x & s.y) != 0xffffffffu) {
        const uint8_t* rest = fine + (first + key) * FINE + (d < half ? 0 : FINE_PAIRS);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const int slot = int((j < 4 ? s.x : s.y) >> (8 * (j % 4))) & 255;
          if (slot != COARSE) f[j] += from_e4m3(rest[slot]);
        }
      }
    }
    *reinterpret_cast<uint4*>(to + int64_t(i) * 8) = pack_bf16x8(f);
  }
}
