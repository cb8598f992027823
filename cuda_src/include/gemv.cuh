// gemv.cuh - one activation vector against a weight matrix, y = W·x, for one token: the kernel body that decode spends its life in.
//
// W is [N, K] row-major, bf16 or e4m3 (then with one fp32 scale per row, applied after the sum). A warp owns two rows at a time: the
// two rows an epilogue must see together (a rotation's pair, a gate and its up), so that no epilogue needs another warp.
// x lies in shared memory (bf16, f16 or fp32: see the stagings below), put there once per block by a prologue (a plain copy, or RMSNorm); lanes read W in 16-byte packs that are coalesced across the warp, UNROLL packs of either row in
// flight, and accumulate in fp32.
//
// grid: any; warps stride over the row pairs. block: whole warps, at most GEMV_THREADS. dynamic shared memory: the staged x, K rounded up to a multiple of 512.
// bytes moved: N·K·sizeof(weight) once from HBM; x (2K or 4K bytes) once per block from L2.
// PRECOND  K % 8 == 0 (bf16) or K % 16 == 0 (e4m3): rows are whole 16-byte packs.  PRECOND  W, x 16-byte aligned.
#pragma once
#include "reduce.cuh"
#include "vec.cuh"

constexpr int GEMV_THREADS = 256;

// Where half `half` of the 32 bytes of x that meet pack p of a row lies, in 16-byte words. Neighbouring lanes read words 16 bytes
// apart, not 32: the two halves of 32 packs are stored apart, so no bank is hit twice.
DEVICE int split_word(int p, int half) { return (p / WARP) * 2 * WARP + half * WARP + p % WARP; }

// How x is staged: eight elements go to, and come from, word w of the vector. Normed inputs are f16: they are bounded by √K·max|g|, and
// three more bits than bf16 cost nothing. What can be large (SwiGLU's output) stays bf16. The LM head's input is exact.
struct StageBf16 {
  static DEVICE void store(uint4* xs, int w, const float (&f)[8]) { xs[w] = pack_bf16x8(f); }
  static DEVICE void load(float (&f)[8], const uint4* xs, int w) { unpack_bf16(f, xs[w]); }
};
struct StageF16 {
  static DEVICE void store(uint4* xs, int w, const float (&f)[8]) { xs[w] = pack_f16x8(f); }
  static DEVICE void load(float (&f)[8], const uint4* xs, int w) { unpack_f16(f, xs[w]); }
};
struct StageF32 {
  static DEVICE void store(uint4* xs, int w, const float (&f)[8]) {
    reinterpret_cast<float4*>(xs)[split_word(w, 0)] = make_float4(f[0], f[1], f[2], f[3]);
    reinterpret_cast<float4*>(xs)[split_word(w, 1)] = make_float4(f[4], f[5], f[6], f[7]);
  }
  static DEVICE void load(float (&f)[8], const uint4* xs, int w) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float4 v = reinterpret_cast<const float4*>(xs)[split_word(w, half)];
      f[4 * half] = v.x, f[4 * half + 1] = v.y, f[4 * half + 2] = v.z, f[4 * half + 3] = v.w;
    }
  }
};

// A weight type over a staging: how many weights a 16-byte pack holds, where the eight elements 8i … 8i + 7 of x are staged, and the
// dot product of pack p of a row with its stretch of x.
template <class Stage>
struct WeightBf16 {
  using type = bf16;
  static constexpr int PACK = 8;
  static constexpr bool SCALED = false;
  static DEVICE void stage(uint4* xs, int i, const float (&f)[8]) { Stage::store(xs, i, f); }
  static DEVICE float dot(float acc, uint4 w, const uint4* xs, int p) {
    float a[8], b[8];
    unpack_bf16(a, w);
    Stage::load(b, xs, p);
#pragma unroll
    for (int i = 0; i < 8; i++) acc = fmaf(a[i], b[i], acc);
    return acc;
  }
};
template <class Stage>
struct WeightE4m3 {
  using type = e4m3;
  static constexpr int PACK = 16;
  static constexpr bool SCALED = true;
  static DEVICE void stage(uint4* xs, int i, const float (&f)[8]) { Stage::store(xs, split_word(i / 2, i % 2), f); }
  static DEVICE float dot(float acc, uint4 w, const uint4* xs, int p) {
    const uint32_t word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float a[4], b[8];
      Stage::load(b, xs, split_word(p, half));
#pragma unroll
      for (int q = 0; q < 2; q++) {
        unpack_e4m3(a, word[2 * half + q]);
#pragma unroll
        for (int i = 0; i < 4; i++) acc = fmaf(a[i], b[4 * q + i], acc);
      }
    }
    return acc;
  }
};

