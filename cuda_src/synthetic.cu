// synthetic.cu - synthetic weights made where they are used, from a seed: bit for bit the values of loaders/synthetic.py.
//
//   u(i) = hash(i, tensor, seed) ∈ [-1, 1);  bf16: round(u·bound);  e4m3: round(u·448), whose row scale is bound/448
//
// What is made is a window of a row-major matrix: element j of the output is number i = first + j / columns·stride + j % columns of the tensor.
//
// grid: any (threads stride over the elements); block: 256. bytes moved: n·sizeof(element).
// PRECOND  every i < 2^63. minimum arch: sm_80
#include "include/vec.cuh"

DEVICE float synthetic_unit(uint64_t i, uint32_t tensor, uint32_t seed) {
  uint32_t x = uint32_t(i) * 0x9E3779B1u + uint32_t(i >> 32) * 0x85EBCA77u + tensor * 0xC2B2AE3Du + seed;
  x ^= x >> 16, x *= 0x7FEB352Du, x ^= x >> 15, x *= 0x846CA68Bu, x ^= x >> 16;
  return (float(x >> 8) - 8388608.0f) * 1.1920928955078125e-7f;  // 24 random bits, centred, times 2^-23
}

KERNEL(256) void
synthetic_bf16(bf16* out,  // [n]
               int64_t n, int64_t first, int64_t columns, int64_t stride, uint32_t tensor, uint32_t seed, float bound) {
  for (int64_t j = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; j < n; j += int64_t(gridDim.x) * blockDim.x)
    out[j] = __float2bfloat16_rn(synthetic_unit(first + j / columns * stride + j % columns, tensor, seed) * bound);
}

KERNEL(256) void
synthetic_e4m3(e4m3* out,  // [n]
               int64_t n, int64_t first, int64_t columns, int64_t stride, uint32_t tensor, uint32_t seed) {
  for (int64_t j = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; j < n; j += int64_t(gridDim.x) * blockDim.x)
    out[j] = e4m3(synthetic_unit(first + j / columns * stride + j % columns, tensor, seed) * 448.0f);
}
