// gemv_fp8_mma.cu - decode's layer products with e4m3 weights on tensor cores: the same functions as gemv_fp8.cu.
//
// gemv_add_fp8_mma     h[N] += s[N]·(W[N,K]·x[K])                            O-projection, down-projection
// gemv_swiglu_fp8_mma  act[I] = silu(sg·Wg·n)·(su·Wu·n),  n = RMSNorm(h)[K]  gate and up
// gemv_qkv_fp8_mma     q, k, v = RoPE(s·Wqkv·n + b); k, v → cache            Q, K, V
// Body and PRECONDs: include/gemv.cuh; layout and the precision of x: include/gemv_mma.cuh. minimum arch: sm_80 (the conversion is one
// instruction from sm_89 on, software below)
#include "include/gemv.cuh"
#include "include/gemv_mma.cuh"

#define GEMV_ADD(U, THREADS, BLOCKS)                                                        \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_add_fp8_mma(float* h,           /* [N] in place */  \
                                                     const bf16* x,      /* [K] */          \
                                                     const e4m3* w,      /* [N, K] */       \
                                                     const float* scale, /* [N] */          \
                                                     int N, int K) {                        \
    DYN_SHARED(float, shared);                                                              \
    gemv_add<Mma<U, false>>(h, x, w, scale, N, K, shared);                                  \
  }
GEMV_ADD(4, 256, 2)

#define GEMV_NORMED(U, THREADS, BLOCKS)                                                                                      \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_swiglu_fp8_mma(bf16* act,           /* [I] */                                        \
                                                        const float* h,      /* [K] residual stream */                       \
                                                        const bf16* g,       /* [K] RMSNorm weight */                        \
                                                        const e4m3* w_gate,  /* [I, K] */                                    \
                                                        const float* s_gate, /* [I] */                                       \
                                                        const e4m3* w_up,    /* [I, K] */                                    \
                                                        const float* s_up,   /* [I] */                                       \
                                                        int I, int K, float eps) {                                           \
    DYN_SHARED(float, shared);                                                                                               \
    gemv_swiglu<Mma<U, true>>(act, h, g, w_gate, s_gate, w_up, s_up, I, K, eps, shared);                                     \
  }                                                                                                                          \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_qkv_fp8_mma(bf16* q,            /* [H, HD] */                                        \
                                                     bf16* k_cache,      /* [KV, max_len, HD] of this layer */               \
                                                     bf16* v_cache,      /* [KV, max_len, HD] */                             \
                                                     const float* h,     /* [K] */                                           \
                                                     const bf16* g,      /* [K] */                                           \
                                                     const e4m3* w,      /* [(H + 2·KV)·HD, K]: Q rows, K rows, V rows */    \
                                                     const float* scale, /* [(H + 2·KV)·HD] */                               \
                                                     const float* bias,  /* [(H + 2·KV)·HD] */                               \
                                                     const float2* rope, /* [max_len, HD/2] {cos, sin} */                    \
                                                     const int32_t* pos, /* [1] the token's position, < max_len */           \
                                                     int H, int KV, int log_half, int max_len, int K, float eps) {           \
    DYN_SHARED(float, shared);                                                                                               \
    gemv_qkv<Mma<U, true>>(q, k_cache, v_cache, h, g, w, scale, bias, rope, pos, H, KV, log_half, max_len, K, eps, shared);  \
  }
GEMV_NORMED(4, 256, 2)
