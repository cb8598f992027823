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
#include "gemv_flight.cuh"
#include "gemv_operand.cuh"

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

// WARPS: the most that a block has. GROUP: rows that are reduced together, at most; between groups is a branch, in front of which the compiler
// does not take the next group's conversions, so that a request need not wait for rows further on.
template <class W_, int C, int R, bool NORMED, int WARPS, int GROUP = R>
struct Diagonal {
  using W = W_;
  using Sum = Sums<(WARPS + 3) / 4 * 4>;
  static constexpr int PARTS = NORMED ? 2 : 1;
  Flight<W, C, R> flight;
  XBf16<W, C> weight;  // of the norm
  uint32_t x[C][W::STEPS][PARTS][2];

  // Before griddep_wait.
  DEVICE void norm_weight(const bf16* g, int K) { flight.fetch_weight(weight, g, K); }
  template <class Rows>
  DEVICE void request(const Rows& rows, int count, int K) { flight.request(rows, count, K); }
  template <class T>
  DEVICE void wait(const T* src, int K) { flight.wait(src, K); }

  // After it: x bf16 [K].
  DEVICE void input() {
    XBf16<W, C> plain;
    flight.fetch(plain);
    take(plain);
  }
  // The same of what has been fetched.
  DEVICE void take(const XBf16<W, C>& plain) {
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int part = 0; part < W::PACK / 8; part++) {
        float f[8];
        plain.eight(f, c, part);
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const uint32_t pair = cvt_f16x2_sat(f[2 * q] * W::PLAIN_SCALE, f[2 * q + 1] * W::PLAIN_SCALE);
          x[c][2 * part + q / 2][0][q % 2] = flight.there[c] ? pair : 0u;
        }
      }
  }
  // h·weight, h fp32 [K]; returns this thread's share of Σ h².
  DEVICE float normed() {
    float h[C][W::PACK];
    flight.fetch(h);
    return weigh(h);
  }
  // The same of what has been fetched.
  DEVICE float weigh(const float (&h)[C][W::PACK]) {
    float ss = 0.f;
#pragma unroll
    for (int c = 0; c < C; c++) {
      float squares[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int part = 0; part < W::PACK / 8; part++) {
        float g[8];
        weight.eight(g, c, part);
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const int k = 8 * part + 2 * q;
          const float first = h[c][k], second = h[c][k + 1], scale = flight.there[c] ? W::X_SCALE : 0.f;
          squares[2 * q % 4] = fmaf(first, first, squares[2 * q % 4]), squares[2 * q % 4 + 1] = fmaf(second, second, squares[2 * q % 4 + 1]);
          const float a = first * (g[2 * q] * scale), b = second * (g[2 * q + 1] * scale);
          const uint32_t high = W::pair(a, b);
          x[c][k / 4][0][q % 2] = high;
          x[c][k / 4][PARTS - 1][q % 2] = W::pair((a - W::first(high)) * (1.f / W::LOW), (b - W::second(high)) * (1.f / W::LOW));
        }
      }
      ss += flight.there[c] ? (squares[0] + squares[1]) + (squares[2] + squares[3]) : 0.f;
    }
    return ss;
  }

  // The rows from j0 on that are in flight into the warp's sums, while those that take their place are requested.
  DEVICE void group(const Sum& sums, const DiagonalLane& lane, int j0) {
    constexpr int G = GROUP % 8 == 0 ? 8 : GROUP % 4 == 0 ? 4 : 2;
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
            W::operand(a, flight.packs[r0 + r][c], flight.packs[r0 + r + 1][c], i);
#pragma unroll
            for (int p = 0; p < PARTS; p++) W::mma(sum[p], a, x[c][i][p]);
          }
        flight.replace(r0 + r);
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
  DEVICE void multiply(const Sum& sums, float square_sum) {
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
