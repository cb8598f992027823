// gemm_fp8_sm90.cu - prefill's matrix products with e4m3 weights and e4m3 activations (W8A8) on Hopper: twice the rate of bf16. How, grid,
// block, shared memory and the other PRECONDs: include/gemm_sm90.cuh. x is e4m3 [T, K] with one fp32 scale a token, every weight e4m3 with
// rows of K and one scale a row; the sums, fp32 with about 14 bits while the tensor core adds, are multiplied by both.
//
// gemm_qkv_fp8_V     q, k, v = RoPE(x·W[N,K]ᵀ + b); k, v → cache    (V names a variant: few tokens or many, and the tile's width)
// gemm_add_fp8_V     h[T,N] fp32 += x·Wᵀ                            O-projection, down-projection
// gemm_store_fp8_V   c[T,N] bf16 = x·Wᵀ                             the same as a rank's part of a sum over ranks
// gemm_swiglu_fp8_V  act[T,I] bf16 = silu(x·Wgᵀ)·(x·Wuᵀ)            gate and up
// PRECOND  K a multiple of 16, N and I of 8; HD 64 or 128. minimum arch: sm_90a
#include "include/gemm_ops_sm90.cuh"

#define OPERANDS BY_VALUE TensorMap x, BY_VALUE TensorMap w, float *partials, uint32_t *counters, const float *x_scale, const float *w_scale
#define SIZES int T, int K, int split_tiles, int pieces
#define ARGS (GemmArgs{x, w, partials, counters, x_scale, w_scale, T, K, split_tiles, pieces})
#define NAME(op, V, BLOCKS) KERNEL_OCC(GEMM_BLOCK, BLOCKS) void gemm_##op##_fp8_##V
#define INSTANCE(...) <ProductE4m3, GemmShape<__VA_ARGS__>>

#define ADD(V, BLOCKS, ...) \
  NAME(add, V, BLOCKS)(float* h, OPERANDS, int N, SIZES) { gemm_add INSTANCE(__VA_ARGS__)(ARGS, h, N); }
#define STORE(V, BLOCKS, ...) \
  NAME(store, V, BLOCKS)(bf16* c, OPERANDS, int N, SIZES) { gemm_store INSTANCE(__VA_ARGS__)(ARGS, c, N); }
#define SWIGLU(V, BLOCKS, ...) \
  NAME(swiglu, V, BLOCKS)(bf16* act, OPERANDS, int I, SIZES) { gemm_swiglu INSTANCE(__VA_ARGS__)(ARGS, act, I); }
#define QKV(V, BLOCKS, ...)                                                                                                    \
  NAME(qkv, V, BLOCKS)(bf16* q, bf16* k_cache, bf16* v_cache, OPERANDS, const float* bias, const float2* rope, int H, int KV,  \
                       int shift, int pos0, int max_len, SIZES) {                                                              \
    gemm_qkv INSTANCE(__VA_ARGS__)(ARGS, QkvTarget{q, k_cache, v_cache, bias, rope, T, H, KV, shift, pos0, max_len});          \
  }

// (variant, blocks a multiprocessor, its shape): qwen_raw/kernels/gemm_sm90.py has the same table.
#define FEW_VARIANTS(op) op(few16, 2, true, 16, 6, 2, 1) op(few64, 2, true, 64, 4, 2, 1)
#define MANY_VARIANTS(op)                                                            \
  op(many128, 1, false, 128, 7, 1, 1) op(many128x2, 1, false, 128, 7, 1, 2)          \
  op(many256, 1, false, 256, 4, 1, 1) op(many256x2, 1, false, 256, 4, 1, 2)
#define ODD_VARIANTS(op) op(many192, 1, false, 192, 5, 1, 1) op(many192x2, 1, false, 192, 5, 1, 2)
#define ODDER_VARIANTS(op) op(many224, 1, false, 224, 5, 1, 1) op(many224x2, 1, false, 224, 5, 1, 2)
#define EVERY_VARIANT(op) FEW_VARIANTS(op) MANY_VARIANTS(op) ODD_VARIANTS(op) ODDER_VARIANTS(op)
EVERY_VARIANT(ADD)
EVERY_VARIANT(STORE)
FEW_VARIANTS(SWIGLU)
MANY_VARIANTS(SWIGLU)
ODD_VARIANTS(SWIGLU)
FEW_VARIANTS(QKV)
MANY_VARIANTS(QKV)
