// rope.cu - prefill's rotation: Q rotated in place, K rotated into the cache, V copied into the cache. Decode fuses this (include/gemv.cuh).
//
// Rotation of the pair (x, y) = (dimension d, d + HD/2) at position p: (x·cos - y·sin, y·cos + x·sin), angle p·θ^(-2d/HD) from the table.
// grid: (T, H + 2·KV); block: HD/2 threads or any; one block a head of a token. bytes moved: T·(H + 2·KV)·HD·2, read and written.
// PRECOND  pos0 + T <= max_len; HD even. minimum arch: sm_80
#include "include/vec.cuh"

KERNEL(128) void
rope_append_bf16(bf16* qkv,           // [T, (H + 2·KV)·HD]; its Q part is rotated in place
                 bf16* k_cache,       // [KV, max_len, HD]
                 bf16* v_cache,       // [KV, max_len, HD]
                 const float2* rope,  // [max_len, HD/2] {cos, sin}
                 int H, int KV, int HD, int pos0, int max_len) {
  const int t = blockIdx.x, head = blockIdx.y, half = HD / 2, pos = pos0 + t;
  bf16* src = qkv + (int64_t(t) * (H + 2 * KV) + head) * HD;
  bf16* dst = head < H        ? src
              : head < H + KV ? k_cache + (int64_t(head - H) * max_len + pos) * HD
                              : v_cache + (int64_t(head - H - KV) * max_len + pos) * HD;
  for (int d = threadIdx.x; d < half; d += blockDim.x) {
    const float x = __bfloat162float(src[d]), y = __bfloat162float(src[d + half]);
    const float2 cs = head < H + KV ? rope[int64_t(pos) * half + d] : make_float2(1.f, 0.f);
    dst[d] = __float2bfloat16_rn(fmaf(x, cs.x, -y * cs.y));
    dst[d + half] = __float2bfloat16_rn(fmaf(y, cs.x, x * cs.y));
  }
}
