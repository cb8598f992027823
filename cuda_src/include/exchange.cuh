// exchange.cuh - the all-reduce that is no kernel: O and down exchange their rows between the ranks themselves, and add the sums to h.
//
//   h[n] += Σ_r scale_r[n]·(W_r·x_r)[n]   in fp32, summed in rank order: all ranks hold the same bits
//
// A decode step makes the sums f = 0, 1, 2, … by turns after O (even) and after down (odd). In each, a block multiplies its rows, stores the
// results as fp32 into slot [rank] of every peer's receive memory, and waits for what the peers have for the same rows. Then it adds
// them to h and ends. What is left of an all-reduce is one way over the link: no launch, no second reading and storing.
//
// Data is its own flag, as in include/lamport.cuh: memory is armed with 0x80000000, compared bit by bit, payloads are sanitised.
// Receive memory has two halves, f & 1. The half is a constant of the launch: there is no rotation that a graph could have wrong. A block re-arms
// what it has read. Why two are enough: rank b stores data of f + 2 into rank a's half f & 1 after b's griddep_wait, so after b's sum f + 1 has
// ended, for which b has had a's data of f + 1, stored after a's griddep_wait of f + 1, so after a's sum f had ended, re-arming
// included. Every kernel of a step executes griddep_wait, so what lies between two sums does not loosen that chain.
//
// While the block waits its multiprocessor would read nothing, and the next kernel's blocks cannot start before this one's end. So it first asks for
// the beginning of the next product's weights to be brought into L2 (Ahead).
//
// PRECOND  sums alternate between the halves without exception, on all ranks.  PRECOND  every block owns a row.
// PRECOND  all blocks of all ranks can be resident at once, beside what runs on a GPU that ranks share: each waits for others.
// PRECOND  receive memory armed before the first sum.
#pragma once
#include "gemv_sums.cuh"
#include "lamport.cuh"

// One rank's end; passed by value.
struct Exchange {
  Peers receive;  // each rank's f32 [2, world, D]
  PollLimit limit;
  int32_t rank, world, D;
  DEVICE uint32_t* slot(int owner, int sum, int source, int row) const {
    return receive.words(owner) + ((sum & 1) * world + source) * D + row;
  }
};

// What the next product reads first; passed by value. Its units are spread over its blocks as block_share does; a unit is a row, or two of which
// the second lies elsewhere (a gate's up, the other half of a rotation).
struct Ahead {
  uint64_t first, second;  // addresses of the units' rows; second 0: one row a unit
  int64_t row;             // bytes of a row
  int32_t units, blocks;   // of the next product
  int32_t log_half;        // unit p is row p, from which half of a head's rows is skipped for each head before it; 31: nothing is
  int32_t rows;            // of each block and address that are asked for; 0: none
};

// This block's part of it, asked for by the block's last warp.
DEVICE void fetch_ahead(const Ahead& next) {
  const int lane = int(threadIdx.x) - int(blockDim.x) + WARP;
  if (lane < 0 || next.rows == 0) return;
  const int stop = int(int64_t(next.blocks) * (blockIdx.x + 1) / gridDim.x);
#pragma unroll 1
  for (int b = int(int64_t(next.blocks) * blockIdx.x / gridDim.x) + lane; b < stop; b += WARP) {
    const int unit = int(int64_t(next.units) * b / next.blocks), end = int(int64_t(next.units) * (b + 1) / next.blocks);
    const int head = next.log_half < 31 ? unit >> next.log_half : 0, whole = next.log_half < 31 ? (head + 1) << next.log_half : end;
    const int rows = min(next.rows, min(end, whole) - unit);
    const int64_t at = next.row * ((int64_t(head) << (next.log_half & 31)) + unit);
    prefetch_l2(reinterpret_cast<const void*>(next.first + at), uint32_t(rows * next.row));
    if (next.second) prefetch_l2(reinterpret_cast<const void*>(next.second + at), uint32_t(rows * next.row));
  }
}

DEVICE void push_row(const Exchange& end, int sum, int row, uint32_t bits) {
#pragma unroll
  for (int d = 1; d < MAX_RANKS; d++) {
    const int peer = end.rank + d < end.world ? end.rank + d : end.rank + d - end.world;
    if (d < end.world) st_volatile_u32(end.slot(peer, sum, end.rank, row), bits);
  }
}

// Σ over ranks of row `row`, this rank's share being `own`; the slots are armed again.
DEVICE float take_row(const Exchange& end, int sum, int row, uint32_t own, Watch& watch) {
  uint32_t* slots = end.slot(end.rank, sum, 0, row);
  uint32_t v[MAX_RANKS];
#pragma unroll
  for (int s = 0; s < MAX_RANKS; s++) v[s] = s == end.rank ? own : s < end.world ? ld_volatile_u32(slots + s * end.D) : 0u;
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int s = 0; s < MAX_RANKS; s++)
      if (v[s] == SENTINEL) {
        missing = s;
        v[s] = ld_volatile_u32(slots + s * end.D);
      }
    if (missing < 0) break;
    watch_poll(watch, end.rank, missing, uint32_t(sum) + 1);
  }
  float total = 0.f;
#pragma unroll
  for (int s = 0; s < MAX_RANKS; s++) {
    total += __uint_as_float(v[s]);
    if (s != end.rank && s < end.world) st_volatile_u32(slots + s * end.D, SENTINEL);
  }
  return total;
}

// A row-parallel product of all ranks: h += their sum. O-projection and down-projection.
template <class Engine>
DEVICE void gemv_exchange(float* h, const Exchange& end, int sum, const Ahead& next, const bf16* x, const typename Engine::W::type* w,
                          const float* scale, int N, int K, float* shared) {
  griddep_launch();
  const Share rows = block_share(N);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  const Sums sums{shared, rows.count};
  Engine engine;
  engine.request(at, rows.count, K);
  if (Engine::W::SCALED) stage(sums.constants(0), scale + rows.begin, rows.count);
  griddep_wait();
  engine.input(x, K);
  engine.multiply(sums, at, K, 0.f);
  const float* scales = sums.constants(0);
  auto share = [&](int i) { return sanitise(__float_as_uint(Engine::W::SCALED ? sums.total(i) * scales[i] : sums.total(i))); };
  for (int i = threadIdx.x; i < rows.count; i += blockDim.x) push_row(end, sum, rows.begin + i, share(i));
  fetch_ahead(next);
  Watch watch = watch_start(end.limit);
  for (int i = threadIdx.x; i < rows.count; i += blockDim.x) {
    float* to = h + rows.begin + i;
    const float old = *to;  // arrives while the peers' shares do
    *to = old + take_row(end, sum, rows.begin + i, share(i), watch);
  }
}
