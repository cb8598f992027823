// gemv_peers_fp8.cu - decode's products under tensor parallelism, e4m3 weights with one fp32 scale per output row, the sums over ranks inside.
//
// gemv_push_fp8          Σ's operand: this rank's s[N]·(W[N,K]·x[K]) to every rank             O-projection, down-projection
// gemv_peers_swiglu_fp8  h += Σ;  act[I] = silu(sg·Wg·n)·(su·Wu·n),  n = RMSNorm(h)[K]         gate and up, after O
// gemv_peers_qkv_fp8     h += Σ;  q, k, v = RoPE(s·Wqkv·n + b); k, v → cache                   Q, K, V, after down
// The LM head stays bf16 (gemv_peers_bf16.cu). Protocol and PRECONDs: include/gemv_peers.cuh. Products, grid, block, variants: gemv_fp8.cu.
// minimum arch: sm_80
#include "include/gemv.cuh"
#include "include/gemv_fma.cuh"
#include "include/gemv_peers.cuh"

// Where the compiler would spill, as in gemv_fp8.cu.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int PUSH_C2_ROWS = 2, PUSH_C4_ROWS = 1, SWIGLU_C1_BLOCKS = 3, QKV_C1_BLOCKS = 2;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int PUSH_C2_ROWS = 4, PUSH_C4_ROWS = 2, SWIGLU_C1_BLOCKS = 1, QKV_C1_BLOCKS = 1;
#else
constexpr int PUSH_C2_ROWS = 4, PUSH_C4_ROWS = 2, SWIGLU_C1_BLOCKS = 3, QKV_C1_BLOCKS = 2;
#endif

#define GEMV_PUSH(C, R, THREADS, BLOCKS)                                                               \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_push_fp8_c##C(BY_VALUE Exchange end, /* this rank's */         \
                                                      int sum,               /* half | 2·first     */  \
                                                      const bf16* x,         /* [K] */                 \
                                                      const e4m3* w,         /* [N, K], N = D */       \
                                                      const float* scale,    /* [N] */                 \
                                                      int N, int K) {                                  \
    DYN_SHARED(float, shared);                                                                         \
    gemv_push<Fma<WeightE4m3, C, R, false>>(end, sum & 1, x, w, scale, N, K, shared);                     \
  }
GEMV_PUSH(1, 8, 256, 2)
GEMV_PUSH(2, PUSH_C2_ROWS, 640, 1)
GEMV_PUSH(4, PUSH_C4_ROWS, 512, 1)

#define GEMV_PEERS(C, R, THREADS, SWIGLU_BLOCKS, QKV_BLOCKS)                                                                                  \
  KERNEL_OCC(THREADS, SWIGLU_BLOCKS) void gemv_peers_swiglu_fp8_c##C(bf16* act,             /* [I] */                                         \
                                                                     BY_VALUE Exchange end, /* this rank's, D = K */                          \
                                                                     int sum,               /* half | 2·first     */                          \
                                                                     const bf16* g,         /* [K] RMSNorm weight */                          \
                                                                     const e4m3* w_gate,    /* [I, K] */                                      \
                                                                     const float* s_gate,   /* [I] */                                         \
                                                                     const e4m3* w_up,      /* [I, K] */                                      \
                                                                     const float* s_up,     /* [I] */                                         \
                                                                     int I, int K, float eps) {                                               \
    DYN_SHARED(float, shared);                                                                                                                \
    gemv_swiglu<Fma<WeightE4m3, C, R, true>>(act, PeerHidden<8>(end, sum), g, w_gate, s_gate, w_up, s_up, I, K, eps, shared);                   \
  }                                                                                                                                           \
  KERNEL_OCC(THREADS, QKV_BLOCKS) void gemv_peers_qkv_fp8_c##C(bf16* q,               /* [H, HD] */                                           \
                                                               bf16* k_cache,         /* [KV, max_len, HD] of this layer */                   \
                                                               bf16* v_cache,         /* [KV, max_len, HD] */                                 \
                                                               BY_VALUE Exchange end, /* this rank's, D = K */                                \
                                                               int sum,               /* half | 2·first     */                                \
                                                               const bf16* g,         /* [K] */                                               \
                                                               const e4m3* w,         /* [(H + 2·KV)·HD, K]: Q rows, K rows, V rows */        \
                                                               const float* scale,    /* [(H + 2·KV)·HD] */                                   \
                                                               const float* bias,     /* [(H + 2·KV)·HD] */                                   \
                                                               const float2* rope,    /* [max_len, HD/2] {cos, sin} */                        \
                                                               const int32_t* pos,    /* [1] the token's position, < max_len */               \
                                                               int H, int KV, int log_half, int max_len, int K, float eps) {                  \
    DYN_SHARED(float, shared);                                                                                                                \
    gemv_qkv<Fma<WeightE4m3, C, R, true>>(q, k_cache, v_cache, PeerHidden<8>(end, sum), g, w, scale, bias, rope, pos, H, KV, log_half, max_len, K, eps, shared); \
  }
GEMV_PEERS(1, 8, 224, SWIGLU_C1_BLOCKS, QKV_C1_BLOCKS)
GEMV_PEERS(2, 4, 512, 1, 1)
