// gemv_mma.cuh - the engine of include/gemv.cuh that multiplies e4m3 weights on tensor cores, for one token.
//
// Widening e4m3 and multiplying it with fp32 costs 44 instructions for 16 weights, which short products have to wait for; with mma.sync it
// costs 15. The weights are the 16-row operand: a warp takes 16 rows (those the block has not are zero, and cost no memory traffic) and
// every eighth (W-th) stretch of 64 along K. The instruction's k index is mapped to memory such that thread (g, t) reads 16 neighbours of row
// g and 16 of row g + 8, a pack each; x is laid out in shared memory to match. U stretches are in flight a thread.
//
// x is f16, scaled by a power of two so that nothing overflows; the instruction's eight columns would all compute the same, so for normed
// inputs column 0 takes the rounded x and column 1 what the rounding took off, scaled by 2^11: their sum is x to 22 bits, at no cost. bf16
// inputs are exact in f16 (from 2^-10 up; below, to 2^-21), so that one column does.
//
// block: WARPS warps. shared memory behind the sums: K f16 (plain) or 2·(K + 8) f16 (normed), K rounded up to 64.
#pragma once
#include "gemv_sums.cuh"

constexpr int MMA_STRETCH = 64;               // weights of a row that a warp takes at a time: 4 threads × 16
constexpr float LOW_SCALE = 1.f / 2048.f;     // column 1 counts 2^-11
constexpr float X_SCALE = 1.f / 64.f;         // normed: |x| up to 4.2e6
constexpr float PLAIN_SCALE = 1.f / 16.f;     // plain: |x| up to 1.0e6

struct WeightE4m3Mma {
  using type = e4m3;
  static constexpr bool SCALED = true;
};

// Two e4m3 → two f16 in a word: the low or the high half of w.
DEVICE uint32_t widen_pair(uint32_t w, int high) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(high ? w >> 16 : w), __NV_E4M3);
  return uint32_t(h.x) | uint32_t(h.y) << 16;
}

template <int U, bool NORMED>
struct Mma {
  using W = WeightE4m3Mma;
  uint4 flight[U][2];  // rows g and g + 8 of a stretch
  const e4m3 *next0, *next1;  // those rows of the tile that is being requested
  int tile, stretch;          // the next request's
  int tiles, per_tile, tile_rows, stretches;

  DEVICE int warp() const { return int(threadIdx.x) / WARP; }
  DEVICE int g() const { return int(threadIdx.x) % WARP / 4; }
  DEVICE int t() const { return int(threadIdx.x) % 4; }

  template <class Rows>
  DEVICE void aim(const Rows& rows, int count) {
    const int j = tile * tile_rows + g(), end = min(count, (tile + 1) * tile_rows);
    next0 = j < end ? rows.row(j) : nullptr;
    next1 = j + 8 < end ? rows.row(j + 8) : nullptr;
  }
  // The next stretch of this warp into slot u; zero past the rows' end and past the last tile.
  template <class Rows>
  DEVICE void request_next(int u, const Rows& rows, int count, int K) {
    const int k = (stretch * int(blockDim.x) / WARP + warp()) * MMA_STRETCH + 16 * t();
    const bool inside = k < K && tile < tiles;
    flight[u][0] = inside && next0 ? ld_stream_v4(next0 + k) : make_uint4(0, 0, 0, 0);
    flight[u][1] = inside && next1 ? ld_stream_v4(next1 + k) : make_uint4(0, 0, 0, 0);
    if (++stretch < per_tile) return;
    stretch = 0, tile++;
    if (tile < tiles) aim(rows, count);
  }

  template <class Rows>
  DEVICE void request(const Rows& rows, int count, int K) {
    const int warps = int(blockDim.x) / WARP;
    stretches = (K + MMA_STRETCH - 1) / MMA_STRETCH;
    per_tile = (stretches + warps - 1) / warps;
    tiles = (count + 15) / 16;
    tile_rows = tiles ? (count + tiles - 1) / tiles : 0;  // even tiles: no tile of a few rows, whose loads would be few
    tile = stretch = 0;
    aim(rows, count);
#pragma unroll
    for (int u = 0; u < U; u++) request_next(u, rows, count, K);
  }
  DEVICE void norm_weight(const bf16* g, int K) {
    if (threadIdx.x == 0) prefetch_l2(g, uint32_t(K) * 2);
  }

