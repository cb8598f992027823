// gemv.cuh - one activation vector against a weight matrix, y = W·x, for one token: the kernel body that decode spends its life in.
//
// W is [N, K] row-major, bf16 or e4m3 (then with one fp32 scale per row, applied after the sum). A block owns a contiguous range of rows
// and reads each of them with all its threads: thread t holds packs t, t + threads, … (C of them, 16 bytes each) of every row, so its
// part of x stays in registers for the whole kernel and the block reads one contiguous stream. R rows are in flight; as soon as a pack is
// consumed its register is loaded again for the row R further on, so that the loads never drain between rows. Sums are fp32: R rows at a
// time are reduced over the warp by shuffles, and over the warps in shared memory once, at the end of the kernel.
//
// Boundaries between kernels are short because little lies on the way from the previous kernel's end to this one's. The first R rows,
// norm weights, scales and biases are requested before griddep_wait: they do not depend on the previous kernel. RMSNorm's scalar is
// applied after the sums, where its own sum is one more row of the block: no barrier stands between the arrival of h and the first
// product. What the epilogue needs of earlier results is requested right after the wait.
//
// Nothing that a previous kernel writes may be declared const __restrict__: the compiler would read it through the read-only path, and
// may do so before griddep_wait. Two rows that an epilogue must see together (a rotation's pair, a gate and its up) are one unit; a
// block's range is a range of units.
//
// grid: any; the units are spread evenly. block: ceil(K / (C·32·PACK)) warps. dynamic shared memory: (warps + 2)·(rows(block) + 1)·4 bytes.
// bytes moved: N·K·sizeof(weight) once from HBM; x (2K or 4K bytes) once per block from L2.
// PRECOND  K % 8 == 0 (bf16) or K % 16 == 0 (e4m3): rows are whole 16-byte packs.  PRECOND  W, x 16-byte aligned.
#pragma once
#include "reduce.cuh"
#include "vec.cuh"

// ---- weights ---------------------------------------------------------------------------------------------------------------------------
struct WeightBf16 {
  using type = bf16;
  static constexpr int PACK = 8;  // weights in 16 bytes
  static constexpr bool SCALED = false;
  static DEVICE void widen(float (&f)[8], uint4 w, int) { unpack_bf16(f, w); }
};
struct WeightE4m3 {
  using type = e4m3;
  static constexpr int PACK = 16;
  static constexpr bool SCALED = true;
  // Eight of the sixteen: half 0 or 1.
  static DEVICE void widen(float (&f)[8], uint4 w, int half) {
    float a[4], b[4];
    unpack_e4m3(a, half ? w.z : w.x);
    unpack_e4m3(b, half ? w.w : w.y);
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] = a[i], f[4 + i] = b[i];
  }
};

// ---- x in registers: C packs a thread ----------------------------------------------------------------------------------------------
// As fp32: normed inputs, exact.
template <class W, int C>
struct XFloat {
  float v[C][W::PACK];
  DEVICE void eight(float (&f)[8], int c, int part) const {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = v[c][8 * part + i];
  }
};
// As the bf16 they are in memory: half the registers, for long K.
template <class W, int C>
struct XBf16 {
  uint4 v[C][W::PACK / 8];
  DEVICE void eight(float (&f)[8], int c, int part) const { unpack_bf16(f, v[c][part]); }
};

// s plus pack c of a row times its stretch of x; even and odd elements in sums of their own, which halves the chain of dependent adds.
template <class W, class X>
DEVICE void dot_pack(float (&s)[2], uint4 w, const X& x, int c) {
#pragma unroll
  for (int part = 0; part < W::PACK / 8; part++) {
    float a[8], b[8];
    W::widen(a, w, part);
    x.eight(b, c, part);
#pragma unroll
    for (int i = 0; i < 8; i++) s[i % 2] = fmaf(a[i], b[i], s[i % 2]);
  }
}

// x bf16 [K]; packs past the end are zero.
template <class W, int C>
DEVICE void fetch_x(XBf16<W, C>& x, const bf16* src, int K) {
#pragma unroll
  for (int c = 0; c < C; c++) {
    const int k = (c * int(blockDim.x) + int(threadIdx.x)) * W::PACK;
#pragma unroll
    for (int part = 0; part < W::PACK / 8; part++) x.v[c][part] = k < K ? ld_global_v4(src + k + 8 * part) : make_uint4(0, 0, 0, 0);
  }
}

