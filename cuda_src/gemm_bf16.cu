// gemm_bf16.cu - prefill's matrix products with bf16 weights. Tiling, grid, block and PRECONDs: include/gemm.cuh.
//
// gemm_qkv_bf16     q, k, v = RoPE(A[T,K]·W[N,K]ᵀ + b); k, v → cache
// gemm_add_bf16     h[T,N] fp32 += A·Wᵀ                      O-projection, down-projection
// gemm_store_bf16   y[T,N] bf16 = A·Wᵀ                       the same two, a rank's share of them under tensor parallelism
// gemm_swiglu_bf16  act[T,I] bf16 = silu(A·Wgᵀ)·(A·Wuᵀ)      gate and up
// gemm_f32_bf16     c[T,N] fp32 = A·Wᵀ                       LM head, when every row's logits are wanted
// minimum arch: sm_80
#include "include/gemm.cuh"

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_qkv_bf16(bf16* q,             // [T, H, HD]
              void* k_cache,       // of this layer: include/kv_cache.cuh
              void* v_cache,
              uint8_t* fine,
              const uint16_t* a,   // [T, K] f16 bits
              const bf16* w,       // [(H + 2·KV)·HD, K]: Q rows, K rows, V rows
              const float* bias,   // [(H + 2·KV)·HD]
              const float2* rope,  // [max_len, HD/2] {cos, sin}
              const int32_t* span,  // {pos0, tokens}: position of row 0, and how many rows are no padding
              int T, int H, int KV, int HD, int max_len, int e4m3, int K) {
  gemm_qkv<GemmBf16<OperandF16>>(q, KvCache{k_cache, v_cache, fine, e4m3, KV, max_len}, a, w, nullptr, bias, rope, span, T, H, HD, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_add_bf16(float* h,           // [T, N] residual stream, in place
              const uint16_t* a,  // [T, K] bf16 bits
              const bf16* w,      // [N, K]
              int T, int N, int K) {
  gemm_f32<GemmBf16<OperandBf16>, true>(h, a, w, nullptr, T, N, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_store_bf16(bf16* y,            // [T, N]
                const uint16_t* a,  // [T, K] bf16 bits
                const bf16* w,      // [N, K]
                int T, int N, int K) {
  gemm_store<GemmBf16<OperandBf16>>(y, a, w, nullptr, T, N, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_swiglu_bf16(bf16* act,           // [T, I]
                 const uint16_t* a,   // [T, K] f16 bits
                 const bf16* w_gate,  // [I, K]
                 const bf16* w_up,    // [I, K]
                 int T, int I, int K) {
  gemm_swiglu<GemmBf16<OperandF16>>(act, a, w_gate, nullptr, w_up, nullptr, T, I, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_f32_bf16(float* c,           // [T, N]
              const uint16_t* a,  // [T, K] bf16 bits
              const bf16* w,      // [N, K]
              int T, int N, int K) {
  gemm_f32<GemmBf16<OperandBf16>, false>(c, a, w, nullptr, T, N, K);
}
