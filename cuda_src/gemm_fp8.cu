// gemm_fp8.cu - prefill's matrix products with e4m3 weights and one fp32 scale per output row (W8A16: the weights are widened to bf16
// in shared memory, so prefill and decode compute the same function). Tiling, grid, block and PRECONDs: include/gemm.cuh.
//
// gemm_qkv_fp8     q, k, v = RoPE(s·(A[T,K]·W[N,K]ᵀ) + b); k, v → cache
// gemm_add_fp8     h[T,N] fp32 += s·(A·Wᵀ)                       O-projection, down-projection
// gemm_store_fp8   y[T,N] bf16 = s·(A·Wᵀ)                        the same two, a rank's share of them under tensor parallelism
// gemm_swiglu_fp8  act[T,I] bf16 = silu(sg·A·Wgᵀ)·(su·A·Wuᵀ)     gate and up
// minimum arch: sm_80
#include "include/gemm.cuh"

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_qkv_fp8(bf16* q,             // [T, H, HD]
             void* k_cache,       // of this layer: include/kv_cache.cuh
             void* v_cache,
             uint8_t* fine,
             const uint16_t* a,   // [T, K] f16 bits
             const e4m3* w,       // [(H + 2·KV)·HD, K]: Q rows, K rows, V rows
             const float* scale,  // [(H + 2·KV)·HD]
             const float* bias,   // [(H + 2·KV)·HD]
             const float2* rope,  // [max_len, HD/2] {cos, sin}
             const int32_t* span,  // {pos0, tokens}: position of row 0, and how many rows are no padding
             int T, int H, int KV, int HD, int max_len, int e4m3, int K) {
  gemm_qkv<GemmE4m3<OperandF16>>(q, KvCache{k_cache, v_cache, fine, e4m3, KV, max_len}, a, w, scale, bias, rope, span, T, H, HD, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_add_fp8(float* h,            // [T, N] residual stream, in place
             const uint16_t* a,   // [T, K] bf16 bits
             const e4m3* w,       // [N, K]
             const float* scale,  // [N]
             int T, int N, int K) {
  gemm_f32<GemmE4m3<OperandBf16>, true>(h, a, w, scale, T, N, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_store_fp8(bf16* y,             // [T, N]
               const uint16_t* a,   // [T, K] bf16 bits
               const e4m3* w,       // [N, K]
               const float* scale,  // [N]
               int T, int N, int K) {
  gemm_store<GemmE4m3<OperandBf16>>(y, a, w, scale, T, N, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_swiglu_fp8(bf16* act,            // [T, I]
                const uint16_t* a,    // [T, K] f16 bits
                const e4m3* w_gate,   // [I, K]
                const float* s_gate,  // [I]
                const e4m3* w_up,     // [I, K]
                const float* s_up,    // [I]
                int T, int I, int K) {
  gemm_swiglu<GemmE4m3<OperandF16>>(act, a, w_gate, s_gate, w_up, s_up, T, I, K);
}
