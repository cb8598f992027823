// gemv_each_diagonal.cuh - the engine of include/gemv_each.cuh with the arithmetic of include/gemv_diagonal.cuh: e4m3 weights.
//
// Q rows of W times EACH rows of the pass at a time: their sums are reduced over the diagonal's lanes together, in the order of one row's.
#pragma once
#include "gemv_diagonal.cuh"
#include "gemv_each_flight.cuh"

template <class W_, int C, int R, bool NORMED, int WARPS>
struct EachDiagonal : Diagonal<W_, C, R, NORMED, WARPS> {
  using One = Diagonal<W_, C, R, NORMED, WARPS>;
  using Sum = typename One::Sum;
  using One::flight;
  static constexpr int STEPS = W_::STEPS, TOGETHER = 2;  // steps whose x is in a pack
  static constexpr int PACKS = C * STEPS / TOGETHER, BATCH = C < 2 ? 2 / C : 1;
  static constexpr int P = 2, Q = C == 1 && R > 4 ? 4 : P, EACH = 8 / Q, VALUES = 8;
  using Input = PassInput<PACKS>;
  Input x;

  // One::x of row m.
  DEVICE void keep(int m) const {
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int i = 0; i < STEPS; i += TOGETHER) {
        const auto& first = One::x[c][i];
        const auto& second = One::x[c][i + 1];
        *x.at(m, (c * STEPS + i) / TOGETHER) = make_uint4(first[0], first[1], second[0], second[1]);
      }
  }
  DEVICE void inputs(int count, int K) {
#pragma unroll 1
    for (int m0 = 0; m0 < count; m0 += BATCH) {
      XBf16<W_, C> raw[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        flight.fetch(raw[b]);
        flight.template further<bf16>(m0 + b + 1 < count ? K : 0);
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        if (m0 + b >= count) break;
        One::take(raw[b]);
        keep(m0 + b);
      }
    }
  }
  DEVICE void normed(const PassSums<Sum>& sums, int count, int K) {
#pragma unroll 1
    for (int m0 = 0; m0 < count; m0 += BATCH) {
      float4 raw[BATCH][C][One::LINES];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        One::fetch(raw[b]);
        const int further = m0 + b + 1 < count ? K : 0;
        One::h += further, One::h_at += further;
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        if (m0 + b >= count) break;
        const float square_sum = warp_sum(One::weigh(raw[b]));
        if (threadIdx.x % WARP == 0) sums.of(m0 + b).put(sums.chunk, square_sum);
        keep(m0 + b);
        __syncwarp();
      }
    }
  }
  // The next `rows` rows of W for all rows of the pass. Ends with the block's barrier.
  DEVICE void multiply(const PassSums<Sum>& sums, int rows, int count) {
    const DiagonalLane lane;
#pragma unroll 1
    for (int j0 = 0; j0 < rows; j0 += R)
#pragma unroll
      for (int r = 0; r < R; r += Q) {
#pragma unroll 1
        for (int m0 = 0; m0 < count && j0 + r < rows; m0 += EACH) {
          float sum[EACH][Q / 2][4] = {};
          Refill<P, Q, Flight<W_, C, R>> refill(flight, m0 + EACH >= count);
#pragma unroll
          for (int c = 0; c < C; c++) {
            uint4 w[Q];
#pragma unroll
            for (int q = 0; q < Q; q++) w[q] = flight.packs[r + q][c];
            refill.load(flight, r, c);
#pragma unroll
            for (int i = 0; i < STEPS; i += TOGETHER) {
              uint32_t a[Q / 2][TOGETHER][4];
#pragma unroll
              for (int q = 0; q < Q / 2; q++)
#pragma unroll
                for (int t = 0; t < TOGETHER; t++) W_::operand(a[q][t], w[2 * q], w[2 * q + 1], i + t);
#pragma unroll
              for (int m = 0; m < EACH; m++) {
                const uint4 f = *x.at(min(m0 + m, count - 1), (c * STEPS + i) / TOGETHER);
                const uint32_t first[2] = {f.x, f.y}, second[2] = {f.z, f.w};
#pragma unroll
                for (int q = 0; q < Q / 2; q++) {
                  W_::mma(sum[m][q], a[q][0], first);
                  W_::mma(sum[m][q], a[q][1], second);
                }
              }
            }
          }
          float flat[VALUES];
#pragma unroll
          for (int m = 0; m < EACH; m++)
#pragma unroll
            for (int q = 0; q < Q; q++) {
              const float(&pair)[4] = sum[m][q / 2];
              flat[Q * m + q] = lane.odd ? pair[2 * (q % 2) + 1] : pair[2 * (q % 2)];
            }
          const float total = reduce_diagonal<VALUES>(flat, lane);
          const int m = m0 + lane.g / Q, j = j0 + r + lane.g % Q;
          if (lane.holds && m < count && j < rows) sums.of(m).put(j, total * (1.f / W_::PLAIN_SCALE));
        }
      }
    __syncthreads();
  }
};
