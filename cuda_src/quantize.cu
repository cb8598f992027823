// quantize.cu - bf16 rows → e4m3 rows with one scale each: scale = max|w| / 448, q = round(w / scale). A zero row gets scale 1.
//
// quantize_rows_bf16    weights, at load, as the host would: loaders.dtypes.quantize_rows_e4m3. Of the quantised rows a window of columns is
//                       kept (a rank's share of a row-parallel matrix); the scale is that of the whole row.
// quantize_tokens_bf16  inputs of products, in every layer: the row is read once and held, q = round(w · (448 / max|w|))
// grid: (rows), one block a row; block: 256; tokens: whole warps, up to 512, may be a dependent launch.
// bytes moved: N·(K·2 + columns·(2 + 1)); T·K·(2 + 1).
// PRECOND  K, first and columns are multiples of 16, first + columns <= K; tokens: K <= 64·block; pointers 16-byte aligned. minimum arch: sm_80
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

constexpr int PACKS = 8;  // of eight elements, that a thread holds
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int TOKEN_BLOCKS = 1;  // a multiprocessor holds: with two the code for sm_100 spills
#else
constexpr int TOKEN_BLOCKS = 2;
#endif

KERNEL_OCC(512, TOKEN_BLOCKS) void
quantize_tokens_bf16(e4m3* q,        // [T, K]
                     float* scale,   // [T]
                     const bf16* a,  // [T, K]
                     int K) {
  SHARED(float[WARP], scratch);
  const int thread = threadIdx.x, step = blockDim.x;
  const int packs = K / 8 - thread;  // from this thread's first on
  const uint4* in = reinterpret_cast<const uint4*>(a + int64_t(blockIdx.x) * K) + thread;
  griddep_launch();
  griddep_wait();
  uint4 v[PACKS];
#pragma unroll
  for (int k = 0; k < PACKS; k++) v[k] = k * step < packs ? ld_global_v4(in + k * step) : make_uint4(0, 0, 0, 0);
  uint32_t high = 0, low = 0;  // magnitudes are ordered as their bits are: no floats that would be kept until they are rounded
#pragma unroll
  for (int k = 0; k < PACKS; k++) {
    const uint32_t w[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
    for (int j = 0; j < 4; j++) high = max(high, w[j] & 0x7fffffffu), low = max(low, w[j] << 16 & 0x7fff0000u);
  }
  float top = warp_max(__uint_as_float(max(high & 0xffff0000u, low)));
  if (thread % WARP == 0) scratch[thread / WARP] = top;
  __syncthreads();
  for (int i = 0; i < step / WARP; i++) top = fmaxf(top, scratch[i]);
  const RowScale by(top);
  if (thread == 0) scale[blockIdx.x] = by.scale(1.f);
  uint2* out = reinterpret_cast<uint2*>(q + int64_t(blockIdx.x) * K) + thread;
#pragma unroll
  for (int k = 0; k < PACKS; k++) {
    if (k * step >= packs) break;
    float f[8];
    unpack_bf16(f, v[k]);
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] *= by.factor;
    out[k * step] = make_uint2(pack_e4m3x4(f[0], f[1], f[2], f[3]), pack_e4m3x4(f[4], f[5], f[6], f[7]));
  }
}
