// bugs.cu - one mistake a kernel; tests/simt/test_reports.py says how each is reported.
#include "include/reduce.cuh"
#include "include/vec.cuh"

KERNEL(256) void writes_past_the_end(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) x[i] = 1.f;  // < is meant
}

KERNEL(256) void reads_before_the_start(float* out, const float* x) { out[threadIdx.x] = x[int(threadIdx.x) - 1]; }

KERNEL(32) void far_out_of_bounds(float* out, const float* x, int n) { out[threadIdx.x] = x[threadIdx.x + n]; }

KERNEL(32) void touches_another_argument(float* x, float* y, int64_t distance) {
  if (threadIdx.x == 0) x[distance] = 1.f;  // lands in y
}

KERNEL(32) void null_pointer(float* x, float* const* holder) { x[threadIdx.x] = (*holder)[threadIdx.x]; }

KERNEL(32) void past_static_shared(float* x) {
  SHARED(float[32], s);
  float* p = s;
  p[threadIdx.x + 1] = 1.f;
  __syncthreads();
  x[threadIdx.x] = s[threadIdx.x];
}

KERNEL(32) void past_dynamic_shared(float* x) {
  DYN_SHARED(float, s);
  s[threadIdx.x] = 1.f;
  if (threadIdx.x == 31) s[32] = 1.f;
  __syncthreads();
  x[threadIdx.x] = s[threadIdx.x];
}

KERNEL(32) void reads_unwritten_shared(float* x) {
  SHARED(float[32], s);
  if (threadIdx.x) s[threadIdx.x] = 1.f;
  __syncthreads();
  x[threadIdx.x] = s[threadIdx.x];
}

KERNEL(32) void misaligned_pack(uint32_t* x) {
  const uint4 v = ld_global_v4(x + 1);
  x[0] = v.x;
}

KERNEL(32) void misaligned_dereference(uint32_t* x) {
  const uint4 v = *reinterpret_cast<const uint4*>(x + 1);
  x[0] = v.x + v.y + v.z + v.w;
}

KERNEL(64) void divergent_barriers(float* x) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  x[threadIdx.x] = 0.f;
}

KERNEL(64) void returns_before_a_barrier(float* x) {
  if (threadIdx.x == 40) return;
  __syncthreads();
  x[threadIdx.x] = 0.f;
}

KERNEL(32) void shuffles_in_half_a_warp(float* x) {
  float v = 1.f;
  if (threadIdx.x < 16) v = warp_sum(v);
  x[threadIdx.x] = v;
}

KERNEL(32) void shuffles_against_a_barrier(float* x) {
  float v = 1.f;
  if (threadIdx.x < 16) v += __shfl_xor_sync(FULL_MASK, v, 1);
  __syncthreads();
  x[threadIdx.x] = v;
}

KERNEL(32) void shuffles_in_two_places(float* x) {
  float v = 1.f;
  if (threadIdx.x < 16)
    v += __shfl_xor_sync(FULL_MASK, v, 1);
  else
    v += __shfl_xor_sync(FULL_MASK, v, 2);
  x[threadIdx.x] = v;
}

KERNEL(32) void shuffles_outside_its_mask(float* x) {
  float v = 1.f;
  if (threadIdx.x < 16) v = __shfl_sync(0x0000ffffu, v, 20);
  x[threadIdx.x] = v;
}

KERNEL(32) void lane_not_in_its_mask(float* x) {
  float v = 1.f;
  if (threadIdx.x == 3) v = __shfl_xor_sync(0xfffffff0u, v, 1);
  x[threadIdx.x] = v;
}

KERNEL(48) void names_lanes_that_do_not_exist(float* x) { x[threadIdx.x] = warp_sum(1.f); }

KERNEL(32) void polls_for_ever(uint32_t* flag) {
  if (threadIdx.x == 0)
    while (ld_acquire_sys_u32(flag) != 1) {
    }
  __syncthreads();
}

KERNEL(32) void polls_two_flags_for_ever(uint32_t* flag) {
  while (ld_volatile_u32(flag + threadIdx.x) + ld_volatile_u32(flag + 32 + threadIdx.x) != 2) {
  }
}

// Reading one value again and again is no poll that waits for a change.
KERNEL(32) void reads_repeatedly(uint32_t* flag, int times) {
  uint32_t sum = 0;
  for (int i = 0; i < times; i++) sum += ld_volatile_u32(flag);
  flag[1 + threadIdx.x] = sum;
}

KERNEL(32) void polls_until_a_deadline(uint32_t* flag, uint64_t limit_ns) {
  const uint64_t until = global_timer_ns() + limit_ns;
  while (ld_volatile_u32(flag) == 0)
    if (global_timer_ns() > until) trap();
}

// A grid-wide barrier: hangs as soon as more blocks are launched than the device holds at once.
KERNEL(1024) void grid_barrier(uint32_t* count) {
  if (threadIdx.x == 0) {
    red_release_sys_add_u32(count, 1);
    while (ld_acquire_sys_u32(count) < gridDim.x) {
    }
  }
  __syncthreads();
}

KERNEL(32) void shifts_too_far(int32_t* x) { x[0] = 1 << x[0]; }

KERNEL(32) void overflows_an_int(int32_t* x) { x[0] = x[0] + 1; }

KERNEL(32) void indexes_past_a_row(int32_t* x) {
  SHARED(float[2][4], s);
  s[0][x[0]] = 1.f;
}

KERNEL(32) void divides_by_zero(int32_t* x) { x[threadIdx.x] = 7 / x[threadIdx.x]; }

__noinline__ float recurse(float* x, int n) {
  volatile float here[512];
  here[n % 512] = x[0];
  return n ? recurse(x, n - 1) + here[n % 512] : 0.f;
}
KERNEL(32) void overflows_its_stack(float* x) { x[threadIdx.x] = recurse(x, 1000); }

KERNEL(32) void asserts(int32_t* x) { assert(x[threadIdx.x] == 0); }

KERNEL(32) void traps(int32_t* x) {
  if (x[0]) trap();
}

KERNEL(32) void too_much_static_shared(float* x) {
  SHARED(float[9000], a);
  SHARED(float[9000], b);
  a[threadIdx.x] = 1.f;
  b[threadIdx.x] = 2.f;
  x[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
}

KERNEL(32) void never_waits_for_its_predecessor(int32_t* x) { x[threadIdx.x]++; }

KERNEL(32) void nothing(int32_t*, int, float) {}

// The index is only known at run time and goes through a pointer, so that nothing but AddressSanitizer sees it.
KERNEL(32) void local_array_overrun(int32_t* x) {
  int local[8];
  for (int i = 0; i < 8; i++) local[i] = i;
  int* p = local;
  asm volatile("" : "+r"(p));
  x[0] = p[x[0]];
}