// x = h·g, the input of a linear but for RMSNorm's scalar; returns this thread's share of Σ h². h fp32 [K].
template <class W, int C>
DEVICE float fetch_weighted(XFloat<W, C>& x, const float* h, const XBf16<W, C>& g, int K) {
  float ss = 0.f;
#pragma unroll
  for (int c = 0; c < C; c++) {
    const int k = (c * int(blockDim.x) + int(threadIdx.x)) * W::PACK;
#pragma unroll
    for (int part = 0; part < W::PACK / 8; part++) {
      float w[8];
      g.eight(w, c, part);
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const float4 v = k < K ? ld_global_f4(h + k + 8 * part + 4 * q) : make_float4(0.f, 0.f, 0.f, 0.f);
        float* out = &x.v[c][8 * part + 4 * q];
        out[0] = v.x * w[4 * q], out[1] = v.y * w[4 * q + 1], out[2] = v.z * w[4 * q + 2], out[3] = v.w * w[4 * q + 3];
        ss = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, ss))));
      }
    }
  }
  return ss;
}

// ---- rows --------------------------------------------------------------------------------------------------------------------------------
// A block's share of `units`: [begin, begin + count).
struct Share {
  int begin, count;
};
DEVICE Share block_share(int units) {
  const int begin = int(int64_t(units) * blockIdx.x / gridDim.x);
  return {begin, int(int64_t(units) * (blockIdx.x + 1) / gridDim.x) - begin};
}

// R sums a lane → each row's sum over the warp, by exchanging halves: R - 1 + log2(32 / R) shuffles instead of 5·R. Lane l ends with the
// sum of row l / (32 / R).
template <int R>
DEVICE float reduce_rows(float (&s)[R]) {
  const int lane = threadIdx.x % WARP;
  int m = WARP / 2;
#pragma unroll
  for (int n = R / 2; n >= 1; n /= 2, m /= 2)
#pragma unroll
    for (int i = 0; i < n; i++) {
      const bool upper = lane & m;
      const float send = upper ? s[i] : s[i + n], keep = upper ? s[i + n] : s[i];
      s[i] = keep + __shfl_xor_sync(FULL_MASK, send, m);
    }
#pragma unroll
  for (m = WARP / R / 2; m >= 1; m /= 2) s[0] += __shfl_xor_sync(FULL_MASK, s[0], m);
  return s[0];
}

// The packs of R rows that a thread has in flight.
template <class W, int C, int R>
struct Flight {
  uint4 v[R][C];
};

// This thread's pack c of a row; zero beyond the row's end, and for a row that is not there (null).
template <class W>
DEVICE uint4 request_pack(const typename W::type* row, int c, int K) {
  const int k = (c * int(blockDim.x) + int(threadIdx.x)) * W::PACK;
  return row && k < K ? ld_stream_v4(row + k) : make_uint4(0, 0, 0, 0);
}

template <class W, int C, int R, class Rows>
DEVICE void request_first(Flight<W, C, R>& f, const Rows& rows, int count, int K) {
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int c = 0; c < C; c++) f.v[r][c] = request_pack<W>(r < count ? rows.row(r) : nullptr, c, K);
}

// Shared memory of a block: part[warp][rows + 1] sums, the last column for Σ h²; then two arrays of `rows` constants.
struct Sums {
  float* part;
  int rows;
  DEVICE float* warp(int w) const { return part + w * (rows + 1); }
  DEVICE float* constants(int i) const { return part + int(blockDim.x) / WARP * (rows + 1) + i * rows; }
  // Column j over all warps, in every thread that asks. Valid after multiply_rows.
  DEVICE float total(int j) const {
    float s = 0.f;
#pragma unroll 8
    for (int w = 0; w < int(blockDim.x) / WARP; w++) s += warp(w)[j];
    return s;
  }
  // RMSNorm's scalar, from the last column.
  DEVICE float inverse_rms(int K, float eps) const { return rsqrtf(total(rows) / float(K) + eps); }
};

