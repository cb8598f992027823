// quantize.cu - bf16 rows → e4m3 rows with one scale each: scale = max|w| / 448, q = round(w / scale). A zero row gets scale 1.
// Of the quantised rows a window of columns is kept (a rank's share of a row-parallel matrix); the scale is that of the whole row.
//
// The host's reference: loaders.dtypes.quantize_rows_e4m3. grid: (N), one block a row; block: 256. bytes moved: N·(K·2 + columns·(2 + 1)).
// PRECOND  K, first and columns are multiples of 16, first + columns <= K; pointers 16-byte aligned. minimum arch: sm_80
#include "include/reduce.cuh"
#include "include/vec.cuh"

KERNEL(256) void
quantize_rows_bf16(e4m3* q,        // [N, columns]
                   float* scale,   // [N]
                   const bf16* w,  // [N, K]
                   int K, int first, int columns) {
  SHARED(float[WARP], scratch);
  const bf16* row = w + int64_t(blockIdx.x) * K;
  e4m3* out = q + int64_t(blockIdx.x) * columns;
  float top = 0.f;
  for (int i = threadIdx.x; i < K / 8; i += blockDim.x) {
    float f[8];
    unpack_bf16(f, ld_global_v4(row + 8 * i));
#pragma unroll
    for (int j = 0; j < 8; j++) top = fmaxf(top, fabsf(f[j]));
  }
  top = warp_max(top);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = top;
  __syncthreads();
  for (int i = 0; i < int(blockDim.x) / WARP; i++) top = fmaxf(top, scratch[i]);
  const float s = top > 0.f ? top / 448.f : 1.f;
  if (threadIdx.x == 0) scale[blockIdx.x] = s;
  for (int i = threadIdx.x; i < columns / 8; i += blockDim.x) {
    float f[8];
    unpack_bf16(f, ld_global_v4(row + first + 8 * i));
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j++) word[j / 4] |= uint32_t(e4m3(f[j] / s).__x) << (8 * (j % 4));
    reinterpret_cast<uint2*>(out)[i] = make_uint2(word[0], word[1]);
  }
}
