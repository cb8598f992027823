// gemv_each_fp8.cu - decode's products with e4m3 weights for every row of a speculative pass, with the bits of one token's. The body, its layout
// and its PRECONDs: include/gemv_each.cuh.
//
// gemv_each_add_fp8       h[m] += W·x[m]                  O-projection, down-projection
// gemv_each_store_fp8     y[m] = W·x[m] as bf16           the same two, a rank's share of them
// gemv_each_exchange_fp8  h[m] += Σ over ranks of W·x[m]  the same two, the sum over ranks inside
// gemv_each_swiglu_fp8    act[m] = silu(Wg·n)·(Wu·n)      n = RMSNorm(h[m])
// gemv_each_qkv_fp8       q[m]; k, v → cache at *pos + m
// In gemv_fp8.cu's variants. bytes moved: as there, W once for each group of rows. minimum arch: sm_80
#include "include/gemv_each.cuh"

#define EACH_PLAIN(V, C, R, WARPS, THREADS, BLOCKS)                                                                                                 \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_add_fp8_##V(float* h /* [M, N] in place */, const bf16* x, /* [M, K] */                                \
      const e4m3* w, /* [N, K] */ const float* scale, /* [N] */ int N, int K, int M, int group, int chunk) {                                        \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_add<EachDiagonal<MmaE4m3, C, R, false, WARPS>>(h, x, w, scale, N, K, {M, group, chunk}, memory);                                           \
  }                                                                                                                                                 \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_store_fp8_##V(bf16* y /* [M, N] */, const bf16* x, /* [M, K] */                                        \
      const e4m3* w, /* [N, K] */ const float* scale, /* [N] */ int N, int K, int M, int group, int chunk) {                                        \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_store<EachDiagonal<MmaE4m3, C, R, false, WARPS>>(y, x, w, scale, N, K, {M, group, chunk}, memory);                                         \
  }

#define EACH_EXCHANGE(V, C, R, WARPS, THREADS, BLOCKS)                                                                                              \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_exchange_fp8_##V(float* h /* [M, N] in place */, BY_VALUE Exchange end, int sum, const bf16* x, /* [M, K] */\
      const e4m3* w, /* [N, K] */ const float* scale, /* [N] */ int N, int K, int M, int group, int chunk) {                                        \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_exchange<EachDiagonal<MmaE4m3, C, R, false, WARPS>>(h, end, sum, x, w, scale, N, K, {M, group, chunk}, memory);                            \
  }
EACH_PLAIN(c1, 1, 8, 8, 256, 2)
EACH_PLAIN(c1w, 1, 8, 16, 512, 1)
EACH_PLAIN(c2, 2, 4, 20, 608, 1)
EACH_PLAIN(c4, 4, 2, 16, 512, 1)
EACH_EXCHANGE(c1, 1, 8, 8, 256, 2)
EACH_EXCHANGE(c1w, 1, 8, 16, 512, 1)
EACH_EXCHANGE(c2, 2, 4, 20, 512, 1)
EACH_EXCHANGE(c4, 4, 2, 16, 512, 1)

#define EACH_NORMED(V, C, R, WARPS, THREADS, BLOCKS)                                                                                                \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_swiglu_fp8_##V(bf16* act /* [M, I] */, const float* h, /* [M, K] */ const bf16* g, /* [K] */           \
      const e4m3* w_gate, /* [I, K] */ const float* s_gate, const e4m3* w_up, const float* s_up, int I, int K, float eps, int M, int group, int chunk) {\
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_swiglu<EachDiagonal<MmaE4m3, C, R, true, WARPS>>(act, h, g, w_gate, s_gate, w_up, s_up, I, K, eps, {M, group, chunk}, memory);             \
  }                                                                                                                                                 \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_each_qkv_fp8_##V(bf16* q /* [M, H, HD] */, void* k_cache, void* v_cache, uint8_t* fine,                     \
      const float* h, /* [M, K] */ const bf16* g, const e4m3* w, /* [(H + 2·KV)·HD, K] */ const float* scale, const float* bias,                    \
      const float2* rope, /* [max_len, HD/2] */ const int32_t* pos, /* [1] of row 0 */ int H, int KV, int log_half, int max_len,                    \
      int e4m3, int K, float eps, int M, int group, int chunk) {                                                                                    \
    DYN_SHARED(unsigned char, memory);                                                                                                              \
    each_qkv<EachDiagonal<MmaE4m3, C, R, true, WARPS>>(q, KvCache{k_cache, v_cache, fine, e4m3, KV, max_len}, h, g, w, scale, bias,                 \
                                                                rope, pos, H, log_half, K, eps, {M, group, chunk}, memory);                         \
  }
EACH_NORMED(c1, 1, 8, 8, 224, 2)
EACH_NORMED(c1w, 1, 8, 16, 512, 1)
EACH_NORMED(c2, 2, 4, 16, 384, 1)