// All rows of the block: each warp's sums into its row of `sums`. Ends with the block's barrier.
template <class W, int C, int R, class X, class Rows>
DEVICE void multiply_rows(const Sums& sums, Flight<W, C, R>& f, const X& x, const Rows& rows, int K, float square_sum) {
  const int lane = threadIdx.x % WARP, count = sums.rows;
  float* mine = sums.warp(int(threadIdx.x) / WARP);
  for (int j0 = 0; j0 < count; j0 += R) {
    float s[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
      float sum[2] = {0.f, 0.f};
      const int next = j0 + R + r;
      const typename W::type* row = next < count ? rows.row(next) : nullptr;
#pragma unroll
      for (int c = 0; c < C; c++) {
        dot_pack<W>(sum, f.v[r][c], x, c);
        f.v[r][c] = request_pack<W>(row, c, K);
      }
      s[r] = sum[0] + sum[1];
    }
    const float sum = reduce_rows<R>(s);
    const int j = j0 + lane / (WARP / R);
    if (lane % (WARP / R) == 0 && j < count) mine[j] = sum;
  }
  square_sum = warp_sum(square_sum);
  if (lane == 0) mine[count] = square_sum;
  __syncthreads();
}

// n constants of the block into shared memory: they arrive while the rows do, and are read after multiply_rows' barrier.
DEVICE void stage(float* dst, const float* src, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) dst[i] = src[i];
}

template <class T>
struct RowsPlain {
  const T* w;  // the block's first row
  int K;
  DEVICE const T* row(int j) const { return w + int64_t(j) * K; }
};
// Row 2i is the gate of the block's unit i, row 2i + 1 its up.
template <class T>
struct RowsGateUp {
  const T *gate, *up;
  int K;
  DEVICE const T* row(int j) const { return (j % 2 ? up : gate) + int64_t(j / 2) * K; }
};
// Rows 2i and 2i + 1 are dimensions d and d + HD/2 of a head, which RoPE rotates into each other; unit p is dimension p % (HD/2) of head
// p / (HD/2).
template <class T>
struct RowsRotary {
  const T* w;
  int K, first, log_half;
  DEVICE int index(int j) const {
    const int p = first + j / 2, head = p >> log_half;
    return (head << log_half) + p + (j % 2 << log_half);  // head·HD + p % (HD/2), the second HD/2 further
  }
  DEVICE const T* row(int j) const { return w + int64_t(index(j)) * K; }
};

// ---- the four kernels of a decode step, for either weight type -------------------------------------------------------------------------

// Plain x, residual add: h[n] += scale[n]·(W·x)[n]. O-projection and down-projection.
template <class W, int C, int R>
DEVICE void gemv_add(float* h, const bf16* x, const typename W::type* w, const float* scale, int N, int K, float* shared) {
  griddep_launch();
  const Share rows = block_share(N);
  const RowsPlain<typename W::type> at{w + int64_t(rows.begin) * K, K};
  const Sums sums{shared, rows.count};
  Flight<W, C, R> f;
  request_first(f, at, rows.count, K);
  if (W::SCALED) stage(sums.constants(0), scale + rows.begin, rows.count);
  griddep_wait();
  const int j = threadIdx.x;
  h += rows.begin;
  const float old = j < rows.count ? h[j] : 0.f;
  XBf16<W, C> xs;
  fetch_x(xs, x, K);
  multiply_rows(sums, f, xs, at, K, 0.f);
  const float* scales = sums.constants(0);
  if (j < rows.count) h[j] = old + (W::SCALED ? sums.total(j) * scales[j] : sums.total(j));
  for (int i = j + blockDim.x; i < rows.count; i += blockDim.x) h[i] += W::SCALED ? sums.total(i) * scales[i] : sums.total(i);
}

// RMSNorm, then gate and up, then SwiGLU: act[i] = silu(gate_i·x)·(up_i·x).
template <class W, int C, int R>
DEVICE void gemv_swiglu(bf16* act, const float* h, const bf16* g, const typename W::type* w_gate, const float* s_gate,
                        const typename W::type* w_up, const float* s_up, int I, int K, float eps, float* shared) {
  griddep_launch();
  const Share units = block_share(I);
  const RowsGateUp<typename W::type> at{w_gate + int64_t(units.begin) * K, w_up + int64_t(units.begin) * K, K};
  const Sums sums{shared, 2 * units.count};
  Flight<W, C, R> f;
  request_first(f, at, sums.rows, K);
  XBf16<W, C> gs;
  fetch_x(gs, g, K);
  float *gates = sums.constants(0), *ups = sums.constants(1);
  if (W::SCALED) stage(gates, s_gate + units.begin, units.count), stage(ups, s_up + units.begin, units.count);
  griddep_wait();
  XFloat<W, C> xs;
  const float ss = fetch_weighted(xs, h, gs, K);
  multiply_rows(sums, f, xs, at, K, ss);
  const float inv = sums.inverse_rms(K, eps);
  for (int u = threadIdx.x; u < units.count; u += blockDim.x) {
    float gate = sums.total(2 * u) * inv, up = sums.total(2 * u + 1) * inv;
    if (W::SCALED) gate *= gates[u], up *= ups[u];
    act[units.begin + u] = __float2bfloat16_rn(gate / (1.f + expf(-gate)) * up);
  }
}

