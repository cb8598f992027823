// gemv_diagonal.cuh - the engine of include/gemv.cuh that multiplies e4m3 weights on tensor cores: a third of the instructions of gemv_fma.cuh.
//
// Memory is read as there: a block reads each of its rows with all its threads, a warp 512 neighbouring bytes of one row, and thread t meets the
// same stretch of x in every row. The eight quads of a warp hold eight stretches of a row; these are the first eight rows of the instruction's
// 16-row operand, those of the next row the other eight. The eight columns are the stretches of x. So the products that are wanted lie on the
// diagonals of the two 8×8 halves of the result, and no value has to move between threads before it is multiplied. What lies beside the
// diagonals is not looked at: the tensor cores have the time.
//
// x is f16, scaled by a power of two so that nothing overflows: plain inputs bf16 · PLAIN_SCALE, exact from 2^-13 to 2^20 (where they
// saturate), to 2^-21 below; normed inputs in two parts, the second what rounding to the first took off: 22 bits.
// block: ceil(K / (C·32·PACK)) warps. Nothing in shared memory but the sums.
#pragma once
#include "gemv_fma.cuh"
#include "gemv_operand.cuh"

// Where this thread's pack c of a row is; beyond the row's end, where x is zero, it is the row's first. So requests need no predicates, of which
// a thread has seven: of eight predicated ones several came too late.
template <class W>
DEVICE int pack_at(int c, int K) {
  const int k = (c * int(blockDim.x) + int(threadIdx.x)) * W::PACK;
  return k < K ? k : 0;
}

// The place of a lane: of quad g, the lane that holds the diagonal's element g.
struct DiagonalLane {
  int g;
  bool odd, holds;
  DEVICE DiagonalLane() : g(int(threadIdx.x) % WARP / 4), odd(g % 2), holds(int(threadIdx.x) % 4 == g / 2) {}
};

// R sums in each of the eight lanes of the diagonal → each row's sum over them, by exchanging halves. Lane g ends with the sum of row
// g / (8 / R). Other lanes exchange among themselves.
template <int R>
DEVICE float reduce_diagonal(float (&s)[R], const DiagonalLane& lane) {
  static_assert(R == 2 || R == 4 || R == 8, "R rows");
  int n = R / 2;
#pragma unroll
  for (int bit = 4; bit >= 1; bit /= 2, n /= 2) {
    const int flip = 4 * bit ^ bit / 2;  // from lane 4g + g / 2 to that of g ^ bit
    if (n == 0) {
      s[0] += __shfl_xor_sync(FULL_MASK, s[0], flip);
      continue;
    }
    const bool upper = lane.g & bit;
#pragma unroll
    for (int i = 0; i < n; i++) {
      const float send = upper ? s[i] : s[i + n], keep = upper ? s[i + n] : s[i];
      s[i] = keep + __shfl_xor_sync(FULL_MASK, send, flip);
    }
  }
  return s[0];
}

// The pairs of rows of a block, one after another, as a thread meets them: rows 2i and 2i + 1.
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
template <class T>
DEVICE Pairs<T> pairs_of(const RowsPlain<T>& rows, int count, int at) {
  return {rows.w + at, rows.K, 2 * int64_t(rows.K), (count - 1) / 2, 0, 0, 0, bool(count % 2)};
}
template <class T>
DEVICE Pairs<T> pairs_of(const RowsGateUp<T>& rows, int count, int at) {
  return {rows.gate + at, rows.up - rows.gate, rows.K, (count - 1) / 2, 0, 0, 0, false};
}
template <class T>
DEVICE Pairs<T> pairs_of(const RowsRotary<T>& rows, int count, int at) {
  const int half = 1 << rows.log_half;
  const int64_t head = int64_t(rows.K) << rows.log_half;
  return {rows.row(0) + at, head, rows.K, (count - 1) / 2, half - (rows.first & (half - 1)), half, head, false};
}

// WARPS: the most that a block has.
template <class W_, int C, int R, bool NORMED, int WARPS>
struct Diagonal {
  using W = W_;
  using Sum = Sums<(WARPS + 3) / 4 * 4>;
  static constexpr int PARTS = NORMED ? 2 : 1;
  Pairs<typename W::type> pairs;
  int at[C];               // where the thread's packs are, from the first
  uint4 flight[R][C];
  XBf16<W, C> weight;      // of the norm
  uint32_t x[C][W::STEPS][PARTS][2];

