// gemv_bf16.cu - decode's four matrix-vector products with bf16 weights. The body, its layout and its PRECONDs: include/gemv.cuh, include/gemv_fma.cuh.
//
// gemv_add_bf16     h[N] += W[N,K]·x[K]                                  O-projection, down-projection
// gemv_store_bf16   y[N] = W[N,K]·x[K] as bf16                           the same two, a rank's share of them under tensor parallelism
// gemv_swiglu_bf16  act[I] = silu(Wg·n)·(Wu·n),  n = RMSNorm(h)[K]       gate and up
// gemv_qkv_bf16     q, k, v = RoPE(Wqkv·n + b); k, v → cache             Q, K, V
// gemv_logits_bf16  logits[V] = W[V,K]·n                                 LM head
// gemv_choose_bf16  the same, and the next id chosen from them (sample.cu)  LM head of a rank that holds all rows
// In variants by C, the packs of a row that a thread holds: add and store _c1, _c2, _c4, _c8; the others, which hold x in fp32, _c1 and _c2.
// R rows are in flight, C·R = 8 packs a thread. minimum arch: sm_80
#include "include/gemv.cuh"
#include "include/gemv_fma.cuh"

// Where the compilers would spill at half of the registers: below sm_89, and for sm_100 to sm_119.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int ADD_C1_ROWS = 4, NORMED_C1_BLOCKS = 2;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int ADD_C1_ROWS = 4, NORMED_C1_BLOCKS = 1;
#else
constexpr int ADD_C1_ROWS = 8, NORMED_C1_BLOCKS = 2;
#endif

#define GEMV_ADD(C, R, THREADS, BLOCKS)                                                        \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_add_bf16_c##C(float* h,      /* [N] in place */        \
                                                      const bf16* x, /* [K] */                 \
                                                      const bf16* w, /* [N, K] */              \
                                                      int N, int K) {                          \
    DYN_SHARED(float, shared);                                                                 \
    gemv_add<Fma<WeightBf16, C, R, false, THREADS / WARP>>(h, x, w, nullptr, N, K, shared);    \
  }                                                                                            \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_store_bf16_c##C(bf16* y,       /* [N] */               \
                                                        const bf16* x, /* [K] */               \
                                                        const bf16* w, /* [N, K] */            \
                                                        int N, int K) {                        \
    DYN_SHARED(float, shared);                                                                 \
    gemv_store<Fma<WeightBf16, C, R, false, THREADS / WARP>>(y, x, w, nullptr, N, K, shared);  \
  }
GEMV_ADD(1, ADD_C1_ROWS, 512, 2)
GEMV_ADD(2, 4, 512, 1)
GEMV_ADD(4, 2, 640, 1)
GEMV_ADD(8, 1, 512, 1)

#define GEMV_NORMED(C, R, THREADS, BLOCKS)                                                                                                                                         \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_swiglu_bf16_c##C(bf16* act,          /* [I] */                                                                                             \
                                                         const float* h,     /* [K] residual stream */                                                                             \
                                                         const bf16* g,      /* [K] RMSNorm weight */                                                                              \
                                                         const bf16* w_gate, /* [I, K] */                                                                                          \
                                                         const bf16* w_up,   /* [I, K] */                                                                                          \
                                                         int I, int K, float eps) {                                                                                                \
    DYN_SHARED(float, shared);                                                                                                                                                     \
    gemv_swiglu<Fma<WeightBf16, C, R, true, THREADS / WARP>>(act, h, g, w_gate, nullptr, w_up, nullptr, I, K, eps, shared);                                                        \
  }                                                                                                                                                                                \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_qkv_bf16_c##C(bf16* q,            /* [H, HD] */                                                                                            \
                                                      void* k_cache,      /* of this layer: include/kv_cache.cuh */                                                                \
                                                      void* v_cache,                                                                                                               \
                                                      uint8_t* fine,                                                                                                               \
                                                      const float* h,     /* [K] */                                                                                                \
                                                      const bf16* g,      /* [K] */                                                                                                \
                                                      const bf16* w,      /* [(H + 2·KV)·HD, K]: Q rows, K rows, V rows */                                                         \
                                                      const float* bias,  /* [(H + 2·KV)·HD] */                                                                                    \
                                                      const float2* rope, /* [max_len, HD/2] {cos, sin} */                                                                         \
                                                      const int32_t* pos, /* [1] the token's position, < max_len */                                                                \
                                                      int H, int KV, int log_half, int max_len, int e4m3, int K, float eps) {                                                      \
    DYN_SHARED(float, shared);                                                                                                                                                     \
    gemv_qkv<Fma<WeightBf16, C, R, true, THREADS / WARP>>(q, KvCache{k_cache, v_cache, fine, e4m3, KV, max_len}, h, g, w, nullptr, bias, rope, pos, H, log_half, K, eps, shared);  \
  }                                                                                                                                                                                \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_logits_bf16_c##C(float* logits,  /* [V] */                                                                                                 \
                                                         const float* h, /* [K] */                                                                                                 \
                                                         const bf16* g,  /* [K] */                                                                                                 \
                                                         const bf16* w,  /* [V, K] */                                                                                              \
                                                         int V, int K, float eps) {                                                                                                \
    DYN_SHARED(float, shared);                                                                                                                                                     \
    gemv_logits<Fma<WeightBf16, C, R, true, THREADS / WARP>>(logits, h, g, w, V, K, eps, shared);                                                                                  \
  }                                                                                                                                                                                \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_choose_bf16_c##C(float* logits,              /* [V] */                                                                                     \
                                                         const float* h,             /* [K] */                                                                                     \
                                                         const bf16* g,              /* [K] */                                                                                     \
                                                         const bf16* w,              /* [V, K] */                                                                                  \
                                                         int V, int K, float eps,                                                                                                  \
                                                         DecodeState* state,         /* [1] */                                                                                     \
                                                         const SampleParams* params, /* [1] */                                                                                     \
                                                         uint64_t* best,             /* [grid, 2] scratch: rank, hash */                                                           \
                                                         uint32_t* counter,          /* [1] */                                                                                     \
                                                         uint64_t* ring,             /* [slots, 2] host memory */                                                                  \
                                                         int slots) {                                                                                                              \
    DYN_SHARED(float, shared);                                                                                                                                                     \
    gemv_choose<Fma<WeightBf16, C, R, true, THREADS / WARP>>(logits, h, g, w, V, K, eps, state, params, best, counter, ring, slots, shared);                                       \
  }
GEMV_NORMED(1, 8, 448, NORMED_C1_BLOCKS)
GEMV_NORMED(2, 4, 512, 1)
