// norm.cu - RMSNorm of prefill's rows: out[t] = bf16(h[t] / sqrt(mean(h[t]²) + eps) · g), rounded once.
//
// grid: (T); block: 256, one block a row. bytes moved: T·D·(4 + 2), g from L2.
// PRECOND  D % 8 == 0; pointers 16-byte aligned. minimum arch: sm_80
// Decode has no such kernel: there every block of the next product normalises for itself (include/gemv.cuh).
#include "include/gemv.cuh"

KERNEL(GEMV_THREADS) void
rmsnorm_f32(bf16* out,       // [T, D]
            const float* h,  // [T, D]
            const bf16* g,   // [D]
            int D, float eps) {
  SHARED(float[WARP], scratch);
  const int64_t row = int64_t(blockIdx.x) * D;
  stage_norm<WeightBf16>(reinterpret_cast<uint4*>(out + row), h + row, g, D, eps, scratch);
}