// Prologue: x bf16 [K] → shared memory.
template <class W>
DEVICE void stage_copy(uint4* xs, const bf16* __restrict__ x, int K) {
  for (int i = threadIdx.x; i < K / 8; i += blockDim.x) {
    float f[8];
    unpack_bf16(f, ld_global_v4(x + 8 * i));
    W::stage(xs, i, f);
  }
  __syncthreads();
}

// RMSNorm of one row by a whole block: store(i, f) gets elements 8i … 8i + 7 of h / sqrt(mean(h²) + eps)·g. `scratch`: a float a warp.
template <class Store>
DEVICE void norm_row(const float* __restrict__ h, const bf16* __restrict__ g, int K, float eps, float* scratch, Store store) {
  const float4* h4 = reinterpret_cast<const float4*>(h);
  float ss = 0.f;
  for (int i = threadIdx.x; i < K / 4; i += blockDim.x) {
    const float4 v = h4[i];
    ss = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, ss))));
  }
  const float inv = rsqrtf(block_sum(ss, scratch) / float(K) + eps);
  for (int i = threadIdx.x; i < K / 8; i += blockDim.x) {
    const float4 a = h4[2 * i], b = h4[2 * i + 1];
    float f[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, w[8];
    unpack_bf16(w, ld_global_v4(g + 8 * i));
#pragma unroll
    for (int j = 0; j < 8; j++) f[j] = f[j] * inv * w[j];
    store(i, f);
  }
}

// Prologue: RMSNorm of the residual stream h fp32 [K] with weight g bf16 [K] → shared memory.
template <class W>
DEVICE void stage_norm(uint4* xs, const float* __restrict__ h, const bf16* __restrict__ g, int K, float eps, float* scratch) {
  norm_row(h, g, K, eps, scratch, [&](int i, const float(&f)[8]) { W::stage(xs, i, f); });
  __syncthreads();
}

