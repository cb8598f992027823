// kv_fold.cu - at load, for an e4m3 KV cache (qwen_raw/model/kv_fp8.py): what K and V can be, and scales folded into the weights.
//
// kv_norms_bf16, kv_norms_fp8  norms[n] = sqrt(Σ_k (s[n]·w[n, k]·g[k])²), g being the weight of the RMSNorm before the product; s: fp8 only
// kv_fold_bf16                 w[n, k] *= factor[n] in place; exact for powers of two
// grid: (N), one block a row; block: 256. bytes moved: N·K·2 (fp8: N·K), folded rows twice.
// PRECOND  K is a multiple of 8 (fp8: 16); pointers 16-byte aligned. minimum arch: sm_80
#include "include/reduce.cuh"
#include "include/vec.cuh"

KERNEL(256) void
kv_norms_bf16(float* norms,   // [N]
              const bf16* w,  // [N, K]
              const bf16* g,  // [K]
              int K) {
  SHARED(float[WARP], scratch);
  const bf16* row = w + int64_t(blockIdx.x) * K;
  float sum = 0.f;
  for (int i = threadIdx.x; i < K / 8; i += blockDim.x) {
    float x[8], y[8];
    unpack_bf16(x, ld_global_v4(row + 8 * i)), unpack_bf16(y, ld_global_v4(g + 8 * i));
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(x[j] * y[j], x[j] * y[j], sum);
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) norms[blockIdx.x] = sqrtf(sum);
}

KERNEL(256) void
kv_norms_fp8(float* norms,        // [N]
             const e4m3* w,       // [N, K]
             const float* scale,  // [N]
             const bf16* g,       // [K]
             int K) {
  SHARED(float[WARP], scratch);
  const e4m3* row = w + int64_t(blockIdx.x) * K;
  float sum = 0.f;
  for (int i = threadIdx.x; i < K / 8; i += blockDim.x) {
    const uint2 codes = reinterpret_cast<const uint2*>(row)[i];
    float x[2][4], y[8];
    unpack_e4m3(x[0], codes.x), unpack_e4m3(x[1], codes.y), unpack_bf16(y, ld_global_v4(g + 8 * i));
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(x[j / 4][j % 4] * y[j], x[j / 4][j % 4] * y[j], sum);
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) norms[blockIdx.x] = sqrtf(sum) * scale[blockIdx.x];
}

KERNEL(256) void
kv_fold_bf16(bf16* w,              // [N, K]
             const float* factor,  // [N]
             int K) {
  bf16* row = w + int64_t(blockIdx.x) * K;
  const float by = factor[blockIdx.x];
  for (int i = threadIdx.x; i < K / 8; i += blockDim.x) {
    float x[8];
    unpack_bf16(x, ld_global_v4(row + 8 * i));
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] *= by;
    reinterpret_cast<uint4*>(row)[i] = pack_bf16x8(x);
  }
}
