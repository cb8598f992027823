// reduce.cuh - sums and maxima over a warp and over a block. Every thread of the warp (block) must call; all get the result.
#pragma once
#include "common.cuh"

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int m = WARP / 2; m; m >>= 1) v += __shfl_xor_sync(FULL_MASK, v, m);
  return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
  for (int m = WARP / 2; m; m >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_MASK, v, m));
  return v;
}

// Sum over a block of whole warps. `scratch` holds one float a warp and may be reused after the next barrier the caller makes.
DEVICE float block_sum(float v, float* scratch) {
  const int warps = blockDim.x / WARP;
  v = warp_sum(v);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < warps; i++) total += scratch[i];  // the same order in every thread: bit-identical everywhere
  return total;
}
