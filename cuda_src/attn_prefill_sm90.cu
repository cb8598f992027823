// attn_prefill_sm90.cu - attn_prefill.cu's function on Hopper: causal attention of T new tokens to the cache that already holds them.
//
//   out[t, h] = Σ_k softmax_k(q[t, h]·K[h/G, k] / √HD)·V[h/G, k],   k = 0 … pos0 + t,   t < T
//
// {pos0, T} is `span`, in device memory, so that a captured graph serves every length: rows of out from T on stay as they are.
// e4m3: out with a scale for each token and head (include/block_scale.cuh), for a product that takes it; HD 128.
// How: include/attn_sm90.cuh. V's heads are read where they lie; no kernel prepares anything.
// grid: at most as many blocks as are resident, one a multiprocessor; block: 384; dynamic shared memory: AttnRing, a kilobyte for its barriers.
// bytes moved: K and V once for each tile of 128 tokens and head, from L2; flops 4·HD·H·Σ(pos0 + t + 1).
// PRECOND  H % KV == 0; pos0 + T <= max_len; out 16-byte aligned; tensor maps as AttnArgs says. minimum arch: sm_90a
#include "include/attn_sm90.cuh"

#define OPERANDS                                                              \
  BY_VALUE TensorMap q,     /* of [rows, H, HD], rotated */                   \
      BY_VALUE TensorMap k, /* of [KV, max_len, HD] */                        \
      BY_VALUE TensorMap v, /* of [KV, max_len, HD] */                        \
      const int32_t *span,  /* {pos0, T} */                                   \
      int H, int KV, float scale_log2
#define ATTN_PREFILL(HD, ...)                                                                                \
  KERNEL_OCC(ATTN_BLOCK, 1) void attn_prefill_sm90_bf16_hd##HD(bf16* out, /* [rows, H, HD] */ OPERANDS) {    \
    attn_sm90<AttnShape<HD, __VA_ARGS__>>(q, k, v, out, nullptr, span, H, KV, scale_log2);                   \
  }
ATTN_PREFILL(64, 8, true)
ATTN_PREFILL(128, 4, false)

KERNEL_OCC(ATTN_BLOCK, 1) void
attn_prefill_sm90_e4m3_hd128(e4m3* out,           // [rows, H, HD]
                             uint8_t* exponents,  // [rows, H in whole 16 bytes]
                             OPERANDS) {
  attn_sm90<AttnShape<128, 4, false, true>>(q, k, v, out, exponents, span, H, KV, scale_log2);
}
