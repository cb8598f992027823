// gemv_fp8.cu - decode's layer products with e4m3 weights and one fp32 scale per output row. Body, layout, PRECONDs: include/gemv.cuh.
//
// gemv_add_fp8     h[N] += s[N]·(W[N,K]·x[K])                            O-projection, down-projection
// gemv_swiglu_fp8  act[I] = silu(sg·Wg·n)·(su·Wu·n),  n = RMSNorm(h)[K]  gate and up
// gemv_qkv_fp8     q, k, v = RoPE(s·Wqkv·n + b); k, v → cache            Q, K, V
// The LM head stays bf16 (gemv_bf16.cu). Weights are widened e4m3 → f16 → f32, exactly; x is staged in 16 bits, sums are fp32.
// minimum arch: sm_80 (the conversion is one instruction from sm_89 on, software below)
#include "include/gemv.cuh"

constexpr int UNROLL = 4;

KERNEL_OCC(GEMV_THREADS, 3) void
gemv_add_fp8(float* h,            // [N] residual stream, in place
             const bf16* x,       // [K]
             const e4m3* w,       // [N, K]
             const float* scale,  // [N]
             int N, int K) {
  DYN_SHARED(uint4, xs);
  gemv_add<WeightE4m3<StageBf16>, UNROLL>(h, x, w, scale, N, K, xs);
}

KERNEL_OCC(GEMV_THREADS, 3) void
gemv_swiglu_fp8(bf16* act,            // [I]
                const float* h,       // [K] residual stream
                const bf16* g,        // [K] RMSNorm weight
                const e4m3* w_gate,   // [I, K]
                const float* s_gate,  // [I]
                const e4m3* w_up,     // [I, K]
                const float* s_up,    // [I]
                int I, int K, float eps) {
  DYN_SHARED(uint4, xs);
  gemv_swiglu<WeightE4m3<StageF16>, UNROLL>(act, h, g, w_gate, s_gate, w_up, s_up, I, K, eps, xs);
}

KERNEL_OCC(GEMV_THREADS, 3) void
gemv_qkv_fp8(bf16* q,             // [H, HD]
             bf16* k_cache,       // [KV, max_len, HD] of this layer
             bf16* v_cache,       // [KV, max_len, HD]
             const float* h,      // [K]
             const bf16* g,       // [K]
             const e4m3* w,       // [(H + 2·KV)·HD, K]: Q rows, K rows, V rows
             const float* scale,  // [(H + 2·KV)·HD]
             const float* bias,   // [(H + 2·KV)·HD]
             const float2* rope,  // [max_len, HD/2] {cos, sin}
             const int32_t* pos,  // [1] the token's position, < max_len
             int H, int KV, int HD, int max_len, int K, float eps) {
  DYN_SHARED(uint4, xs);
  gemv_qkv<WeightE4m3<StageF16>, UNROLL>(q, k_cache, v_cache, h, g, w, scale, bias, rope, pos, H, KV, HD, max_len, K, eps, xs);
}
