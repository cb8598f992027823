// weight_ring.cuh - products whose weights come through shared memory: one warp fetches, the others multiply.
//
// The ring has `count` stages of some rows each, filled by bulk copies. The producer warp runs through the rows of all products of a kernel
// in order, as far ahead as the ring lets it: the weights of a whole model are one stream, and neither a product's end nor a wait for
// its input interrupts it for as long as the ring lasts. A stage's `full` barrier counts its bytes, its `empty` barrier the consumer warps that
// have read it.
//
// Consumers: a team of warps reads a row with all its threads; thread t of the team holds packs t, t + width, … of every row (C of them, 16
// bytes each), so its part of x stays in registers. Groups of R rows of a stage go to the block's teams in turn.
// minimum arch: sm_90
#pragma once
#include "gemv_x.cuh"
#include "wgmma.cuh"

constexpr int MOST_STAGES = 8;

struct WeightRing {
  unsigned char* stages;
  uint64_t *full, *empty;  // [MOST_STAGES] each
  int stage_bytes, count;
  int stage = 0;
  uint32_t parity = 0;
  DEVICE void next() {
    if (++stage == count) stage = 0, parity ^= 1;
  }
  DEVICE unsigned char* at() const { return stages + stage * stage_bytes; }
};

// A product as both sides see it: `rows` of the block, `bytes` of a row, rows of a stage.
struct WeightRows {
  int rows, bytes, each;
};

// The producer warp's part of one product. Each lane copies a row of the stage.
template <class Rows>
DEVICE void ring_produce(WeightRing& ring, const Rows& rows, const WeightRows& p) {
  const int lane = threadIdx.x % WARP;
  for (int first = 0; first < p.rows; first += p.each) {
    const int n = min(p.each, p.rows - first);
    if (lane == 0) {
      mbarrier_wait(ring.empty + ring.stage, ring.parity ^ 1);
      mbarrier_arrive_expect_tx(ring.full + ring.stage, uint32_t(n * p.bytes));
    }
    __syncwarp();
    if (lane < n) bulk_load(ring.at() + lane * p.bytes, rows.row(first + lane), uint32_t(p.bytes), ring.full + ring.stage);
    ring.next();
  }
}

// A consumer thread's place in a product: its team, and in the team's rows.
template <class W_, int C_>
struct Team {
  using W = W_;
  static constexpr int C = C_, R = C == 1 ? 4 : C == 2 ? 2 : 1;  // packs of a row; rows reduced together
  Lane lane;
  int team, teams;
  static DEVICE int warps(int K) { return (K + C * WARP * W::PACK - 1) / (C * WARP * W::PACK); }
  DEVICE Team(int K, int threads) {
    const int width = warps(K) * WARP;
    team = int(threadIdx.x) / width, teams = threads / width;
    lane = {int(threadIdx.x) - team * width, width};
    if (team >= teams) team = 1 << 20;  // threads that make no whole team have no rows
  }
};

// All rows of a product times x, into `sums`; square_sum: this thread's share of Σ h². The caller's barrier comes before anybody reads the sums.
template <class T, class X>
DEVICE void ring_multiply(WeightRing& ring, const WeightRows& p, const T& t, X& x, const Sums& sums, float square_sum) {
  using W = typename T::W;
  constexpr int C = T::C, R = T::R;
  const int in_warp = threadIdx.x % WARP;
  float* mine = sums.warp(t.lane.t / WARP);
  int offset[C];  // bytes, of pack c in a row
#pragma unroll
  for (int c = 0; c < C; c++) offset[c] = (c * t.lane.width + t.lane.t) * 16;
  for (int first = 0; first < p.rows; first += p.each, ring.next()) {
    const int n = min(p.each, p.rows - first);
    mbarrier_wait(ring.full + ring.stage, ring.parity);
    const unsigned char* stage = ring.at();
    for (int r0 = t.team * R; r0 < n; r0 += t.teams * R) {
      float one[R];
#pragma unroll
      for (int r = 0; r < R; r++) {
        const unsigned char* row = stage + min(r0 + r, n - 1) * p.bytes;
        float s[2] = {0.f, 0.f};
#pragma unroll
        for (int c = 0; c < C; c++) {
          if (C > 2) x.keep(c);
          if (offset[c] < p.bytes) dot_pack<W>(s, *reinterpret_cast<const uint4*>(row + offset[c]), x, c);
        }
        one[r] = s[0] + s[1];
      }
      const float sum = reduce_rows<R>(one);
      const int r = r0 + in_warp / (WARP / R);
      if (in_warp % (WARP / R) == 0 && r < n) mine[first + r] = sum;
    }
    __syncwarp();
    if (in_warp == 0) mbarrier_arrive(ring.empty + ring.stage);
  }
  square_sum = warp_sum(square_sum);
  if (t.team == 0 && in_warp == 0) mine[sums.rows] = square_sum;
}
