// gemv_fma.cuh - the engine of include/gemv.cuh that multiplies with fused multiply-adds.
//
// A block reads each of its rows with all its threads: thread t holds packs t, t + threads, … (C of them, 16 bytes each) of every row, so its
// part of x stays in registers for the whole kernel and the block reads one contiguous stream. R rows are in flight; as soon as a pack is
// consumed its register is loaded again for the row R further on, so that the loads never drain between rows. R rows at a time are reduced
// over the warp by shuffles.
// block: ceil(K / (C·32·PACK)) warps. Nothing in shared memory but the sums.
#pragma once
#include "gemv_x.cuh"

// The packs of R rows that a thread has in flight.
template <class W, int C, int R>
struct Flight {
  uint4 v[R][C];
};

// This thread's pack c of a row; zero beyond the row's end, and for a row that is not there (null).
template <class W>
DEVICE uint4 request_pack(const typename W::type* row, int c, int K) {
  const int k = block_lane().k<W>(c);
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

// x bf16 [K] as it is, or RMSNorm's input without its scalar in fp32.
template <class W_, int C, int R, bool NORMED>
struct Fma {
  using W = W_;
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
  DEVICE void multiply(const Sums& sums, const Rows& rows, int K, float square_sum) {
    if (NORMED)
      multiply_rows(sums, flight, weighted, rows, K, square_sum);
    else
      multiply_rows(sums, flight, plain, rows, K, square_sum);
  }
};
