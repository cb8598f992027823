// embed.cu - token ids → rows of the embedding, widened into the fp32 residual stream: h[t] = E[ids[t]].
//
// grid: (T) at most, blocks stride over the tokens; block: 256. bytes moved: T·D·(2 + 4).
// PRECOND  0 <= ids[t] < V (the host checks prompts, the sampler only chooses real rows); D % 8 == 0. minimum arch: sm_80
#include "include/vec.cuh"

KERNEL(256) void
embed_bf16(float* h,            // [T, D]
           const bf16* table,   // [V, D]
           const int32_t* ids,  // [T]
           int T, int D) {
  griddep_launch();
  griddep_wait();
  for (int t = blockIdx.x; t < T; t += gridDim.x) {
    const bf16* row = table + int64_t(ids[t]) * D;
    float4* dst = reinterpret_cast<float4*>(h + int64_t(t) * D);
    for (int i = threadIdx.x; i < D / 8; i += blockDim.x) {
      float f[8];
      unpack_bf16(f, ld_global_v4(row + 8 * i));
      dst[2 * i] = make_float4(f[0], f[1], f[2], f[3]);
      dst[2 * i + 1] = make_float4(f[4], f[5], f[6], f[7]);
    }
  }
}
