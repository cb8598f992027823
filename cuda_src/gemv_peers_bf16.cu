// gemv_peers_bf16.cu - decode's products under tensor parallelism, bf16 weights, with the sums over ranks inside: no all-reduce kernel.
//
// gemv_push_bf16          Σ's operand: this rank's W[N,K]·x[K] to every rank                 O-projection, down-projection
// gemv_peers_swiglu_bf16  h += Σ;  act[I] = silu(Wg·n)·(Wu·n),  n = RMSNorm(h)[K]            gate and up, after O
// gemv_peers_qkv_bf16     h += Σ;  q, k, v = RoPE(Wqkv·n + b); k, v → cache                  Q, K, V, after down
// gemv_peers_logits_bf16  h += Σ;  logits[V] = W[V,K]·n                                      LM head, after the last down
// Protocol and PRECONDs: include/gemv_peers.cuh. Products, grid, block: include/gemv.cuh, include/gemv_fma.cuh; variants _c1 … as there.
// minimum arch: sm_80
#include "include/gemv.cuh"
#include "include/gemv_fma.cuh"
#include "include/gemv_peers.cuh"

// Elsewhere than for sm_90 the compilers spill at half of the registers.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000)
constexpr int NORMED_C1_BLOCKS = 1;
#else
constexpr int NORMED_C1_BLOCKS = 2;
#endif

#define GEMV_PUSH(C, R, THREADS, BLOCKS)                                                                \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_push_bf16_c##C(BY_VALUE Exchange end, /* this rank's */         \
                                                       int sum,               /* half | 2·first     */  \
                                                       const bf16* x,         /* [K] */                 \
                                                       const bf16* w,         /* [N, K], N = D */       \
                                                       int N, int K) {                                  \
    DYN_SHARED(float, shared);                                                                          \
    gemv_push<Fma<WeightBf16, C, R, false>>(end, sum & 1, x, w, nullptr, N, K, shared);                    \
  }
GEMV_PUSH(1, 8, 512, 2)
GEMV_PUSH(2, 4, 512, 1)
GEMV_PUSH(4, 2, 640, 1)
GEMV_PUSH(8, 1, 512, 1)

#define GEMV_PEERS(C, R, THREADS, BLOCKS)                                                                                                     \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_peers_swiglu_bf16_c##C(bf16* act,             /* [I] */                                               \
                                                               BY_VALUE Exchange end, /* this rank's, D = K */                                \
                                                               int sum,               /* half | 2·first     */                                \
                                                               const bf16* g,         /* [K] RMSNorm weight */                                \
                                                               const bf16* w_gate,    /* [I, K] */                                            \
                                                               const bf16* w_up,      /* [I, K] */                                            \
                                                               int I, int K, float eps) {                                                     \
    DYN_SHARED(float, shared);                                                                                                                \
    gemv_swiglu<Fma<WeightBf16, C, R, true>>(act, PeerHidden<2>(end, sum), g, w_gate, nullptr, w_up, nullptr, I, K, eps, shared);               \
  }                                                                                                                                           \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_peers_qkv_bf16_c##C(bf16* q,               /* [H, HD] */                                              \
                                                            bf16* k_cache,         /* [KV, max_len, HD] of this layer */                      \
                                                            bf16* v_cache,         /* [KV, max_len, HD] */                                    \
                                                            BY_VALUE Exchange end, /* this rank's, D = K */                                   \
                                                            int sum,               /* half | 2·first     */                                   \
                                                            const bf16* g,         /* [K] */                                                  \
                                                            const bf16* w,         /* [(H + 2·KV)·HD, K]: Q rows, K rows, V rows */           \
                                                            const float* bias,     /* [(H + 2·KV)·HD] */                                      \
                                                            const float2* rope,    /* [max_len, HD/2] {cos, sin} */                           \
                                                            const int32_t* pos,    /* [1] the token's position, < max_len */                  \
                                                            int H, int KV, int log_half, int max_len, int K, float eps) {                     \
    DYN_SHARED(float, shared);                                                                                                                \
    gemv_qkv<Fma<WeightBf16, C, R, true>>(q, k_cache, v_cache, PeerHidden<2>(end, sum), g, w, nullptr, bias, rope, pos, H, KV, log_half, max_len, K, eps, shared); \
  }                                                                                                                                           \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_peers_logits_bf16_c##C(float* logits,         /* [V] */                                               \
                                                               BY_VALUE Exchange end, /* this rank's, D = K */                                \
                                                               int sum,               /* half | 2·first     */                                \
                                                               const bf16* g,         /* [K] */                                               \
                                                               const bf16* w,         /* [V, K] */                                            \
                                                               int V, int K, float eps) {                                                     \
    DYN_SHARED(float, shared);                                                                                                                \
    gemv_logits<Fma<WeightBf16, C, R, true>>(logits, PeerHidden<1>(end, sum), g, w, V, K, eps, shared);                                         \
  }
GEMV_PEERS(1, 8, 512, NORMED_C1_BLOCKS)
GEMV_PEERS(2, 4, 512, 1)
