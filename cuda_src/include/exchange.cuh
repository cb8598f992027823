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
  int32_t rank, world, D, log_lanes;  // 2^log_lanes: world, rounded up to a power of two
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
  const Share mine = share_of(next.blocks, blockIdx.x, gridDim.x);
#pragma unroll 1
  for (int b = mine.begin + lane; b < mine.begin + mine.count; b += WARP) {
    const Share units = share_of(next.units, b, next.blocks);
    const int unit = units.begin, end = unit + units.count;
    const int head = next.log_half < 31 ? unit >> next.log_half : 0, whole = next.log_half < 31 ? (head + 1) << next.log_half : end;
    const int rows = min(next.rows, min(end, whole) - unit);
    const int64_t at = next.row * ((int64_t(head) << (next.log_half & 31)) + unit);
    prefetch_l2(reinterpret_cast<const void*>(next.first + at), uint32_t(rows * next.row));
    if (next.second) prefetch_l2(reinterpret_cast<const void*>(next.second + at), uint32_t(rows * next.row));
  }
}

// Rows of this block, [begin, begin + count), whose shares share(i) says: h += their sums over ranks. A lane for each row and source, a row's in
// one warp: the code is short, as it is executed once and comes from memory.
template <class ShareOf>
DEVICE void exchange_rows(float* h, const Exchange& end, int sum, int begin, int count, const ShareOf& share) {
  const int lane = threadIdx.x % WARP, source = lane & ((1 << end.log_lanes) - 1), group = lane - source;
  Watch watch = watch_start(end.limit);
#pragma unroll 1
  for (int first = int(threadIdx.x - lane) >> end.log_lanes; first < count; first += int(blockDim.x) >> end.log_lanes) {
    const int i = first + (lane >> end.log_lanes), row = begin + i;
    const bool mine = i < count && source < end.world, own = mine && source == end.rank, theirs = mine && !own;
    uint32_t* slot = end.slot(end.rank, sum, source, row);
    // What the slot and h hold is on its way while the share is summed and pushed.
    uint32_t v = theirs ? ld_volatile_u32(slot) : 0u;
    const float old = own ? h[row] : 0.f;
    const uint32_t bits = mine ? sanitise(__float_as_uint(share(i))) : 0u;
    if (theirs) st_volatile_u32(end.slot(source, sum, end.rank, row), bits);
    while (theirs && v == SENTINEL) {
      watch_poll(watch, end.rank, source, uint32_t(sum) + 1);
      v = ld_volatile_u32(slot);
    }
    if (own) v = bits;
    float total = 0.f;
#pragma unroll 1
    for (int s = 0; s < end.world; s++) total += __uint_as_float(__shfl_sync(FULL_MASK, v, group + s));
    if (own) h[row] = old + total;
    if (theirs) st_volatile_u32(slot, SENTINEL);
  }
}

// A row-parallel product of all ranks: h += their sum. O-projection and down-projection.
template <class Engine>
DEVICE void gemv_exchange(float* h, const Exchange& end, int sum, const Ahead& next, const bf16* x, const typename Engine::W::type* w,
                          const float* scale, int N, int K, float* shared) {
  griddep_launch();
  SHARED(Share, kept);  // what would spill where it stayed in registers
  const int j = int(threadIdx.x) >> end.log_lanes;  // this thread's first row
  float first = 0.f;
  {
    const Share rows = block_share(N);
    if (threadIdx.x == 0) kept = rows;
    const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
    const typename Engine::Sum sums{shared, rows.count};
    Engine engine;
    engine.request(at, rows.count, K);
    if (Engine::W::SCALED && j < rows.count) first = scale[rows.begin + j];  // in a register: into shared memory it would have to arrive first
    engine.wait(x, K);
    engine.input();
    engine.multiply(sums, 0.f);
  }
  fetch_ahead(next);
  const Share rows = kept;
  const typename Engine::Sum sums{shared, rows.count};
  exchange_rows(h, end, sum, rows.begin, rows.count, [&](int i) {
    return Engine::W::SCALED ? sums.total(i) * (i == j ? first : scale[rows.begin + i]) : sums.total(i);
  });
}
