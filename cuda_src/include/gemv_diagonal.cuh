// gemv_diagonal.cuh - the engine of include/gemv.cuh that multiplies e4m3 weights on tensor cores: a third of the instructions of gemv_fma.cuh.
//
// Memory is read as there: a block reads each of its rows with all its threads, a warp 512 neighbouring bytes of one row, and thread t meets the
// same stretch of x in every row. The eight quads of a warp hold eight stretches of a row; these are the first eight rows of the instruction's
// 16-row operand, those of the next row the other eight. The eight columns are the stretches of x. So the products that are wanted lie on the
// diagonals of the two 8×8 halves of the result, and no value has to move between threads before it is multiplied. What lies beside the
// diagonals is not looked at: the tensor cores have the time.
//
// x is f16, scaled by PLAIN_SCALE so that nothing overflows: to 11 bits from 2^-10 to 2^20 (where it saturates), to 2^-21 below. bf16 inputs are exact from
// 2^-13 up. Normed inputs, h·g, are rounded once, to eight times the precision of the bf16 that a norm usually ends in.
// block: ceil(K / (C·32·PACK)) warps. In shared memory the sums and, for normed inputs, 1 KB a warp (static).
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
  Flight<W, C, R> flight;
  uint32_t x[C][W::STEPS][2];

  // h and the norm's weight are asked for in whole lines: a lane has four neighbours of each 128 that its warp holds, from `mine` on.
  static constexpr int LINES = W::PACK / 4;
  const float *h, *h_at;
  float2 weight[C][LINES];  // two bf16 in each
  int end;  // of the row, from this lane's first element
  static DEVICE int mine() { return (int(threadIdx.x) & ~(WARP - 1)) * W::PACK + int(threadIdx.x) % WARP * 4; }
  static DEVICE int offset(int c, int q) { return c * int(blockDim.x) * W::PACK + q * 4 * WARP; }

  // Before griddep_wait.
  DEVICE void norm_weight(const bf16* g, int K) {
    end = K - mine();
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int q = 0; q < LINES; q++) weight[c][q] = ld_global_f2(g + (offset(c, q) < end ? mine() + offset(c, q) : 0));
  }
  template <class Rows>
  DEVICE void request(const Rows& rows, int count, int K) { flight.request(rows, count, K); }
  DEVICE void wait(const bf16* src, int K) { flight.wait(src, K); }
  DEVICE void wait(const float* src, int K) {
    const float* p = src + mine();
    settle(p);
    h = src, h_at = p;
    griddep_wait_with(reinterpret_cast<uint64_t>(p));
  }

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
          x[c][2 * part + q / 2][q % 2] = flight.there[c] ? pair : 0u;
        }
      }
  }
  // h·weight, h fp32 [K]; returns this thread's share of Σ h². Operands are made in the layout in which h comes; they reach the threads whose weights
  // they meet through shared memory, in an order that has no bank conflicts.
  DEVICE float normed() {
    float4 v[C][LINES];
    fetch(v);
    return weigh(v);
  }
  DEVICE void fetch(float4 (&v)[C][LINES]) const {
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int q = 0; q < LINES; q++) v[c][q] = ld_global_f4(offset(c, q) < end ? h_at + offset(c, q) : h);
  }
  // The same of what has been fetched; again only after a barrier of the warp.
  DEVICE float weigh(const float4 (&v)[C][LINES]) {
    SHARED(uint2[WARPS][LINES * WARP], exchange);
    uint2* shared = exchange[threadIdx.x / WARP];
    const int lane = int(threadIdx.x) % WARP;
    float ss = 0.f;
#pragma unroll
    for (int c = 0; c < C; c++) {
      if (c) __syncwarp();
#pragma unroll
      for (int q = 0; q < LINES; q++) {
        const bool there = offset(c, q) < end;
        const float4 a = v[c][q];
        const uint2 g = make_uint2(__float_as_uint(weight[c][q].x), __float_as_uint(weight[c][q].y));
        const float scale = there ? W::PLAIN_SCALE : 0.f;
        const uint2 pairs = make_uint2(cvt_f16x2_sat(a.x * (bf16_lo(g.x) * scale), a.y * (bf16_hi(g.x) * scale)),
                                       cvt_f16x2_sat(a.z * (bf16_lo(g.y) * scale), a.w * (bf16_hi(g.y) * scale)));
        shared[place(q * WARP + lane)] = pairs;
        const float square = fmaf(a.x, a.x, a.y * a.y) + fmaf(a.z, a.z, a.w * a.w);
        ss += there ? square : 0.f;
      }
      __syncwarp();
#pragma unroll
      for (int q = 0; q < LINES; q += 2) {
        const uint4 pack = *reinterpret_cast<const uint4*>(shared + place(LINES * lane + q));
        x[c][q][0] = pack.x, x[c][q][1] = pack.y, x[c][q + 1][0] = pack.z, x[c][q + 1][1] = pack.w;
      }
    }
    return ss;
  }
  // Of the i-th four elements, pairs of which stay together.
  static DEVICE int place(int i) { return i ^ (i >> 3 & 2); }

  // The rows from j0 on that are in flight into the warp's sums, while those that take their place are requested.
  DEVICE void group(const Sum& sums, const DiagonalLane& lane, int j0) {
    constexpr int G = GROUP % 8 == 0 ? 8 : GROUP % 4 == 0 ? 4 : 2;
#pragma unroll
    for (int r0 = 0; r0 < R; r0 += G) {
      if (r0 && j0 + r0 >= sums.rows) return;
      float s[G];
#pragma unroll
      for (int r = 0; r < G; r += 2) {
        float sum[4] = {};
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
          for (int i = 0; i < W::STEPS; i++) {
            uint32_t a[4];
            W::operand(a, flight.packs[r0 + r][c], flight.packs[r0 + r + 1][c], i);
            W::mma(sum, a, x[c][i]);
          }
        flight.replace(r0 + r);
#pragma unroll
        for (int q = 0; q < 2; q++) s[r + q] = lane.odd ? sum[2 * q + 1] : sum[2 * q];
      }
      const float sum = reduce_diagonal<G>(s, lane);
      const int j = j0 + r0 + lane.g / (8 / G);
      if (lane.holds && lane.g % (8 / G) == 0 && j < sums.rows) sums.put(j, sum * (1.f / W::PLAIN_SCALE));
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
