// norm.cuh - RMSNorm of one row by a whole block.
#pragma once
#include "reduce.cuh"
#include "vec.cuh"

// store(i, f) gets elements 8i … 8i + 7 of h / sqrt(mean(h²) + eps)·g, h fp32 [K], g bf16 [K]. `scratch`: a float a warp.
template <class Store>
DEVICE void norm_row(const float* h, const bf16* g, int K, float eps, float* scratch, Store store) {
  const float4* h4 = reinterpret_cast<const float4*>(h);
  float ss = 0.f;
  for (int i = threadIdx.x; i < K / 4; i += blockDim.x) {
    const float4 v = h4[i];
    ss = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, ss))));
  }
  const float inv = rsqrtf(block_sum(ss, scratch) / float(K) + eps);
  for (int i = threadIdx.x; i < K / 8; i += blockDim.x) {
    const float4 a = h4[2 * i], b = h4[2 * i + 1];
    float f[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, w[8];
    unpack_bf16(w, ld_global_v4(g + 8 * i));
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = f[j] * inv * w[j];
    store(i, f);
  }
}