// RMSNorm, then Q, K and V with bias, RoPE on Q and K, K and V appended to the cache at the token's position.
template <class W, int C, int R>
DEVICE void gemv_qkv(bf16* q, bf16* k_cache, bf16* v_cache, const float* h, const bf16* g, const typename W::type* w, const float* scale,
                     const float* bias, const float2* rope, const int32_t* pos_ptr, int H, int KV, int log_half, int max_len, int K,
                     float eps, float* shared) {
  griddep_launch();
  const int half = 1 << log_half, HD = 2 * half;
  const Share units = block_share((H + 2 * KV) * half);
  const RowsRotary<typename W::type> at{w, K, units.begin, log_half};
  const Sums sums{shared, 2 * units.count};
  Flight<W, C, R> f;
  request_first(f, at, sums.rows, K);
  XBf16<W, C> gs;
  fetch_x(gs, g, K);
  float *biases = sums.constants(0), *scales = sums.constants(1);
  for (int j = threadIdx.x; j < sums.rows; j += blockDim.x) {
    biases[j] = bias[at.index(j)];
    if (W::SCALED) scales[j] = scale[at.index(j)];
  }
  griddep_wait();
  const int pos = *pos_ptr;
  XFloat<W, C> xs;
  const float ss = fetch_weighted(xs, h, gs, K);
  const float2* angles = rope + int64_t(pos) * half;
  const float2 early = angles[(units.begin + int(threadIdx.x)) % half];  // of this thread's first unit
  multiply_rows(sums, f, xs, at, K, ss);
  const float inv = sums.inverse_rms(K, eps);
  for (int u = threadIdx.x; u < units.count; u += blockDim.x) {
    const int p = units.begin + u, head = p >> log_half, d = p % half;
    float x = sums.total(2 * u) * inv, y = sums.total(2 * u + 1) * inv;
    if (W::SCALED) x *= scales[2 * u], y *= scales[2 * u + 1];
    x += biases[2 * u], y += biases[2 * u + 1];
    const float2 cs = head >= H + KV ? make_float2(1.f, 0.f) : u < int(blockDim.x) ? early : angles[d];  // {cos, sin}
    bf16* out = head < H        ? q + head * HD
                : head < H + KV ? k_cache + (int64_t(head - H) * max_len + pos) * HD
                                : v_cache + (int64_t(head - H - KV) * max_len + pos) * HD;
    out[d] = __float2bfloat16_rn(fmaf(x, cs.x, -y * cs.y));
    out[d + half] = __float2bfloat16_rn(fmaf(y, cs.x, x * cs.y));
  }
}

// RMSNorm, then the LM head: logits[v] fp32.
template <class W, int C, int R>
DEVICE void gemv_logits(float* logits, const float* h, const bf16* g, const typename W::type* w, int V, int K, float eps, float* shared) {
  griddep_launch();
  const Share rows = block_share(V);
  const RowsPlain<typename W::type> at{w + int64_t(rows.begin) * K, K};
  const Sums sums{shared, rows.count};
  Flight<W, C, R> f;
  request_first(f, at, rows.count, K);
  XBf16<W, C> gs;
  fetch_x(gs, g, K);
  griddep_wait();
  XFloat<W, C> xs;
  const float ss = fetch_weighted(xs, h, gs, K);
  multiply_rows(sums, f, xs, at, K, ss);
  const float inv = sums.inverse_rms(K, eps);
  for (int j = threadIdx.x; j < rows.count; j += blockDim.x) logits[rows.begin + j] = sums.total(j) * inv;
}
