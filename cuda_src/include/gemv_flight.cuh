// gemv_flight.cuh - what the engines of include/gemv.cuh share: a block's rows on their way into registers, and where a thread's part of x is.
//
// A block reads each of its rows with all its threads: thread t holds packs t, t + threads, … (C of them, 16 bytes each) of every row, so its
// part of x stays in registers for the whole kernel and the block reads one contiguous stream. R rows are in flight; as soon as a pair of
// them is consumed its registers are loaded again for the pair R rows further on, so that the loads never drain between rows.
//
// Requests go through the ordinary path and have no predicates: the compiler may move reads through the read-only path across the wait, and
// of eight predicated ones several came too late, as a thread has seven predicates.
#pragma once
#include "gemv_sums.cuh"

// Where this thread's pack c of a row is; beyond the row's end, where x is zero, it is the row's first: an infinite weight there gives NaN.
template <class W>
DEVICE int pack_at(int c, int K) {
  const int k = (c * int(blockDim.x) + int(threadIdx.x)) * W::PACK;
  return k < K ? k : 0;
}

// The rows of a block, AT_ONCE (two, or one) after another, as a thread meets them: rows 2i and 2i + 1.
template <class T>
struct Pairs {
  const T* a;             // this thread's part of the pair's first row
  int64_t other, step;    // from there to its part of the second row; of the next pair's first row
  int left, until;        // pairs after this one; until `jump` is added to the step
  int period;
  int64_t jump;
  bool odd;               // the last pair is one row: its second row is the first again
  DEVICE const T* b() const { return a + (odd && left == 0 ? 0 : other); }
  DEVICE bool more() const { return left > 0; }
  DEVICE void advance() {
    const bool end = --until == 0;
    a += end ? step + jump : step, left--;
    until = end ? period : until;
  }
};
template <int AT_ONCE, class T>
DEVICE Pairs<T> pairs_of(const RowsPlain<T>& rows, int count, int at) {
  return {rows.w + at, rows.K, AT_ONCE * int64_t(rows.K), (count - 1) / AT_ONCE, 0, 0, 0, AT_ONCE == 2 && count % 2 != 0};
}
template <int AT_ONCE, class T>
DEVICE Pairs<T> pairs_of(const RowsGateUp<T>& rows, int count, int at) {
  static_assert(AT_ONCE == 2, "a gate and its up");
  return {rows.gate + at, rows.up - rows.gate, rows.K, (count - 1) / 2, 0, 0, 0, false};
}
template <int AT_ONCE, class T>
DEVICE Pairs<T> pairs_of(const RowsRotary<T>& rows, int count, int at) {
  static_assert(AT_ONCE == 2, "a rotation's pair");
  const int half = 1 << rows.log_half;
  const int64_t head = int64_t(rows.K) << rows.log_half;
  return {rows.row(0) + at, head, rows.K, (count - 1) / 2, half - (rows.first & (half - 1)), half, head, false};
}

// This thread's packs of x as the bf16 that they are in memory; beyond the end they are the first's.
template <class W, int C>
struct XBf16 {
  uint4 v[C][W::PACK / 8];
  DEVICE void eight(float (&f)[8], int c, int part) const { unpack_bf16(f, v[c][part]); }
};

// The packs that a thread has in flight.
template <class W, int C, int R>
struct Flight {
  static constexpr int AT_ONCE = R == 1 ? 1 : 2;
  Pairs<typename W::type> pairs;
  int at[C];          // where the thread's packs are, from the first
  bool there[C];      // not beyond the row's end
  uint4 packs[R][C];
  const void* x_at[C];

  DEVICE void load(int r) {
#pragma unroll
    for (int c = 0; c < C; c++) {
      packs[r][c] = ld_once_v4(pairs.a + at[c]);
      if (AT_ONCE == 2) packs[r + AT_ONCE - 1][c] = ld_once_v4(pairs.b() + at[c]);
    }
  }
  // What takes the place of rows r and r + 1, which are consumed.
  DEVICE void replace(int r) {
    if (pairs.more()) {
      pairs.advance();
      load(r);
    }
  }
  // Before griddep_wait. Where a block has fewer rows, its last is loaded again.
  template <class Rows>
  DEVICE void request(const Rows& rows, int count, int K) {
    const int first = pack_at<W>(0, K);
#pragma unroll
    for (int c = 0; c < C; c++) {
      at[c] = pack_at<W>(c, K) - first;
      there[c] = (c * int(blockDim.x) + int(threadIdx.x)) * W::PACK < K;
    }
    pairs = pairs_of<AT_ONCE>(rows, count, first);
#pragma unroll
    for (int r = 0; r < R; r += AT_ONCE) {
      if (r && pairs.more()) pairs.advance();
      load(r);
    }
  }
  // griddep_wait, once the addresses of this thread's part of x are in registers.
  template <class T>
  DEVICE void wait(const T* x, int K) {
    uint64_t all = 0;
#pragma unroll
    for (int c = 0; c < C; c++) {
      const T* p = x + pack_at<W>(c, K);
      settle(p);
      x_at[c] = p;
      all |= reinterpret_cast<uint64_t>(p);
    }
    griddep_wait_with(all);
  }
  // From here on this thread's part of what lies K elements further on is fetched.
  template <class T>
  DEVICE void further(int K) {
#pragma unroll
    for (int c = 0; c < C; c++) x_at[c] = static_cast<const T*>(x_at[c]) + K;
  }
  // After it: x bf16 [K].
  DEVICE void fetch(XBf16<W, C>& x) {
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int part = 0; part < W::PACK / 8; part++) x.v[c][part] = ld_global_v4(static_cast<const bf16*>(x_at[c]) + 8 * part);
  }
  // The same, h fp32 [K].
  DEVICE void fetch(float (&h)[C][W::PACK]) {
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int q = 0; q < W::PACK / 4; q++) {
        const float4 v = ld_global_f4(static_cast<const float*>(x_at[c]) + 4 * q);
        float* out = &h[c][4 * q];
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
      }
  }
  // The norm's weight, before griddep_wait.
  DEVICE void fetch_weight(XBf16<W, C>& g, const bf16* src, int K) const {
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int part = 0; part < W::PACK / 8; part++) g.v[c][part] = ld_global_v4(src + pack_at<W>(c, K) + 8 * part);
  }
};
