// gemm_bf16_sm90.cu - prefill's matrix products with bf16 weights on Hopper: bulk tensor copies and warpgroup products. How, grid, block,
// shared memory and the other PRECONDs: include/gemm_sm90.cuh. x is bf16 [T, K], every weight bf16 with rows of K.
//
// gemm_qkv_bf16_V     q, k, v = RoPE(x·W[N,K]ᵀ + b); k, v → cache    (V names a variant: few tokens or many, and the tile's width)
// gemm_add_bf16_V     h[T,N] fp32 += x·Wᵀ                            O-projection, down-projection
// gemm_store_bf16_V   c[T,N] bf16 = x·Wᵀ                             the same as a rank's part of a sum over ranks; with many tokens the rows go to their owners' memory
// gemm_swiglu_bf16_V  act[T,I] bf16 = silu(x·Wgᵀ)·(x·Wuᵀ)            gate and up
// PRECOND  K, N, I multiples of 8; HD 64 or 128. minimum arch: sm_90a
#include "include/gemm_ops_sm90.cuh"

#define OPERANDS BY_VALUE TensorMap x, BY_VALUE TensorMap w, BY_VALUE TensorMap y, float *partials, uint32_t *counters
#define SIZES int T, int K, int split_tiles, int pieces, int share_p
#define ARGS (GemmArgs{x, w, y, partials, counters, nullptr, nullptr, nullptr, T, K, split_tiles, pieces, share_p})
#define NAME(op, V, BLOCKS, ...) KERNEL_OCC((GemmShape<__VA_ARGS__>::THREADS), BLOCKS) void gemm_##op##_bf16_##V
#define INSTANCE(...) <ProductBf16, GemmShape<__VA_ARGS__>>

#define ADD(V, BLOCKS, ...) \
  NAME(add, V, BLOCKS, __VA_ARGS__)(float* h, OPERANDS, int N, SIZES) { gemm_add INSTANCE(__VA_ARGS__)(ARGS, h, N); }
#define STORE(V, BLOCKS, ...) \
  NAME(store, V, BLOCKS, __VA_ARGS__)(bf16* c, OPERANDS, BY_VALUE RowOwners owners, int N, SIZES) { gemm_store INSTANCE(__VA_ARGS__)(ARGS, c, owners, N); }
#define SWIGLU(V, BLOCKS, ...) \
  NAME(swiglu, V, BLOCKS, __VA_ARGS__)(bf16* act, OPERANDS, int I, SIZES) { gemm_swiglu INSTANCE(__VA_ARGS__)(ARGS, act, I); }
#define QKV(V, BLOCKS, ...)                                                                                                    \
  NAME(qkv, V, BLOCKS, __VA_ARGS__)(bf16* q, void* k_cache, void* v_cache, uint8_t* fine, OPERANDS, const float* bias, const float2* rope, const int32_t* span, int H, int KV,  \
                       int shift, int max_len, int e4m3, SIZES) {                                                          \
    gemm_qkv INSTANCE(__VA_ARGS__)(ARGS, QkvTarget{q, {k_cache, v_cache, fine, e4m3, KV, max_len}, bias, rope, span, T, H, shift});          \
  }

// (variant, blocks a multiprocessor, its shape): qwen_raw/kernels/gemm_sm90.py has the same table.
#define FEW16(op) op(few16, 2, true, 16, 6, 2, 1)
#define FEW64(op) op(few64, 2, true, 64, 4, 2, 1)
#define MANY112(op) op(many112, 1, false, 112, 7, 1, 2)
#define MANY128(op) op(many128, 1, false, 128, 6, 1, 2)
#define MANY144(op) op(many144, 1, false, 144, 6, 1, 2)
#define MANY160(op) op(many160, 1, false, 160, 6, 1, 2)
#define MANY192(op) op(many192, 1, false, 192, 5, 1, 2)
#define MANY224(op) op(many224, 1, false, 224, 5, 1, 2)
#define MANY256(op) op(many256, 1, false, 256, 4, 1, 2)
#define CUT128(op) op(cut128, 1, false, 128, 5, 1, 0)
#define EVERYWHERE(op) FEW16(op) FEW64(op) MANY128(op) MANY256(op)
EVERYWHERE(ADD)
CUT128(ADD)
MANY112(ADD)
MANY192(ADD)
MANY224(ADD)
EVERYWHERE(STORE)
CUT128(STORE)
MANY112(STORE)
MANY144(STORE)
MANY160(STORE)
MANY192(STORE)
MANY224(STORE)
EVERYWHERE(SWIGLU)
MANY144(SWIGLU)
MANY192(SWIGLU)
MANY224(SWIGLU)
FEW16(QKV)
FEW64(QKV)
MANY128(QKV)
MANY144(QKV)
MANY160(QKV)
MANY192(QKV)
MANY256(QKV)
CUT128(QKV)
