// gemv_fma.cuh - the engine of include/gemv.cuh that multiplies bf16 weights with fused multiply-adds. How rows come: include/gemv_flight.cuh.
//
// R rows at a time are reduced over the warp by shuffles.
// block: ceil(K / (C·32·PACK)) warps. Nothing in shared memory but the sums.
#pragma once
#include "gemv_flight.cuh"

struct WeightBf16 {
  using type = bf16;
  static constexpr int PACK = 8;  // weights in 16 bytes
  static constexpr bool SCALED = false;
};

// s plus a pack of a row times its stretch of x; even and odd elements in sums of their own, which halves the chain of dependent adds.
DEVICE void dot_pack(float (&s)[2], uint4 w, const float (&x)[8]) {
  float a[8];
  unpack_bf16(a, w);
#pragma unroll
  for (int i = 0; i < 8; i++) s[i % 2] = fmaf(a[i], x[i], s[i % 2]);
}

// R sums a lane → each row's sum over the warp, by exchanging halves: R - 1 + log2(32 / R) shuffles instead of 5·R. Lane l ends with the
// sum of row l / (32 / R).
template <int R>
DEVICE float reduce_rows(float (&s)[R]) {
  static_assert(R >= 1 && R <= WARP && (R & (R - 1)) == 0, "halves of halves");
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

// x bf16 [K] as it is, half the registers for long K; or RMSNorm's input without its scalar in fp32, exact.
// WARPS: the most that a block has.
template <class W_, int C, int R, bool NORMED, int WARPS>
struct Fma {
  using W = W_;
  using Sum = Sums<(WARPS + 3) / 4 * 4>;
  Flight<W, C, R> flight;
  XBf16<W, C> plain;  // x, or the norm's weight
  float weighted[C][W::PACK];

  // Before griddep_wait.
  DEVICE void norm_weight(const bf16* g, int K) { flight.fetch_weight(plain, g, K); }
  template <class Rows>
  DEVICE void request(const Rows& rows, int count, int K) { flight.request(rows, count, K); }
  template <class T>
  DEVICE void wait(const T* x, int K) { flight.wait(x, K); }
  // After it: x bf16 [K].
  DEVICE void input() {
    flight.fetch(plain);
#pragma unroll
    for (int c = 0; c < C; c++)
      if (!flight.there[c]) plain.v[c][0] = make_uint4(0, 0, 0, 0);
  }
  // h·weight, h fp32 [K]; returns this thread's share of Σ h².
  DEVICE float normed() {
    flight.fetch(weighted);
    return weigh();
  }
  // The same of the h that `weighted` holds.
  DEVICE float weigh() {
    float ss = 0.f;
#pragma unroll
    for (int c = 0; c < C; c++) {
      float g[8], part[2] = {0.f, 0.f};
      plain.eight(g, c, 0);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float& x = weighted[c][i];
        part[i % 2] = fmaf(x, x, part[i % 2]);
        x = flight.there[c] ? x * g[i] : 0.f;
      }
      ss += flight.there[c] ? part[0] + part[1] : 0.f;
    }
    return ss;
  }
  DEVICE float dot(int r) const {
    float s[2] = {0.f, 0.f};
#pragma unroll
    for (int c = 0; c < C; c++) {
      float x[8];
      if (!NORMED) plain.eight(x, c, 0);
#pragma unroll
      for (int i = 0; NORMED && i < 8; i++) x[i] = weighted[c][i];
      dot_pack(s, flight.packs[r][c], x);
    }
    return s[0] + s[1];
  }
  // All rows of the block: each warp's sums into `sums`. Ends with the block's barrier.
  DEVICE void multiply(const Sum& sums, float square_sum) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int j0 = 0; j0 < sums.rows; j0 += R) {
      float s[R];
#pragma unroll
      for (int r = 0; r < R; r += flight.AT_ONCE) {
        s[r] = dot(r);
        if (flight.AT_ONCE == 2) s[r + flight.AT_ONCE - 1] = dot(r + flight.AT_ONCE - 1);
        flight.replace(r);
      }
      const float sum = reduce_rows<R>(s);
      const int j = j0 + lane / (WARP / R);
      if (lane % (WARP / R) == 0 && j < sums.rows) sums.put(j, sum);
    }
    if (NORMED) square_sum = warp_sum(square_sum);
    if (NORMED && lane == 0) sums.put(sums.rows, square_sum);
    __syncthreads();
  }
};
