// gemv_fma.cuh - the engine of include/gemv.cuh that multiplies with fused multiply-adds.
//
// A block reads each of its rows with all its threads: thread t holds packs t, t + threads, … (C of them, 16 bytes each) of every row, so its
// part of x stays in registers for the whole kernel and the block reads one contiguous stream. R rows are in flight; as soon as a pack is
// consumed its register is loaded again for the row R further on, so that the loads never drain between rows. R rows at a time are reduced
// over the warp by shuffles.
// block: ceil(K / (C·32·PACK)) warps. Nothing in shared memory but the sums.
#pragma once
#include "gemv_sums.cuh"

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

// All rows of the block: each warp's sums into its row of `sums`. Ends with the block's barrier.
template <class W, int C, int R, class Sum, class X, class Rows>
DEVICE void multiply_rows(const Sum& sums, Flight<W, C, R>& f, const X& x, const Rows& rows, int K, float square_sum) {
  const int lane = threadIdx.x % WARP, count = sums.rows;
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
    if (lane % (WARP / R) == 0 && j < count) sums.put(j, sum);
  }
  square_sum = warp_sum(square_sum);
  if (lane == 0) sums.put(count, square_sum);
  __syncthreads();
}

// x bf16 [K] as it is, or RMSNorm's input without its scalar in fp32.
// WARPS: the most that a block has.
template <class W_, int C, int R, bool NORMED, int WARPS>
struct Fma {
  using W = W_;
  using Sum = Sums<(WARPS + 3) / 4 * 4>;
  Flight<W, C, R> flight;
  XBf16<W, C> plain;  // x, or the norm's weight
  XFloat<W, C> weighted;

  // Before griddep_wait.
  template <class Rows>
  DEVICE void request(const Rows& rows, int count, int K) { request_first(flight, rows, count, K); }
  DEVICE void norm_weight(const bf16* g, int K) { fetch_x(plain, g, K); }
  // After it. normed: returns this thread's share of Σ h².
  DEVICE void input(const bf16* x, int K) { fetch_x(plain, x, K); }
  DEVICE float normed(const float* h, int K) { return fetch_weighted(weighted, h, plain, K); }
  template <class Rows>
  DEVICE void multiply(const Sum& sums, const Rows& rows, int K, float square_sum) {
    if (NORMED)
      multiply_rows(sums, flight, weighted, rows, K, square_sum);
    else
      multiply_rows(sums, flight, plain, rows, K, square_sum);
  }
};