  DEVICE void load(int r) {
#pragma unroll
    for (int c = 0; c < C; c++) flight[r][c] = ld_once_v4(pairs.a + at[c]), flight[r + 1][c] = ld_once_v4(pairs.b() + at[c]);
  }

  // Before griddep_wait.
  template <class Rows>
  DEVICE void request(const Rows& rows, int count, int K) {
    const int first = pack_at<W>(0, K);
#pragma unroll
    for (int c = 0; c < C; c++) at[c] = pack_at<W>(c, K) - first;
    pairs = pairs_of(rows, count, first);
#pragma unroll
    for (int r = 0; r < R; r += 2) {
      if (r && pairs.more()) pairs.advance();
      load(r);
    }
  }
  DEVICE void norm_weight(const bf16* g, int K) { fetch_x(weight, g, K); }

  // After it: x bf16 [K].
  DEVICE void input(const bf16* src, int K) {
    XBf16<W, C> plain;
    fetch_x(plain, src, K);
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int part = 0; part < W::PACK / 8; part++) {
        float f[8];
        plain.eight(f, c, part);
#pragma unroll
        for (int q = 0; q < 4; q++) x[c][2 * part + q / 2][0][q % 2] = cvt_f16x2_sat(f[2 * q] * W::PLAIN_SCALE, f[2 * q + 1] * W::PLAIN_SCALE);
      }
  }
  // h·weight, h fp32 [K]; returns this thread's share of Σ h².
  DEVICE float normed(const float* h, int K) {
    XFloat<W, C> product;
    const float ss = fetch_weighted(product, h, weight, K);
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int i = 0; i < W::PACK / 2; i++) {
        const float a = product.v[c][2 * i] * W::X_SCALE, b = product.v[c][2 * i + 1] * W::X_SCALE;
        const uint32_t high = W::pair(a, b);
        x[c][i / 2][0][i % 2] = high;
        x[c][i / 2][PARTS - 1][i % 2] = W::pair((a - W::first(high)) * (1.f / W::LOW), (b - W::second(high)) * (1.f / W::LOW));
      }
    return ss;
  }

  // The rows from j0 on that are in flight into the warp's sums, while those that take their place are requested.
  DEVICE void group(const Sum& sums, const DiagonalLane& lane, int j0) {
    constexpr int G = R % 8 == 0 ? 8 : R % 4 == 0 ? 4 : 2;  // rows that are reduced together
#pragma unroll
    for (int r0 = 0; r0 < R; r0 += G) {
      if (r0 && j0 + r0 >= sums.rows) return;
      float s[G];
#pragma unroll
      for (int r = 0; r < G; r += 2) {
        float sum[PARTS][4] = {};
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
          for (int i = 0; i < W::STEPS; i++) {
            uint32_t a[4];
            W::operand(a, flight[r0 + r][c], flight[r0 + r + 1][c], i);
#pragma unroll
            for (int p = 0; p < PARTS; p++) W::mma(sum[p], a, x[c][i][p]);
          }
        if (pairs.more()) {
          pairs.advance();
          load(r0 + r);
        }
#pragma unroll
        for (int q = 0; q < 2; q++) {
          const auto diagonal = [&](int p) { return lane.odd ? sum[p][2 * q + 1] : sum[p][2 * q]; };
          s[r + q] = NORMED ? fmaf(diagonal(PARTS - 1), W::LOW, diagonal(0)) : diagonal(0);
        }
      }
      const float sum = reduce_diagonal<G>(s, lane);
      const int j = j0 + r0 + lane.g / (8 / G);
      if (lane.holds && lane.g % (8 / G) == 0 && j < sums.rows) sums.put(j, sum * (NORMED ? 1.f / W::X_SCALE : 1.f / W::PLAIN_SCALE));
    }
  }

  // All rows of the block: each warp's sums into `sums`. Ends with the block's barrier.
  template <class Rows>
  DEVICE void multiply(const Sum& sums, const Rows&, int, float square_sum) {
    const DiagonalLane lane;
    if (NORMED) square_sum = warp_sum(square_sum);
#pragma unroll 1
    for (int j0 = 0; j0 < sums.rows; j0 += R) {
      group(sums, lane, j0);
    }
    if (NORMED && threadIdx.x % WARP == 0) sums.put(sums.rows, square_sum);
    __syncthreads();
  }
};
