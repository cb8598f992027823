// races.cu - pairs of kernels, one ordered, one with the ordering left out; tests/simt/test_races.py tells them apart.
#include "include/reduce.cuh"
#include "include/vec.cuh"

// ---- within a block --------------------------------------------------------------------------------------------------
template <bool SYNC>
DEVICE void rotate(float* x) {
  SHARED(float[64], s);
  s[threadIdx.x] = x[threadIdx.x];
  if (SYNC) __syncthreads();
  x[threadIdx.x] = s[(threadIdx.x + 33) % 64];
}
KERNEL(64) void barrier_ok(float* x) { rotate<true>(x); }
KERNEL(64) void barrier_missing(float* x) { rotate<false>(x); }

// The second use of a buffer needs a barrier after the first one's reads.
template <bool SYNC>
DEVICE void twice(float* x) {
  SHARED(float[64], s);
  float sum = 0.f;
  for (int round = 0; round < 2; round++) {
    s[threadIdx.x] = x[64 * round + threadIdx.x];
    __syncthreads();
    sum += s[63 - threadIdx.x];
    if (SYNC) __syncthreads();
  }
  x[threadIdx.x] = sum;
}
KERNEL(64) void reuse_ok(float* x) { twice<true>(x); }
KERNEL(64) void reuse_too_early(float* x) { twice<false>(x); }

template <bool SYNC>
DEVICE void neighbour(float* x) {
  SHARED(float[32], s);
  s[threadIdx.x] = x[threadIdx.x];
  if (SYNC) __syncwarp();
  const float v = s[threadIdx.x ^ 1];
  if (SYNC) __syncwarp();
  x[threadIdx.x] = v;
}
KERNEL(32) void syncwarp_ok(float* x) { neighbour<true>(x); }
KERNEL(32) void syncwarp_missing(float* x) { neighbour<false>(x); }

// A shuffle makes lanes meet, but it does not order memory.
KERNEL(32) void shuffle_is_no_fence(float* x) {
  SHARED(float[32], s);
  s[threadIdx.x] = x[threadIdx.x];
  const float v = __shfl_xor_sync(FULL_MASK, 1.f, 1);
  x[threadIdx.x] = v + s[threadIdx.x ^ 1];
}

// ---- between blocks --------------------------------------------------------------------------------------------------
KERNEL(32) void blocks_overlap(float* x) { x[threadIdx.x] = float(blockIdx.x); }

enum Fence { ACQ_REL, AFTER_BARRIER, BEFORE_BARRIER, NONE };

// Last-block combine: every block leaves a partial, the last one to count itself sums them.
template <Fence FENCE>
DEVICE void combine(float* total, float* part, uint32_t* counter) {
  SHARED(uint32_t, arrived);
  part[blockIdx.x * blockDim.x + threadIdx.x] = 1.f;
  if (FENCE == BEFORE_BARRIER) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (FENCE == AFTER_BARRIER) __threadfence();
    arrived = FENCE == ACQ_REL ? atom_inc_acq_rel_gpu(counter, gridDim.x - 1) : atomicInc(counter, gridDim.x - 1);
    if (FENCE == AFTER_BARRIER || FENCE == BEFORE_BARRIER) __threadfence();
  }
  __syncthreads();
  if (arrived != gridDim.x - 1 || threadIdx.x) return;
  float sum = 0.f;
  for (uint32_t i = 0; i < gridDim.x * blockDim.x; i++) sum += part[i];
  *total = sum;
}
KERNEL(64) void combine_acq_rel(float* total, float* part, uint32_t* counter) { combine<ACQ_REL>(total, part, counter); }
KERNEL(64) void combine_fenced(float* total, float* part, uint32_t* counter) { combine<AFTER_BARRIER>(total, part, counter); }
KERNEL(64) void combine_fence_before_barrier(float* total, float* part, uint32_t* counter) { combine<BEFORE_BARRIER>(total, part, counter); }
KERNEL(64) void combine_unfenced(float* total, float* part, uint32_t* counter) { combine<NONE>(total, part, counter); }

// A flag from one block to another.
template <bool ORDERED>
DEVICE void message(float* x, uint32_t* flag) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    x[0] = 7.f;
    if (ORDERED)
      st_release_sys_u32(flag, 1);
    else
      st_volatile_u32(flag, 1);
  } else {
    while ((ORDERED ? ld_acquire_sys_u32(flag) : ld_volatile_u32(flag)) == 0) {
    }
    x[1] = x[0];
  }
}
KERNEL(32) void message_ok(float* x, uint32_t* flag) { message<true>(x, flag); }
KERNEL(32) void message_relaxed(float* x, uint32_t* flag) { message<false>(x, flag); }

// ---- between launches ------------------------------------------------------------------------------------------------
KERNEL(32) void produce(float* x) {
  griddep_launch();
  griddep_wait();
  x[threadIdx.x] += 1.f;
}
KERNEL(32) void consume_ok(float* y, const float* x) {
  griddep_wait();
  y[threadIdx.x] = x[threadIdx.x];
}
KERNEL(32) void consume_too_early(float* y, const float* x) {
  const float v = x[threadIdx.x];
  griddep_wait();
  y[threadIdx.x] = v;
}
