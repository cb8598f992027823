// norm.cu - RMSNorm of prefill's rows: h[t] / sqrt(mean(h[t]²) + eps)·g.
//
// rmsnorm_f32        out[t] f16, rounded once: the input of QKV and gate/up
// rmsnorm_bf16       the same as bf16, for products that take no f16 (include/gemm_sm90.cuh)
// rmsnorm_split_f32  the same as a sum of two bf16, hi + lo, so that two products with bf16 operands give an fp32-exact one: the input
//                    of the LM head when every row's logits are wanted
// grid: (T); block: 256, one block a row. bytes moved: T·D·(4 + 2) (split: 4 + 4), g from L2.
// PRECOND  D % 8 == 0; pointers 16-byte aligned. minimum arch: sm_80
// Decode has no such kernel: there every block of the next product normalises for itself (include/gemv.cuh).
#include "include/norm.cuh"

KERNEL(256) void
rmsnorm_f32(uint16_t* out,   // [T, D] f16 bits
            const float* h,  // [T, D]
            const bf16* g,   // [D]
            int D, float eps) {
  SHARED(float[WARP], scratch);
  const int64_t row = int64_t(blockIdx.x) * D;
  uint4* o = reinterpret_cast<uint4*>(out + row);
  norm_row(h + row, g, D, eps, scratch, [&](int i, const float(&f)[8]) { o[i] = pack_f16x8(f); });
}

KERNEL(256) void
rmsnorm_bf16(bf16* out,       // [T, D]
             const float* h,  // [T, D]
             const bf16* g,   // [D]
             int D, float eps) {
  SHARED(float[WARP], scratch);
  const int64_t row = int64_t(blockIdx.x) * D;
  uint4* o = reinterpret_cast<uint4*>(out + row);
  norm_row(h + row, g, D, eps, scratch, [&](int i, const float(&f)[8]) { o[i] = pack_bf16x8(f); });
}

KERNEL(256) void
rmsnorm_split_f32(bf16* hi,        // [T, D]
                  bf16* lo,        // [T, D]
                  const float* h,  // [T, D]
                  const bf16* g,   // [D]
                  int D, float eps) {
  SHARED(float[WARP], scratch);
  const int64_t row = int64_t(blockIdx.x) * D;
  uint4 *o_hi = reinterpret_cast<uint4*>(hi + row), *o_lo = reinterpret_cast<uint4*>(lo + row);
  norm_row(h + row, g, D, eps, scratch, [&](int i, const float(&f)[8]) {
    const uint4 top = pack_bf16x8(f);
    float t[8], rest[8];
    unpack_bf16(t, top);
#pragma unroll
    for (int j = 0; j < 8; j++) rest[j] = f[j] - t[j];
    o_hi[i] = top;
    o_lo[i] = pack_bf16x8(rest);
  });
}
