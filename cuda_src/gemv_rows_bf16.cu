// gemv_rows_bf16.cu - decode's matrix products for 1 to 16 tokens at once, bf16 weights. Body, layout, grid, block, PRECONDs: include/gemv_rows.cuh.
//
// gemv_rows_add_bf16     h[M,N] += X[M,K]·Wᵀ                               O-projection, down-projection
// gemv_rows_store_bf16   y[M,N] = bf16(X·Wᵀ)                               the same of one rank, whose share an all-reduce sums
// gemv_rows_swiglu_bf16  act[M,I] = silu(X̂·Wgᵀ)·(X̂·Wuᵀ),  X̂ = RMSNorm(h)   gate and up
// gemv_rows_qkv_bf16     q, k, v = RoPE(X̂·Wqkvᵀ + b); k, v → cache         Q, K, V of M consecutive positions
// gemv_rows_logits_bf16  logits[M,V] = X̂·Wᵀ                                LM head
// Each in variants _m4 (normed only), _m8, _m16: the most tokens. minimum arch: sm_80
#include "include/gemv_rows.cuh"

#define ROWS_PLAIN(TOKENS)                                                                                          \
  KERNEL(ROWS_TALL) void gemv_rows_add_bf16_m##TOKENS(float* h,        /* [M, N] in place */                     \
                                                         const bf16* x,   /* [M, K] */                              \
                                                         const bf16* w,   /* [N, K] */                              \
                                                         ROWS_SPLIT, int N, int M, int K) {           \
    DYN_SHARED(float, shared);                                                                                      \
    rows_add<MmaBf16, TOKENS>(h, x, w, nullptr, {ws, counters, S, K_block, G, together}, N, M, K, shared);                                            \
  }                                                                                                                 \
  KERNEL(ROWS_TALL) void gemv_rows_store_bf16_m##TOKENS(bf16* y,       /* [M, N] */                              \
                                                           const bf16* x, /* [M, K] */                              \
                                                           const bf16* w, /* [N, K] */                              \
                                                           ROWS_SPLIT, int N, int M, int K) {         \
    DYN_SHARED(float, shared);                                                                                      \
    rows_store<MmaBf16, TOKENS>(y, x, w, nullptr, {ws, counters, S, K_block, G, together}, N, M, K, shared);                                          \
  }
ROWS_PLAIN(8)
ROWS_PLAIN(16)

#define ROWS_NORMED(TOKENS)                                                                                                      \
  KERNEL_OCC(TOKENS == 16 ? ROWS_THREADS : ROWS_TALL, 1) void gemv_rows_swiglu_bf16_m##TOKENS(bf16* act,          /* [M, I] */                                     \
                                                            const float* h,     /* [M, K] residual stream */                     \
                                                            const bf16* g,      /* [K] RMSNorm weight */                         \
                                                            const bf16* w_gate, /* [I, K] */                                     \
                                                            const bf16* w_up,   /* [I, K] */                                     \
                                                            ROWS_SPLIT, int I, int M, int K, float eps) {          \
    DYN_SHARED(float, shared);                                                                                                   \
    rows_swiglu<MmaBf16, TOKENS>(act, h, g, w_gate, nullptr, w_up, nullptr, {ws, counters, S, K_block, G, together}, I, M, K, eps, shared);                        \
  }                                                                                                                              \
  KERNEL_OCC(TOKENS == 16 ? ROWS_THREADS : ROWS_TALL, 1) void gemv_rows_qkv_bf16_m##TOKENS(bf16* q,            /* [M, H, HD] */                                    \
                                                         void* k_cache,      /* of this layer: include/kv_cache.cuh */           \
                                                         void* v_cache,                                                          \
                                                         uint8_t* fine,                                                          \
                                                         const float* h,     /* [M, K] */                                        \
                                                         const bf16* g,      /* [K] */                                           \
                                                         const bf16* w,      /* [(H + 2·KV)·HD, K]: Q rows, K rows, V rows */    \
                                                         const float* bias,  /* [(H + 2·KV)·HD] */                               \
                                                         const float2* rope, /* [max_len, HD/2] {cos, sin} */                    \
                                                         const int32_t* pos, /* [1] of token 0, pos + M <= max_len */            \
                                                         ROWS_SPLIT, int H, int KV, int log_half, int max_len, int e4m3,         \
                                                         int M, int K, float eps) {                                              \
    DYN_SHARED(float, shared);                                                                                                   \
    const KvCache cache{k_cache, v_cache, fine, e4m3, KV, max_len};                                                              \
    rows_qkv<MmaBf16, TOKENS>(q, cache, h, g, w, nullptr, bias, rope, pos, {ws, counters, S, K_block, G, together}, H, log_half, M, K, eps, shared); \
  }                                                                                                                              \
  KERNEL_OCC(TOKENS == 16 ? ROWS_THREADS : ROWS_TALL, 1) void gemv_rows_logits_bf16_m##TOKENS(float* logits,  /* [M, V] */                                         \
                                                            const float* h, /* [M, K] */                                         \
                                                            const bf16* g,  /* [K] */                                            \
                                                            const bf16* w,  /* [V, K] */                                         \
                                                            ROWS_SPLIT, int V, int M, int K, float eps) {          \
    DYN_SHARED(float, shared);                                                                                                   \
    rows_logits<MmaBf16, TOKENS>(logits, h, g, w, {ws, counters, S, K_block, G, together}, V, M, K, eps, shared);                                                  \
  }
ROWS_NORMED(4)
ROWS_NORMED(8)
ROWS_NORMED(16)
