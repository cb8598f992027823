// norm.cu - RMSNorm of prefill's rows: h[t] / sqrt(mean(h[t]²) + eps)·g.
//
// rmsnorm_f32        out[t] f16, rounded once: the input of QKV and gate/up
// rmsnorm_bf16       the same as bf16, for products that take no f16 (include/gemm_sm90.cuh)
// rmsnorm_e4m3       the same as e4m3 with one scale a row, that of the row before it is rounded: scale = max|x| / 448, q = x / scale
// rmsnorm_split_f32  the same as a sum of two bf16, hi + lo, so that two products with bf16 operands give an fp32-exact one: the input
//                    of the LM head when every row's logits are wanted
// grid: (T), one block a row. block: 256; bf16 and e4m3, which hold the row in registers and may be dependent launches: whole warps, up to 1024.
// bytes moved: T·D·(4 + 2) (split: 4 + 4; e4m3: 4 + 1), g from L2.
// PRECOND  D % 8 == 0; bf16, e4m3: D <= 32·block; pointers 16-byte aligned. minimum arch: sm_80
// Decode has no such kernel: there every block of the next product normalises for itself (include/gemv.cuh).
#include "include/norm.cuh"

constexpr int QUADS = 8;  // of four elements, that a thread holds

// f = h·g of this block's row, quad k of a thread at 4·(thread + k·threads); returns {1 / rms, max|h·g|}. `scratch`: a pair a warp.
DEVICE float2 weigh_row(float4 (&f)[QUADS], const float* h, const bf16* g, int D, float eps, float2* scratch) {
  const int quads = D / 4, step = blockDim.x, thread = threadIdx.x;
  griddep_launch();
  uint2 w[QUADS];
#pragma unroll
  for (int k = 0; k < QUADS; k++)
    if (thread + k * step < quads) w[k] = reinterpret_cast<const uint2*>(g)[thread + k * step];
  griddep_wait();
#pragma unroll
  for (int k = 0; k < QUADS; k++) f[k] = thread + k * step < quads ? ld_global_f4(h + 4 * (thread + k * step)) : make_float4(0.f, 0.f, 0.f, 0.f);
  float ss = 0.f, top = 0.f;
#pragma unroll
  for (int k = 0; k < QUADS; k++) {
    if (thread + k * step >= quads) break;
    float4& v = f[k];
    ss = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, ss))));
    v.x *= bf16_lo(w[k].x), v.y *= bf16_hi(w[k].x), v.z *= bf16_lo(w[k].y), v.w *= bf16_hi(w[k].y);
    top = fmaxf(top, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
  }
  ss = warp_sum(ss), top = warp_max(top);
  if (thread % WARP == 0) scratch[thread / WARP] = make_float2(ss, top);
  __syncthreads();
  ss = 0.f, top = 0.f;
  for (int i = 0; i < step / WARP; i++) ss += scratch[i].x, top = fmaxf(top, scratch[i].y);
  return make_float2(rsqrtf(ss / float(D) + eps), top);
}

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

KERNEL(1024) void
rmsnorm_bf16(bf16* out,       // [T, D]
             const float* h,  // [T, D]
             const bf16* g,   // [D]
             int D, float eps) {
  SHARED(float2[WARP], scratch);
  const int64_t row = int64_t(blockIdx.x) * D;
  float4 f[QUADS];
  const float inv = weigh_row(f, h + row, g, D, eps, scratch).x;
#pragma unroll
  for (int k = 0; k < QUADS; k++) {
    const int i = int(threadIdx.x) + k * int(blockDim.x);
    if (i < D / 4) reinterpret_cast<uint2*>(out + row)[i] = make_uint2(pack_bf16(f[k].x * inv, f[k].y * inv), pack_bf16(f[k].z * inv, f[k].w * inv));
  }
}

KERNEL(1024) void
rmsnorm_e4m3(e4m3* out,       // [T, D]
             float* scale,    // [T]
             const float* h,  // [T, D]
             const bf16* g,   // [D]
             int D, float eps) {
  SHARED(float2[WARP], scratch);
  const int64_t row = int64_t(blockIdx.x) * D;
  float4 f[QUADS];
  const float2 inv_top = weigh_row(f, h + row, g, D, eps, scratch);
  const RowScale by(inv_top.y);
  if (threadIdx.x == 0) scale[blockIdx.x] = by.scale(inv_top.x);
#pragma unroll
  for (int k = 0; k < QUADS; k++) {
    const int i = int(threadIdx.x) + k * int(blockDim.x);
    if (i < D / 4)
      reinterpret_cast<uint32_t*>(out + row)[i] = pack_e4m3x4(f[k].x * by.factor, f[k].y * by.factor, f[k].z * by.factor, f[k].w * by.factor);
  }
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
