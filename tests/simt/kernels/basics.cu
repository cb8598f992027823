// basics.cu - small kernels that show each ability of the simulator.
#include "include/reduce.cuh"
#include "include/vec.cuh"

KERNEL(256) void vector_add(float* c, const float* a, const float* b, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

// out[b] = sum of x[b·n … b·n + n - 1]: shuffles, static shared memory, a barrier.
KERNEL(1024) void block_sums(float* out, const float* x, int n) {
  SHARED(float[WARP], scratch);
  float s = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) s += x[int64_t(blockIdx.x) * n + i];
  s = block_sum(s, scratch);
  if (threadIdx.x == 0) out[blockIdx.x] = s;
}

// out[b] = sum of squares, through fmaf.
KERNEL(1024) void block_norms(float* out, const float* x, int n) {
  SHARED(float[WARP], scratch);
  float s = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) s = fmaf(x[int64_t(blockIdx.x) * n + i], x[int64_t(blockIdx.x) * n + i], s);
  s = block_sum(s, scratch);
  if (threadIdx.x == 0) out[blockIdx.x] = s;
}

// Reverses each block's blockDim.x values through dynamic shared memory.
KERNEL(1024) void reverse(int32_t* x) {
  DYN_SHARED(int32_t, s);
  int32_t* mine = x + blockIdx.x * blockDim.x;
  s[threadIdx.x] = mine[threadIdx.x];
  __syncthreads();
  mine[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}

// total[0] = sum over all blocks, combined by the last block to arrive.
KERNEL(256) void grid_sum(float* total, float* part, uint32_t* counter, const float* x, int n) {
  SHARED(float[WARP], scratch);
  SHARED(uint32_t, arrived);
  float s = 0.f;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
  s = block_sum(s, scratch);
  if (threadIdx.x == 0) {
    part[blockIdx.x] = s;
    arrived = atom_inc_acq_rel_gpu(counter, gridDim.x - 1);
  }
  __syncthreads();
  if (arrived != gridDim.x - 1 || threadIdx.x) return;
  float sum = 0.f;
  for (int b = 0; b < int(gridDim.x); b++) sum += part[b];
  *total = sum;
}

// c[16×8] = a[16×K]·b[8×K]ᵀ by one warp.
KERNEL(32) void mma_tile(float* c, const bf16* a, const bf16* b, int K) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const uint32_t *A = reinterpret_cast<const uint32_t*>(a), *B = reinterpret_cast<const uint32_t*>(b);
  float acc[4] = {0.f, 0.f, 0.f, 0.f};
  for (int k = 0; k < K; k += 16) {
    const uint32_t fa[4] = {A[(g * K + k) / 2 + t], A[((g + 8) * K + k) / 2 + t], A[(g * K + k) / 2 + t + 4], A[((g + 8) * K + k) / 2 + t + 4]};
    const uint32_t fb[2] = {B[(g * K + k) / 2 + t], B[(g * K + k) / 2 + t + 4]};
    mma_bf16_16816(acc, fa, fb);
  }
  c[g * 8 + 2 * t] = acc[0], c[g * 8 + 2 * t + 1] = acc[1];
  c[(g + 8) * 8 + 2 * t] = acc[2], c[(g + 8) * 8 + 2 * t + 1] = acc[3];
}

KERNEL(32) void add_one(int32_t* x) {
  griddep_launch();
  griddep_wait();
  x[blockIdx.x * blockDim.x + threadIdx.x]++;
}

KERNEL(32) void ring_write(uint64_t* ring, uint64_t value) {
  if (threadIdx.x == 0) st_release_sys_u64(ring, value);
}

// order[1 + b] = how many blocks arrived before block b; order[0] counts them.
KERNEL(32) void arrival(uint32_t* order) {
  if (threadIdx.x == 0) order[1 + blockIdx.x] = atomicAdd(&order[0], 1u);
}
