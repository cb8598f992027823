// gemv_each_bf16.cu - decode's products with bf16 weights for every row of a speculative pass, with the bits of one token's. The body, its layout
// and its PRECONDs: include/gemv_each.cuh.
//
// gemv_each_add_bf16       h[m] += W·x[m]                  O-projection, down-projection
// gemv_each_store_bf16     y[m] = W·x[m] as bf16           the same two, a rank's share of them
// gemv_each_exchange_bf16  h[m] += Σ over ranks of W·x[m]  the same two, the sum over ranks inside
// gemv_each_swiglu_bf16    act[m] = silu(Wg·n)·(Wu·n)      n = RMSNorm(h[m])
// gemv_each_qkv_bf16       q[m]; k, v → cache at *pos + m
// gemv_each_logits_bf16    logits[m] = W·n
// In the variants by C, the packs of a row that a thread holds, of gemv_bf16.cu. bytes moved: as there, W once for each group of rows. minimum arch: sm_80
#include "include/gemv_each.cuh"

#define EACH_PLAIN(C, R, WARPS, THREADS, BLOCKS)                                                                                                    \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_add_bf16_c##C(float* h /* [M, N] in place */, const bf16* x, /* [M, K] */                              \
      const bf16* w, /* [N, K] */ int N, int K, int M, int group, int chunk) {                                                                      \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_add<EachFma<WeightBf16, C, R, false, WARPS>>(h, x, w, nullptr, N, K, {M, group, chunk}, memory);                                           \
  }                                                                                                                                                 \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_store_bf16_c##C(bf16* y /* [M, N] */, const bf16* x, /* [M, K] */                                      \
      const bf16* w, /* [N, K] */ int N, int K, int M, int group, int chunk) {                                                                      \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_store<EachFma<WeightBf16, C, R, false, WARPS>>(y, x, w, nullptr, N, K, {M, group, chunk}, memory);                                         \
  }

#define EACH_EXCHANGE(C, R, WARPS, THREADS, BLOCKS)                                                                                                 \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_exchange_bf16_c##C(float* h /* [M, N] in place */, BY_VALUE Exchange end, int sum, const bf16* x, /* [M, K] */\
      const bf16* w, /* [N, K] */ int N, int K, int M, int group, int chunk) {                                                                      \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_exchange<EachFma<WeightBf16, C, R, false, WARPS>>(h, end, sum, x, w, nullptr, N, K, {M, group, chunk}, memory);                            \
  }
EACH_PLAIN(1, 8, 16, 512, 1)
EACH_PLAIN(2, 4, 16, 512, 1)
EACH_PLAIN(4, 2, 20, 608, 1)
EACH_PLAIN(8, 1, 16, 512, 1)
EACH_EXCHANGE(1, 8, 16, 512, 1)
EACH_EXCHANGE(2, 4, 16, 512, 1)
EACH_EXCHANGE(4, 2, 20, 512, 1)

#define EACH_NORMED(C, R, WARPS, THREADS, BLOCKS)                                                                                                   \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_swiglu_bf16_c##C(bf16* act /* [M, I] */, const float* h, /* [M, K] */ const bf16* g, /* [K] */         \
      const bf16* w_gate, /* [I, K] */ const bf16* w_up, int I, int K, float eps, int M, int group, int chunk) {                                    \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_swiglu<EachFma<WeightBf16, C, R, true, WARPS>>(act, h, g, w_gate, nullptr, w_up, nullptr, I, K, eps, {M, group, chunk}, memory);           \
  }                                                                                                                                                 \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_qkv_bf16_c##C(bf16* q /* [M, H, HD] */, void* k_cache, void* v_cache, uint8_t* fine,                   \
      const float* h, /* [M, K] */ const bf16* g, const bf16* w, /* [(H + 2·KV)·HD, K] */ const float* bias,                                        \
      const float2* rope, /* [max_len, HD/2] */ const int32_t* pos, /* [1] of row 0 */ int H, int KV, int log_half, int max_len,                    \
      int e4m3, int K, float eps, int M, int group, int chunk) {                                                                                    \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_qkv<EachFma<WeightBf16, C, R, true, WARPS>>(q, KvCache{k_cache, v_cache, fine, e4m3, KV, max_len}, h, g, w, nullptr, bias,                 \
                                                                rope, pos, H, log_half, K, eps, {M, group, chunk}, memory);                         \
  }                                                                                                                                                 \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_logits_bf16_c##C(float* logits /* [M, V] */, const float* h, /* [M, K] */ const bf16* g,               \
      const bf16* w, /* [V, K] */ int V, int K, float eps, int M, int group, int chunk) {                                                           \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_logits<EachFma<WeightBf16, C, R, true, WARPS>>(logits, h, g, w, V, K, eps, {M, group, chunk}, memory);                                     \
  }
EACH_NORMED(1, 8, 16, 448, 1)
EACH_NORMED(2, 4, 16, 512, 1)