// The two rows w0, w1 [K] against the staged x: {w0·x, w1·x}, unscaled, in every lane.
template <class W, int UNROLL>
DEVICE float2 dot_rows(const typename W::type* __restrict__ w0, const typename W::type* __restrict__ w1, const uint4* xs, int K) {
  const int packs = K / W::PACK;
  const uint4 *r0 = reinterpret_cast<const uint4*>(w0), *r1 = reinterpret_cast<const uint4*>(w1);
  float s0 = 0.f, s1 = 0.f;
  for (int base = threadIdx.x % WARP; base < packs; base += WARP * UNROLL) {
    uint4 a[UNROLL], b[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (base + u * WARP < packs) {
        a[u] = ld_stream_v4(r0 + base + u * WARP);
        b[u] = ld_stream_v4(r1 + base + u * WARP);
      }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (base + u * WARP < packs) {
        s0 = W::dot(s0, a[u], xs, base + u * WARP);
        s1 = W::dot(s1, b[u], xs, base + u * WARP);
      }
  }
  return make_float2(warp_sum(s0), warp_sum(s1));
}

DEVICE int gemv_first_pair() { return int(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP); }
DEVICE int gemv_pair_stride() { return int(gridDim.x * (blockDim.x / WARP)); }

// ---- the four kernels of a decode step, for either weight type -------------------------------------------------------------

// Plain x, residual add: h[n] += scale[n]·(W·x)[n]. O-projection and down-projection.
template <class W, int UNROLL>
DEVICE void gemv_add(float* __restrict__ h, const bf16* __restrict__ x, const typename W::type* __restrict__ w,
                     const float* __restrict__ scale, int N, int K, uint4* xs) {
  griddep_launch();
  griddep_wait();
  stage_copy<W>(xs, x, K);
  for (int p = gemv_first_pair(); p < (N + 1) / 2; p += gemv_pair_stride()) {
    const int n0 = 2 * p, n1 = min(2 * p + 1, N - 1);  // an odd last row is computed twice, written once
    float2 y = dot_rows<W, UNROLL>(w + int64_t(n0) * K, w + int64_t(n1) * K, xs, K);
    if (threadIdx.x % WARP) continue;
    if (W::SCALED) y = make_float2(y.x * scale[n0], y.y * scale[n1]);
    h[n0] += y.x;
    if (n1 != n0) h[n1] += y.y;
  }
}

// RMSNorm, then gate and up, then SwiGLU: act[i] = silu(gate_i·x)·(up_i·x).
template <class W, int UNROLL>
DEVICE void gemv_swiglu(bf16* __restrict__ act, const float* __restrict__ h, const bf16* __restrict__ g,
                        const typename W::type* __restrict__ w_gate, const float* __restrict__ s_gate,
                        const typename W::type* __restrict__ w_up, const float* __restrict__ s_up, int I, int K, float eps, uint4* xs) {
  SHARED(float[WARP], scratch);
  griddep_launch();
  griddep_wait();
  stage_norm<W>(xs, h, g, K, eps, scratch);
  for (int i = gemv_first_pair(); i < I; i += gemv_pair_stride()) {
    float2 y = dot_rows<W, UNROLL>(w_gate + int64_t(i) * K, w_up + int64_t(i) * K, xs, K);
    if (threadIdx.x % WARP) continue;
    if (W::SCALED) y = make_float2(y.x * s_gate[i], y.y * s_up[i]);
    act[i] = __float2bfloat16_rn(y.x / (1.f + expf(-y.x)) * y.y);
  }
}

// RMSNorm, then Q, K and V with bias, RoPE on Q and K, K and V appended to the cache at the token's position.
// Pair p is dimension d = p % (HD/2) and its partner d + HD/2 of head p / (HD/2): the two that RoPE rotates into each other.
template <class W, int UNROLL>
DEVICE void gemv_qkv(bf16* __restrict__ q, bf16* __restrict__ k_cache, bf16* __restrict__ v_cache, const float* __restrict__ h,
                     const bf16* __restrict__ g, const typename W::type* __restrict__ w, const float* __restrict__ scale,
                     const float* __restrict__ bias, const float2* __restrict__ rope, const int32_t* __restrict__ pos_ptr, int H, int KV,
                     int HD, int max_len, int K, float eps, uint4* xs) {
  SHARED(float[WARP], scratch);
  griddep_launch();
  griddep_wait();
  stage_norm<W>(xs, h, g, K, eps, scratch);
  const int half = HD / 2, pos = *pos_ptr;
  for (int p = gemv_first_pair(); p < (H + 2 * KV) * half; p += gemv_pair_stride()) {
    const int head = p / half, d = p % half, n0 = head * HD + d, n1 = n0 + half;
    float2 y = dot_rows<W, UNROLL>(w + int64_t(n0) * K, w + int64_t(n1) * K, xs, K);
    if (threadIdx.x % WARP) continue;
    if (W::SCALED) y = make_float2(y.x * scale[n0], y.y * scale[n1]);
    y = make_float2(y.x + bias[n0], y.y + bias[n1]);
    if (head < H + KV) {
      const float2 cs = rope[int64_t(pos) * half + d];  // {cos, sin}
      y = make_float2(fmaf(y.x, cs.x, -y.y * cs.y), fmaf(y.y, cs.x, y.x * cs.y));
    }
    bf16* out = head < H        ? q + head * HD
                : head < H + KV ? k_cache + (int64_t(head - H) * max_len + pos) * HD
                                : v_cache + (int64_t(head - H - KV) * max_len + pos) * HD;
    out[d] = __float2bfloat16_rn(y.x);
    out[d + half] = __float2bfloat16_rn(y.y);
  }
}

// RMSNorm, then the LM head: logits[v] fp32.
template <class W, int UNROLL>
DEVICE void gemv_logits(float* __restrict__ logits, const float* __restrict__ h, const bf16* __restrict__ g,
                        const typename W::type* __restrict__ w, int V, int K, float eps, uint4* xs) {
  SHARED(float[WARP], scratch);
  griddep_launch();
  griddep_wait();
  stage_norm<W>(xs, h, g, K, eps, scratch);
  for (int p = gemv_first_pair(); p < (V + 1) / 2; p += gemv_pair_stride()) {
    const int n0 = 2 * p, n1 = min(2 * p + 1, V - 1);
    const float2 y = dot_rows<W, UNROLL>(w + int64_t(n0) * K, w + int64_t(n1) * K, xs, K);
    if (threadIdx.x % WARP) continue;
    logits[n0] = y.x;
    if (n1 != n0) logits[n1] = y.y;
  }
}
