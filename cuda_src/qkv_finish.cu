// qkv_finish.cu - what becomes of a bare product of Q, K and V (qwen_raw/kernels/lt_products.py): bias, RoPE, queries to memory, keys and
// values to the cache. Rows from span's T on are padding and are written nowhere.
//
// grid: (T), a block a token; block: 256, a thread eight pairs of a head at a time; may be a dependent launch.
// bytes moved: T·N·(2 + 2), bias and angles from L2.
// PRECOND  HD 64 or 128; pointers 16-byte aligned; span as docs/ttft.md says. minimum arch: sm_80
#include "include/kv_cache.cuh"

KERNEL(256) void
qkv_finish_bf16(bf16* q,              // [T, H, HD]
                void* k_cache,        // [KV, max_len, HD]
                void* v_cache,        // the same
                uint8_t* fine,        // see include/kv_cache.cuh
                const bf16* y,        // [T, H + 2·KV, HD]
                const float* bias,    // [H + 2·KV, HD]
                const float2* rope,   // [max_len, HD/2] {cos, sin}
                const int32_t* span,  // {pos0, T}
                int H, int KV, int half, int max_len, int e4m3_cache) {
  griddep_launch();
  griddep_wait();
  const int t = blockIdx.x, heads = H + 2 * KV;
  if (t >= span[1]) return;
  const int64_t pos = span[0] + t;
  const KvCache cache{k_cache, v_cache, fine, e4m3_cache, KV, max_len};
  for (int i = threadIdx.x; i < heads * (half / 8); i += blockDim.x) {
    const int head = i / (half / 8), d = i % (half / 8) * 8;
    const bf16* in = y + (int64_t(t) * heads + head) * 2 * half + d;
    const float* b = bias + head * 2 * half + d;
    float x[8], z[8];
    unpack_bf16(x, ld_global_v4(in)), unpack_bf16(z, ld_global_v4(in + half));
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float2 cs = head < H + KV ? rope[pos * half + d + j] : make_float2(1.f, 0.f);
      const float first = x[j] + b[j], second = z[j] + b[half + j];
      x[j] = fmaf(first, cs.x, -second * cs.y);
      z[j] = fmaf(second, cs.x, first * cs.y);
    }
    const uint4 firsts = pack_bf16x8(x), seconds = pack_bf16x8(z);
    if (head >= H) {
      cache.append8(head - H, pos, half, d, firsts, seconds);
      continue;
    }
    bf16* out = q + (int64_t(t) * H + head) * 2 * half + d;
    *reinterpret_cast<uint4*>(out) = firsts;
    *reinterpret_cast<uint4*>(out + half) = seconds;
  }
}
