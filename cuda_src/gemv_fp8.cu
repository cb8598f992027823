// gemv_fp8.cu - decode's layer products with e4m3 weights and one fp32 scale per output row. Body, layout, PRECONDs: include/gemv.cuh.
//
// gemv_add_fp8     h[N] += s[N]·(W[N,K]·x[K])                            O-projection, down-projection
// gemv_store_fp8   y[N] = s[N]·(W[N,K]·x[K]) as bf16                     the same two, a rank's share of them under tensor parallelism
// gemv_swiglu_fp8  act[I] = silu(sg·Wg·n)·(su·Wu·n),  n = RMSNorm(h)[K]  gate and up
// gemv_qkv_fp8     q, k, v = RoPE(s·Wqkv·n + b); k, v → cache            Q, K, V
// Variants: c and C, the packs of a row that a thread holds, w for wide blocks: add and store _c1, _c1w, _c2, _c4; the others, whose x comes
// as fp32, _c1, _c1w, _c2. In flight are 8 packs a thread where registers allow, and up to 16 with normed inputs, whose rows are many. The LM
// head stays bf16 (gemv_bf16.cu). Weights are widened e4m3 → f16, exactly, and multiplied on tensor cores (include/gemv_diagonal.cuh); sums
// are fp32.
// minimum arch: sm_80 (the conversion is one instruction from sm_89 on, software below)
#include "include/gemv.cuh"
#include "include/gemv_diagonal.cuh"

// Where the compiler would spill: below sm_89 the conversion in software takes the registers of a second row in flight.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int ADD_C2_ROWS = 2;
#else
constexpr int ADD_C2_ROWS = 4;
#endif

#define GEMV_ADD(V, C, R, THREADS, BLOCKS)                                                    \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_add_fp8_##V(float* h,           /* [N] in place */    \
                                                    const bf16* x,      /* [K] */             \
                                                    const e4m3* w,      /* [N, K] */          \
                                                    const float* scale, /* [N] */             \
                                                    int N, int K) {                           \
    DYN_SHARED(float, shared);                                                                \
    gemv_add<Diagonal<MmaE4m3, C, R, false, THREADS / WARP>>(h, x, w, scale, N, K, shared);   \
  }                                                                                           \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_store_fp8_##V(bf16* y,            /* [N] */           \
                                                      const bf16* x,      /* [K] */           \
                                                      const e4m3* w,      /* [N, K] */        \
                                                      const float* scale, /* [N] */           \
                                                      int N, int K) {                         \
    DYN_SHARED(float, shared);                                                                \
    gemv_store<Diagonal<MmaE4m3, C, R, false, THREADS / WARP>>(y, x, w, scale, N, K, shared); \
  }
GEMV_ADD(c1, 1, 8, 256, 2)
GEMV_ADD(c1w, 1, 8, 512, 1)
GEMV_ADD(c2, 2, ADD_C2_ROWS, 640, 1)
GEMV_ADD(c4, 4, 2, 512, 1)

#define GEMV_NORMED(V, C, SWIGLU_ROWS, QKV_ROWS, THREADS, BLOCKS)                                                                                                                           \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_swiglu_fp8_##V(bf16* act,           /* [I] */                                                                                                       \
                                                       const float* h,      /* [K] residual stream */                                                                                       \
                                                       const bf16* g,       /* [K] RMSNorm weight */                                                                                        \
                                                       const e4m3* w_gate,  /* [I, K] */                                                                                                    \
                                                       const float* s_gate, /* [I] */                                                                                                       \
                                                       const e4m3* w_up,    /* [I, K] */                                                                                                    \
                                                       const float* s_up,   /* [I] */                                                                                                       \
                                                       int I, int K, float eps) {                                                                                                           \
    DYN_SHARED(float, shared);                                                                                                                                                              \
    gemv_swiglu<Diagonal<MmaE4m3, C, SWIGLU_ROWS, true, THREADS / WARP>>(act, h, g, w_gate, s_gate, w_up, s_up, I, K, eps, shared);                                                         \
  }                                                                                                                                                                                         \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_qkv_fp8_##V(bf16* q,            /* [H, HD] */                                                                                                       \
                                                    void* k_cache,      /* of this layer: include/kv_cache.cuh */                                                                           \
                                                    void* v_cache,                                                                                                                          \
                                                    uint8_t* fine,                                                                                                                          \
                                                    const float* h,     /* [K] */                                                                                                           \
                                                    const bf16* g,      /* [K] */                                                                                                           \
                                                    const e4m3* w,      /* [(H + 2·KV)·HD, K]: Q rows, K rows, V rows */                                                                    \
                                                    const float* scale, /* [(H + 2·KV)·HD] */                                                                                               \
                                                    const float* bias,  /* [(H + 2·KV)·HD] */                                                                                               \
                                                    const float2* rope, /* [max_len, HD/2] {cos, sin} */                                                                                    \
                                                    const int32_t* pos, /* [1] the token's position, < max_len */                                                                           \
                                                    int H, int KV, int log_half, int max_len, int e4m3, int K, float eps) {                                                                 \
    DYN_SHARED(float, shared);                                                                                                                                                              \
    gemv_qkv<Diagonal<MmaE4m3, C, QKV_ROWS, true, THREADS / WARP, 4>>(q, KvCache{k_cache, v_cache, fine, e4m3, KV, max_len}, h, g, w, scale, bias, rope, pos, H, log_half, K, eps, shared); \
  }
GEMV_NORMED(c1, 1, 16, 12, 224, 2)
GEMV_NORMED(c1w, 1, 16, 16, 512, 1)
GEMV_NORMED(c2, 2, 4, 4, 512, 1)
