// gemv_each_fma.cuh - the engine of include/gemv_each.cuh with the arithmetic of include/gemv_fma.cuh: bf16 weights.
//
// Q rows of W times EACH rows of the pass at a time: their sums are reduced over the warp together, in the order of one row's.
#pragma once
#include "gemv_each_flight.cuh"
#include "gemv_fma.cuh"

DEVICE void unpack_half(float (&f)[4], uint4 v, int half) {
  const uint32_t a = half ? v.z : v.x, b = half ? v.w : v.y;
  f[0] = bf16_lo(a), f[1] = bf16_hi(a), f[2] = bf16_lo(b), f[3] = bf16_hi(b);
}

template <class W_, int C, int R, bool NORMED, int WARPS>
struct EachFma : Fma<W_, C, R, NORMED, WARPS> {
  using One = Fma<W_, C, R, NORMED, WARPS>;
  using Sum = typename One::Sum;
  using One::flight;
  using One::weighted;
  static constexpr int PACKS = NORMED ? 2 * C : C, BATCH = C < 4 ? 4 / C : 1;
  // Rows of W that a value of x is loaded for, rows of the pass beside.
  static constexpr int P = Flight<W_, C, R>::AT_ONCE, Q = C == 1 && R > 4 ? 4 : P, EACH = 4, V = EACH * Q;
  using Input = PassInput<PACKS>;
  Input x;

  // After griddep_wait: x bf16 [count, K].
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
      for (int b = 0; b < BATCH; b++)
#pragma unroll
        for (int c = 0; c < C; c++)
          if (m0 + b < count) *x.at(m0 + b, c) = flight.there[c] ? raw[b].v[c][0] : make_uint4(0, 0, 0, 0);
    }
  }
  // h·weight, h fp32 [count, K], and each row's Σ h².
  DEVICE void normed(const PassSums<Sum>& sums, int count, int K) {
#pragma unroll 1
    for (int m0 = 0; m0 < count; m0 += BATCH) {
      float raw[BATCH][C][8];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        flight.fetch(raw[b]);
        flight.template further<float>(m0 + b + 1 < count ? K : 0);
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        if (m0 + b >= count) break;
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
          for (int i = 0; i < 8; i++) weighted[c][i] = raw[b][c][i];
        const float square_sum = warp_sum(One::weigh());
        if (threadIdx.x % WARP == 0) sums.of(m0 + b).put(sums.chunk, square_sum);
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
          for (int q = 0; q < 2; q++) {
            const float* f = &weighted[c][4 * q];
            *reinterpret_cast<float4*>(x.at(m0 + b, 2 * c + q)) = make_float4(f[0], f[1], f[2], f[3]);
          }
      }
    }
  }
  // Half of what this thread has of row m.
  DEVICE void input(float (&f)[4], int m, int c, int half) const {
    if (NORMED) {
      const float4 v = *reinterpret_cast<const float4*>(x.at(m, (NORMED ? 2 : 1) * c + half));
      f[0] = v.x, f[1] = v.y, f[2] = v.z, f[3] = v.w;
    } else {
      const uint2 v = reinterpret_cast<const uint2*>(x.at(m, c))[half];
      f[0] = bf16_lo(v.x), f[1] = bf16_hi(v.x), f[2] = bf16_lo(v.y), f[3] = bf16_hi(v.y);
    }
  }
  // The next `rows` rows of W for all rows of the pass. Ends with the block's barrier.
  DEVICE void multiply(const PassSums<Sum>& sums, int rows, int count) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int j0 = 0; j0 < rows; j0 += R)
#pragma unroll
      for (int r = 0; r < R; r += Q) {
#pragma unroll 1
        for (int m0 = 0; m0 < count && j0 + r < rows; m0 += EACH) {
          float s[EACH][Q][2] = {};
          Refill<P, Q, Flight<W_, C, R>> refill(flight, m0 + EACH >= count);
#pragma unroll
          for (int c = 0; c < C; c++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
              float w[Q][4];
#pragma unroll
              for (int q = 0; q < Q; q++) unpack_half(w[q], flight.packs[r + q][c], half);
              if (half) refill.load(flight, r, c);
#pragma unroll
              for (int m = 0; m < EACH; m++) {
                float f[4];
                input(f, min(m0 + m, count - 1), c, half);
#pragma unroll
                for (int q = 0; q < Q; q++)
#pragma unroll
                  for (int i = 0; i < 4; i++) s[m][q][i % 2] = fmaf(w[q][i], f[i], s[m][q][i % 2]);
              }
            }
          }
          float flat[V];
#pragma unroll
          for (int v = 0; v < V; v++) flat[v] = s[v / Q][v % Q][0] + s[v / Q][v % Q][1];
          const float sum = reduce_rows<V>(flat);
          const int v = lane / (WARP / V), m = m0 + v / Q, j = j0 + r + v % Q;
          if (lane % (WARP / V) == 0 && m < count && j < rows) sums.of(m).put(j, sum);
        }
      }
    __syncthreads();
  }
};
