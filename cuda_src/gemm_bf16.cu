// gemm_bf16.cu - prefill's matrix products with bf16 weights. Tiling, grid, block and PRECONDs: include/gemm.cuh.
//
// gemm_bias_bf16    out[T,N] bf16 = A[T,K]·W[N,K]ᵀ + b       Q, K, V
// gemm_add_bf16     h[T,N] fp32 += A·Wᵀ                      O-projection, down-projection
// gemm_swiglu_bf16  act[T,I] bf16 = silu(A·Wgᵀ)·(A·Wuᵀ)      gate and up
// gemm_logits_bf16  logits[T,V] fp32 = A·Wᵀ                  LM head, when every row's logits are wanted
// minimum arch: sm_80
#include "include/gemm.cuh"

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_bias_bf16(bf16* out,          // [T, N]
               const bf16* a,      // [T, K]
               const bf16* w,      // [N, K]
               const float* bias,  // [N] or null
               int T, int N, int K) {
  gemm_bias<GemmBf16>(out, a, w, nullptr, bias, T, N, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_add_bf16(float* h,       // [T, N] residual stream, in place
              const bf16* a,  // [T, K]
              const bf16* w,  // [N, K]
              int T, int N, int K) {
  gemm_f32<GemmBf16, true>(h, a, w, nullptr, T, N, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_swiglu_bf16(bf16* act,           // [T, I]
                 const bf16* a,       // [T, K]
                 const bf16* w_gate,  // [I, K]
                 const bf16* w_up,    // [I, K]
                 int T, int I, int K) {
  gemm_swiglu<GemmBf16>(act, a, w_gate, nullptr, w_up, nullptr, T, I, K);
}

KERNEL_OCC(GEMM_THREADS, 2) void
gemm_logits_bf16(float* logits,  // [T, V]
                 const bf16* a,  // [T, K]
                 const bf16* w,  // [V, K]
                 int T, int V, int K) {
  gemm_f32<GemmBf16, false>(logits, a, w, nullptr, T, V, K);
}
