// gemv_rows_fp8.cu - decode's layer products for 1 to 16 tokens at once, e4m3 weights with one fp32 scale per output row. Body, layout, grid,
// block, PRECONDs: include/gemv_rows.cuh.
//
// gemv_rows_add_fp8     h[M,N] += s·(X[M,K]·Wᵀ)                                  O-projection, down-projection
// gemv_rows_store_fp8   y[M,N] = bf16(s·(X·Wᵀ))                                  the same of one rank, whose share an all-reduce sums
// gemv_rows_swiglu_fp8  act[M,I] = silu(sg·(X̂·Wgᵀ))·(su·(X̂·Wuᵀ)),  X̂ = RMSNorm(h)   gate and up
// gemv_rows_qkv_fp8     q, k, v = RoPE(s·(X̂·Wqkvᵀ) + b); k, v → cache             Q, K, V of M consecutive positions
// Each in variants _m8, _m16: the most tokens. The LM head stays bf16 (gemv_rows_bf16.cu).
// minimum arch: sm_80 (the conversion is one instruction from sm_89 on, software below)
#include "include/gemv_rows.cuh"

#define ROWS_PLAIN(TOKENS)                                                                                            \
  KERNEL_OCC(TOKENS == 16 ? ROWS_TALL : ROWS_THREADS, TOKENS == 16 ? 1 : ROWS_NARROW) void gemv_rows_add_fp8_m##TOKENS(float* h,           /* [M, N] in place */                     \
                                                        const bf16* x,      /* [M, K] */                              \
                                                        const e4m3* w,      /* [N, K] */                              \
                                                        const float* scale, /* [N] */                                 \
                                                        ROWS_SPLIT, int N, int M, int K) {              \
    DYN_SHARED(float, shared);                                                                                        \
    rows_add<MmaE4m3, TOKENS>(h, x, w, scale, {ws, counters, S, K_block, G, together}, N, M, K, shared);                                                \
  }                                                                                                                   \
  KERNEL_OCC(TOKENS == 16 ? ROWS_TALL : ROWS_THREADS, TOKENS == 16 ? 1 : ROWS_NARROW) void gemv_rows_store_fp8_m##TOKENS(bf16* y,            /* [M, N] */                            \
                                                          const bf16* x,      /* [M, K] */                            \
                                                          const e4m3* w,      /* [N, K] */                            \
                                                          const float* scale, /* [N] */                               \
                                                          ROWS_SPLIT, int N, int M, int K) {            \
    DYN_SHARED(float, shared);                                                                                        \
    rows_store<MmaE4m3, TOKENS>(y, x, w, scale, {ws, counters, S, K_block, G, together}, N, M, K, shared);                                              \
  }
ROWS_PLAIN(8)
ROWS_PLAIN(16)

#define ROWS_NORMED(TOKENS)                                                                                                       \
  KERNEL_OCC(ROWS_THREADS, TOKENS == 16 ? 1 : ROWS_NARROW) void gemv_rows_swiglu_fp8_m##TOKENS(bf16* act,           /* [M, I] */                                      \
                                                           const float* h,      /* [M, K] residual stream */                      \
                                                           const bf16* g,       /* [K] RMSNorm weight */                          \
                                                           const e4m3* w_gate,  /* [I, K] */                                      \
                                                           const float* s_gate, /* [I] */                                         \
                                                           const e4m3* w_up,    /* [I, K] */                                      \
                                                           const float* s_up,   /* [I] */                                         \
                                                           ROWS_SPLIT, int I, int M, int K, float eps) {            \
    DYN_SHARED(float, shared);                                                                                                    \
    rows_swiglu<MmaE4m3, TOKENS>(act, h, g, w_gate, s_gate, w_up, s_up, {ws, counters, S, K_block, G, together}, I, M, K, eps, shared);                             \
  }                                                                                                                               \
  KERNEL_OCC(ROWS_THREADS, TOKENS == 16 ? 1 : ROWS_NARROW) void gemv_rows_qkv_fp8_m##TOKENS(bf16* q,            /* [M, H, HD] */                                      \
                                                        void* k_cache,      /* of this layer: include/kv_cache.cuh */             \
                                                        void* v_cache,                                                            \
                                                        uint8_t* fine,                                                            \
                                                        const float* h,     /* [M, K] */                                          \
                                                        const bf16* g,      /* [K] */                                             \
                                                        const e4m3* w,      /* [(H + 2·KV)·HD, K]: Q rows, K rows, V rows */      \
                                                        const float* scale, /* [(H + 2·KV)·HD] */                                 \
                                                        const float* bias,  /* [(H + 2·KV)·HD] */                                 \
                                                        const float2* rope, /* [max_len, HD/2] {cos, sin} */                      \
                                                        const int32_t* pos, /* [1] of token 0, pos + M <= max_len */              \
                                                        ROWS_SPLIT, int H, int KV, int log_half, int max_len, int e4m3,           \
                                                        int M, int K, float eps) {                                                \
    DYN_SHARED(float, shared);                                                                                                    \
    const KvCache cache{k_cache, v_cache, fine, e4m3, KV, max_len};                                                               \
    rows_qkv<MmaE4m3, TOKENS>(q, cache, h, g, w, scale, bias, rope, pos, {ws, counters, S, K_block, G, together}, H, log_half, M, K, eps, shared); \
  }
ROWS_NORMED(8)
ROWS_NORMED(16)
