// last_row.cu - the residual stream of a prompt's last token: out = h[span.T - 1], the row that the LM head needs.
//
// A padded chunk has rows after it, and a captured graph serves every length: which row it is comes from device memory.
// grid: (1); block: 256. bytes moved: D·(4 + 4).
// PRECOND  1 <= span[1] <= rows of h; D % 4 == 0; pointers 16-byte aligned. minimum arch: sm_80
#include "include/vec.cuh"

KERNEL(256) void
last_row_f32(float* out,           // [D]
             const float* h,       // [rows, D]
             const int32_t* span,  // {pos0, T}
             int D) {
  const float4* src = reinterpret_cast<const float4*>(h + int64_t(span[1] - 1) * D);
  for (int i = threadIdx.x; i < D / 4; i += blockDim.x) reinterpret_cast<float4*>(out)[i] = src[i];
}
