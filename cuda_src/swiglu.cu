// swiglu.cu - act = silu(gate)·up, element by element, behind products that do not fuse it (qwen_raw/kernels/lt_products.py).
//
// grid: as many blocks as have a pack for each thread; block: 256; may be a dependent launch. bytes moved: n·6.
// PRECOND  n % 8 == 0; pointers 16-byte aligned. minimum arch: sm_80
#include "include/vec.cuh"

KERNEL(256) void
swiglu_bf16(bf16* act,         // [n]
            const bf16* gate,  // [n]
            const bf16* up,    // [n]
            int64_t n) {
  griddep_launch();
  griddep_wait();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n / 8) return;
  float g[8], u[8];
  const uint4 a = ld_global_v4(gate + 8 * i), b = ld_global_v4(up + 8 * i);
  unpack_bf16(g, a), unpack_bf16(u, b);
#pragma unroll
  for (int j = 0; j < 8; j++) g[j] = g[j] * u[j] * rcp_approx(1.f + ex2_approx(g[j] * -1.44269504f));
  reinterpret_cast<uint4*>(act)[i] = pack_bf16x8(g);
}