  // Words of a plane of x in shared memory; two planes are 16 bytes out of step, so that their readers meet different banks.
  DEVICE int plane(int K) const { return (K + MMA_STRETCH - 1) / MMA_STRETCH * (MMA_STRETCH / 8) + 1; }
  DEVICE void pad(uint4* xs, int K) const {
    const int end = (K + MMA_STRETCH - 1) / MMA_STRETCH * (MMA_STRETCH / 8);
    for (int i = K / 8 + int(threadIdx.x); i < end; i += blockDim.x) {
      xs[i] = make_uint4(0, 0, 0, 0);
      if (NORMED) xs[plane(K) + i] = make_uint4(0, 0, 0, 0);
    }
  }
  DEVICE void input(const Sums& sums, const bf16* x, int K) {
    uint4* xs = sums.behind();
    for (int i = threadIdx.x; i < K / 8; i += blockDim.x) {
      float f[8];
      unpack_bf16(f, ld_global_v4(x + 8 * i));
#pragma unroll
      for (int q = 0; q < 8; q++) f[q] *= PLAIN_SCALE;
      xs[i] = pack_f16x8(f);
    }
    pad(xs, K);
    __syncthreads();
  }
  DEVICE float normed(const Sums& sums, const float* h, const bf16* weight, int K) {
    uint4* xs = sums.behind();
    float ss = 0.f;
    for (int i = threadIdx.x; i < K / 8; i += blockDim.x) {
      const float4 a = ld_global_f4(h + 8 * i), b = ld_global_f4(h + 8 * i + 4);
      float f[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, w[8], top[8];
      unpack_bf16(w, ld_global_v4(weight + 8 * i));
#pragma unroll
      for (int q = 0; q < 8; q++) {
        ss = fmaf(f[q], f[q], ss);
        f[q] *= w[q] * X_SCALE;
      }
      const uint4 high = pack_f16x8(f);
      unpack_f16(top, high);
#pragma unroll
      for (int q = 0; q < 8; q++) f[q] = (f[q] - top[q]) * (1.f / LOW_SCALE);
      xs[i] = high;
      xs[plane(K) + i] = pack_f16x8(f);
    }
    pad(xs, K);
    __syncthreads();
    return ss;
  }

  template <class Rows>
  DEVICE void multiply(const Sums& sums, const Rows& rows, int K, float square_sum) {
    const int lane = threadIdx.x % WARP, warps = int(blockDim.x) / WARP, count = sums.rows;
    float* mine = sums.warp(warp());
    const uint4* xs = sums.behind() + (NORMED && g() % 2 ? plane(K) : 0);
    float c[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
    int at = 0, done = 0;  // stretch and tile of slot 0
    const int steps = tiles * per_tile;
    for (int s0 = 0; s0 < steps; s0 += U) {
#pragma unroll
      for (int u = 0; u < U; u++) {
        if (s0 + u < steps) {  // the same in the whole block
          const int i = min((at * warps + warp()) * (MMA_STRETCH / 8), (stretches - 1) * (MMA_STRETCH / 8)) + 2 * t();
          const uint4 xa = xs[i], xb = xs[i + 1], w0 = flight[u][0], w1 = flight[u][1];
          const uint32_t x[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
          const uint32_t r0[4] = {w0.x, w0.y, w0.z, w0.w}, r1[4] = {w1.x, w1.y, w1.z, w1.w};
#pragma unroll
          for (int q = 0; q < 4; q++) {
            const uint32_t a[4] = {widen_pair(r0[q], 0), widen_pair(r1[q], 0), widen_pair(r0[q], 1), widen_pair(r1[q], 1)};
            const uint32_t b[2] = {x[2 * q], x[2 * q + 1]};
            mma_f16_16816(c[q % 2], a, b);
          }
          request_next(u, rows, count, K);
          if (++at == per_tile) {
            const float scale = NORMED ? 1.f / X_SCALE : 1.f / PLAIN_SCALE;
            const int j = done * tile_rows + g(), end = min(count, (done + 1) * tile_rows);
#pragma unroll
            for (int r = 0; r < 2; r++) {
              float y = c[0][2 * r] + c[1][2 * r];
              if (NORMED) y = fmaf(c[0][2 * r + 1] + c[1][2 * r + 1], LOW_SCALE, y);
              if (t() == 0 && j + 8 * r < end) mine[j + 8 * r] = y * scale;
              c[0][2 * r] = c[1][2 * r] = c[0][2 * r + 1] = c[1][2 * r + 1] = 0.f;
            }
            at = 0, done++;
          }
        }
      }
    }
    square_sum = warp_sum(square_sum);
    if (lane == 0) mine[count] = square_sum;
    __syncthreads();
  }
};
