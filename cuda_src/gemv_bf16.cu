// gemv_bf16.cu - decode's four matrix-vector products with bf16 weights. The body, its layout and its PRECONDs: include/gemv.cuh.
//
// gemv_add_bf16     h[N] += W[N,K]·x[K]                                  O-projection, down-projection
// gemv_swiglu_bf16  act[I] = silu(Wg·n)·(Wu·n),  n = RMSNorm(h)[K]       gate and up
// gemv_qkv_bf16     q, k, v = RoPE(Wqkv·n + b); k, v → cache             Q, K, V
// gemv_logits_bf16  logits[V] = W[V,K]·n                                 LM head
// minimum arch: sm_80
#include "include/gemv.cuh"

constexpr int UNROLL = 4;  // 2 rows × 4 packs × 16 B × 32 lanes = 4 KB in flight a warp

KERNEL_OCC(GEMV_THREADS, 4) void
gemv_add_bf16(float* h,       // [N] residual stream, in place
              const bf16* x,  // [K]
              const bf16* w,  // [N, K]
              int N, int K) {
  DYN_SHARED(uint4, xs);
  gemv_add<WeightBf16<StageBf16>, UNROLL>(h, x, w, nullptr, N, K, xs);
}

KERNEL_OCC(GEMV_THREADS, 4) void
gemv_swiglu_bf16(bf16* act,           // [I]
                 const float* h,      // [K] residual stream
                 const bf16* g,       // [K] RMSNorm weight
                 const bf16* w_gate,  // [I, K]
                 const bf16* w_up,    // [I, K]
                 int I, int K, float eps) {
  DYN_SHARED(uint4, xs);
  gemv_swiglu<WeightBf16<StageF16>, UNROLL>(act, h, g, w_gate, nullptr, w_up, nullptr, I, K, eps, xs);
}

KERNEL_OCC(GEMV_THREADS, 4) void
gemv_qkv_bf16(bf16* q,             // [H, HD]
              bf16* k_cache,       // [KV, max_len, HD] of this layer
              bf16* v_cache,       // [KV, max_len, HD]
              const float* h,      // [K]
              const bf16* g,       // [K]
              const bf16* w,       // [(H + 2·KV)·HD, K]: Q rows, K rows, V rows
              const float* bias,   // [(H + 2·KV)·HD]
              const float2* rope,  // [max_len, HD/2] {cos, sin}
              const int32_t* pos,  // [1] the token's position, < max_len
              int H, int KV, int HD, int max_len, int K, float eps) {
  DYN_SHARED(uint4, xs);
  gemv_qkv<WeightBf16<StageF16>, UNROLL>(q, k_cache, v_cache, h, g, w, nullptr, bias, rope, pos, H, KV, HD, max_len, K, eps, xs);
}

KERNEL_OCC(GEMV_THREADS, 4) void
gemv_logits_bf16(float* logits,   // [V]
                 const float* h,  // [K]
                 const bf16* g,   // [K]
                 const bf16* w,   // [V, K]
                 int V, int K, float eps) {
  DYN_SHARED(uint4, xs);
  gemv_logits<WeightBf16<StageF32>, UNROLL>(logits, h, g, w, V, K, eps, xs);
}
