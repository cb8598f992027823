// attn_prefill.cu - causal attention of T new tokens to the cache that already holds them (and whatever came before).
//
//   out[t, h] = Σ_k softmax_k(q[t, h]·K[h/G, k] / √HD)·V[h/G, k],   k = 0 … pos0 + t,   t < T
//
// {pos0, T} is `span`, in device memory, so that a captured graph serves every length: rows of out from T on stay as they are.
// The plain one: a warp takes 16 queries of one head and walks the keys 16 at a time (include/attn.cuh), fragments straight from L1/L2.
// grid: (ceil(rows/64), H), rows >= T; block: 128 = 4 warps of 16 queries. The longest blocks come first.
// bytes moved: the cache once per 16 queries and head, from L2; flops 4·HD·H·Σ(pos0 + t + 1).
// PRECOND  HD 64 or 128 (by kernel name); H % KV == 0; all pointers 16-byte aligned; pos0 + T <= max_len. minimum arch: sm_80
#include "include/attn.cuh"

constexpr int WARPS = 4;

template <class F, int HD>
DEVICE void attn_prefill(bf16* out, const bf16* q, const typename F::Element* k_cache, const typename F::Element* v_cache, const uint8_t* fine,
                         const int32_t* span, int H, int KV, int max_len, float scale_log2) {
  const int pos0 = span[0], T = span[1];
  const int h = blockIdx.y, kv = h / (H / KV), g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  const int t0 = ((int(gridDim.x) - 1 - int(blockIdx.x)) * WARPS + int(threadIdx.x) / WARP) * ATTN_ROWS;
  if (t0 >= T) return;
  const int row[2] = {t0 + g, t0 + g + 8};
  uint32_t qf[HD / 16][4], fine_q[4];
  const bf16 *q0 = row[0] < T ? q + (int64_t(row[0]) * H + h) * HD : nullptr, *q1 = row[1] < T ? q + (int64_t(row[1]) * H + h) * HD : nullptr;
  attn_load_q<F, HD>(qf, q0, q1);
  if constexpr (F::FINE_PARTS) attn_load_fine_q<HD>(fine_q, q0, q1, fine_pairs(fine, KV, max_len, HD / 2, kv));
  const int64_t first = int64_t(kv) * max_len;
  const AttnHead<F> head = {k_cache + first * HD, v_cache + first * HD, fine + first * FINE};
  const int end = pos0 + min(T, t0 + ATTN_ROWS), limit[2] = {pos0 + row[0] + 1, pos0 + row[1] + 1};
  AttnState<HD> st;
  attn_init<HD>(st);
  for (int k0 = 0; k0 < end; k0 += ATTN_KEYS) attn_step<F, HD>(st, qf, fine_q, head, k0, end - 1, limit, scale_log2);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float inv = 1.f / attn_row_sum(st.l[r]);  // every row sees at least key 0
    if (row[r] >= T) continue;
    bf16* o = out + (int64_t(row[r]) * H + h) * HD + 16 * t;
#pragma unroll
    for (int j = 0; j < HD / 64; j++) {
      float lo[8], hi[8];
#pragma unroll
      for (int e = 0; e < 8; e++) lo[e] = st.o[8 * j + e][2 * r] * inv, hi[e] = st.o[8 * j + e][2 * r + 1] * inv;
      reinterpret_cast<uint4*>(o + 64 * j)[0] = pack_bf16x8(lo);
      reinterpret_cast<uint4*>(o + 64 * j)[1] = pack_bf16x8(hi);
    }
  }
}

// Blocks an SM. For sm_100 to sm_119 NVRTC 12.9 does not fit HD 128 into the registers that three leave, and spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int OCC = 2;
#else
constexpr int OCC = 3;
#endif

#define ATTN_PREFILL(F, NAME, HD)                                                                                      \
  KERNEL_OCC(WARPS * WARP, OCC) void attn_prefill_##NAME##_hd##HD(bf16* out,                 /* [T, H, HD] */          \
                                                       const bf16* q,             /* [T, H, HD], rotated */            \
                                                       const F::Element* k_cache, /* [KV, max_len, HD] */              \
                                                       const F::Element* v_cache, /* [KV, max_len, HD] */              \
                                                       const uint8_t* fine,       /* kv_cache.cuh */                   \
                                                       const int32_t* span,       /* {pos0, T} */                      \
                                                       int H, int KV, int max_len, float scale_log2) {                 \
    attn_prefill<F, HD>(out, q, k_cache, v_cache, fine, span, H, KV, max_len, scale_log2);                             \
  }
ATTN_PREFILL(CacheBf16, bf16, 64)
ATTN_PREFILL(CacheBf16, bf16, 128)
ATTN_PREFILL(CacheE4m3, e4m3, 64)
ATTN_PREFILL(CacheE4m3, e4m3, 128)
