// gemm_sm90.cuh - C = P·Qᵀ on Hopper's tensor cores: bulk tensor copies into a ring, warpgroup products, one wave of blocks.
//
// P [p, K] and Q [q, K] row-major; one is the weights, the other the tokens. A block computes tiles of 128 × BN of C. Warpgroup 0 is the
// producer: one thread of it keeps STAGES slices of 128 bytes of K of both operands on their way (`full` barriers). Warpgroups 1 and 2
// wait for a slice, issue its products, and give the slice before it back (`empty` barriers).
//   many tokens: P = tokens, 64 for each warpgroup; Q = weights; BN is chosen so that the tiles fill the last wave too
//   few tokens:  P = weights, in two slabs of 64; Q = all the tokens, half of them for each warpgroup: the weights are read once, and a tile
//                is hardly wider than there are tokens
// Two blocks of a cluster work on neighbouring tiles of P with the same tile of Q; each reads half of Q's slice from L2, for both.
//
// Tiles: numbered with P's fastest, so that blocks that run together share Q's slices in L2. The first `split_tiles`, those that would not fill
// a wave of blocks, are cut along K into `pieces`, one for each cluster; the same stretch of K of all tiles at once, so that slices are shared
// here too. A tile in pieces is summed by the last block to arrive, in the order of K: the same bits every time. Then whole tiles, wave by wave.
// The weights' first slices are requested before griddep_wait: nothing that runs before this kernel writes them.
//
// grid: at most as many blocks as are resident, whole clusters; block: 384; dynamic shared memory: GemmRing::BYTES, a kilobyte for the barriers.
// bytes moved: P once for each group of tiles that run together, Q once; partial sums 128·BN·4 twice for each piece.
// PRECOND  sm_90a; rows of whole 16 bytes; tensor maps with boxes of 128 bytes × 128 (P) or BN / CLUSTER rows (Q), for pairs as
//          include/gemm_operand_sm90.cuh says; what GemmPlan says
#pragma once
#include "gemm_operand_sm90.cuh"
#include "vec.cuh"

constexpr int GEMM_P = 128;  // rows of a tile
constexpr int GEMM_CONSUMERS = 2 * WARPGROUP, GEMM_BLOCK = GEMM_CONSUMERS + WARPGROUP;
constexpr int GEMM_BARRIER = 1;  // named barrier of the consumers

// One instance of the kernel. BLOCKS: that a multiprocessor holds.
template <bool FEW_TOKENS, int TILE_WIDTH, int RING_STAGES, int BLOCKS_PER_SM, int CLUSTER_BLOCKS>
struct GemmShape {
  static constexpr bool FEW = FEW_TOKENS;
  static constexpr int BN = TILE_WIDTH, STAGES = RING_STAGES, BLOCKS = BLOCKS_PER_SM, CLUSTER = CLUSTER_BLOCKS;
  // A consumer thread's sums: of each slab of 64 rows that its warpgroup multiplies, and of the columns that it multiplies it with.
  static constexpr int SLABS = FEW ? 2 : 1, REGS = BN / 2 / SLABS;
  using Sums = float[SLABS][REGS];
};

struct ProductBf16 {
  static constexpr int K = 64;  // elements of a slice
  static constexpr bool SCALED = false;
  template <int REGS>
  static DEVICE void add(float (&d)[REGS], uint64_t a, uint64_t b, int accumulate) { wgmma_bf16(d, a, b, accumulate); }
};
struct ProductE4m3 {
  static constexpr int K = 128;
  static constexpr bool SCALED = true;
  template <int REGS>
  static DEVICE void add(float (&d)[REGS], uint64_t a, uint64_t b, int accumulate) { wgmma_e4m3(d, a, b, accumulate); }
};

// "Tile" here is a cluster's: CLUSTER neighbouring tiles of P. PRECOND  split_tiles·pieces <= clusters; pieces <= k_blocks;
// partials [grid, 128·BN]; counters [split_tiles·CLUSTER], 0 at first.
template <int CLUSTER>
struct GemmPlan {
  int p_tiles, q_tiles, k_blocks, split_tiles, pieces;
  float* partials;
  uint32_t* counters;
  static DEVICE int clusters() { return int(gridDim.x) / CLUSTER; }
  static DEVICE int cluster() { return int(blockIdx.x) / CLUSTER; }
  static DEVICE int rank() { return int(blockIdx.x) % CLUSTER; }
  DEVICE int tiles() const { return p_tiles * q_tiles; }
  DEVICE int p(int tile) const { return tile % p_tiles * CLUSTER + rank(); }  // the block's own tile of P
  DEVICE int q(int tile) const { return tile / p_tiles; }
};

// A tile, and the slices of it that are this cluster's.
struct GemmWork {
  int tile, k0, k1;
};
template <int CLUSTER>
struct GemmSchedule {
  const GemmPlan<CLUSTER>& plan;
  int whole;  // the next whole tile; before that, below 0, a piece
  DEVICE explicit GemmSchedule(const GemmPlan<CLUSTER>& p) : plan(p), whole(-1) {}
  DEVICE bool next(GemmWork& w) {
    const int c = plan.cluster();
    if (whole < 0) {
      whole = plan.split_tiles + c;
      if (c < plan.split_tiles * plan.pieces) {
        const int piece = c / plan.split_tiles;
        w = {c % plan.split_tiles, plan.k_blocks * piece / plan.pieces, plan.k_blocks * (piece + 1) / plan.pieces};
        return true;
      }
    }
    w = {whole, 0, plan.k_blocks};
    whole += plan.clusters();
    return w.tile < plan.tiles();
  }
};

// Shared memory: STAGES × (P's slice, Q's slice), then the barriers.
template <class Shape>
struct GemmRing {
  static constexpr int STAGES = Shape::STAGES, P_BYTES = GEMM_P * SWIZZLE_ROW, STAGE_BYTES = P_BYTES + Shape::BN * SWIZZLE_ROW;
  unsigned char* base;
  DEVICE unsigned char* p(int stage) const { return base + stage * STAGE_BYTES; }
  DEVICE unsigned char* q(int stage) const { return p(stage) + P_BYTES; }
  DEVICE uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(base + STAGES * STAGE_BYTES) + stage; }
  DEVICE uint64_t* empty(int stage) const { return full(STAGES + stage); }
  DEVICE int* last() const { return reinterpret_cast<int*>(full(2 * STAGES)); }  // a word from one consumer to all
  DEVICE void init() const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < STAGES; s++) {
        mbarrier_init(full(s), 1);
        mbarrier_init(empty(s), Shape::CLUSTER * (GEMM_CONSUMERS / WARP));
      }
      mbarrier_init_fence();
    }
    if (Shape::CLUSTER == 1)
      __syncthreads();
    else
      cluster_sync();
  }
  // Called by every thread of a consumer warp. Whoever copies into the stage, of whichever block, must know.
  DEVICE void release(int stage) const {
    const int lane = int(threadIdx.x) % WARP;
    if (lane >= Shape::CLUSTER) return;
    if (Shape::CLUSTER == 1)
      mbarrier_arrive(empty(stage));
    else
      mbarrier_arrive_at(empty(stage), uint32_t(lane));
  }
};

// The producer's position in the block's work, slice by slice.
template <int CLUSTER>
struct GemmCursor {
  GemmSchedule<CLUSTER> schedule;
  GemmWork work;
  bool more;
  DEVICE explicit GemmCursor(const GemmPlan<CLUSTER>& plan) : schedule(plan), work{0, 0, 0}, more(schedule.next(work)) {}
  DEVICE void next() {
    if (++work.k0 == work.k1) more = schedule.next(work);
  }
};

// One thread: every slice of the block's work into the ring; of the first ones the weights before griddep_wait.
template <class Product, class Shape, class P, class Q>
DEVICE void gemm_produce(const GemmRing<Shape>& ring, const GemmPlan<Shape::CLUSTER>& plan, const P& p, const Q& q) {
  using Cursor = GemmCursor<Shape::CLUSTER>;
  const auto load_p = [&](const GemmWork& w, int s) { p.load(ring.p(s), ring.full(s), plan.p(w.tile), w.k0 * Product::K); };
  const auto load_q = [&](const GemmWork& w, int s) {
    if (Shape::CLUSTER == 1)
      q.load(ring.q(s), ring.full(s), plan.q(w.tile), w.k0 * Product::K);
    else
      q.share(ring.q(s), ring.full(s), plan.q(w.tile), w.k0 * Product::K, plan.rank());
  };
  Cursor ahead(plan), at(plan);
  for (int s = 0; s < Shape::STAGES && ahead.more; s++, ahead.next()) {
    mbarrier_arrive_expect_tx(ring.full(s), GemmRing<Shape>::STAGE_BYTES);
    if (Shape::FEW)
      load_p(ahead.work, s);
    else
      load_q(ahead.work, s);
  }
  griddep_wait();
  RingPosition<Shape::STAGES> r;
  for (bool first = true; at.more; at.next()) {
    if (!first) {
      mbarrier_wait(ring.empty(r.stage), r.parity ^ 1);
      mbarrier_arrive_expect_tx(ring.full(r.stage), GemmRing<Shape>::STAGE_BYTES);
    }
    if (!first || !Shape::FEW) load_p(at.work, r.stage);
    if (!first || Shape::FEW) load_q(at.work, r.stage);
    r.next();
    if (r.stage == 0) first = false;
  }
}

// The consumers' sums over some slices of a tile.
template <class Product, class Shape>
DEVICE void gemm_multiply(typename Shape::Sums& sum, const GemmRing<Shape>& ring, RingPosition<Shape::STAGES>& r, int slices) {
  const int group = int(threadIdx.x) / WARPGROUP - 1;
  const int p_row = Shape::FEW ? 0 : group * 64, q_row = Shape::FEW ? group * (Shape::BN / 2) : 0;
  int before = -1;
  for (int k = 0; k < slices; k++) {
    mbarrier_wait(ring.full(r.stage), r.parity);
    const uint64_t a = wgmma_tile(ring.p(r.stage) + p_row * SWIZZLE_ROW), b = wgmma_tile(ring.q(r.stage) + q_row * SWIZZLE_ROW);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < SWIZZLE_ROW / 32; i++)
#pragma unroll
      for (int slab = 0; slab < Shape::SLABS; slab++) Product::add(sum[slab], a + slab * 64 * (SWIZZLE_ROW / 16) + 2 * i, b + 2 * i, k > 0 || i > 0);
    wgmma_commit();
    wgmma_wait<1>();  // the slice before this one has been read
    if (before >= 0) ring.release(before);
    before = r.stage;
    r.next();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int slab = 0; slab < Shape::SLABS; slab++) wgmma_results(sum[slab]);
  ring.release(before);
}

// A piece of a tile: its sums go to memory; the block that arrives last gets the whole tile's sums. Returns whether this one did.
template <class Shape>
DEVICE bool gemm_combine(typename Shape::Sums& sums, const GemmPlan<Shape::CLUSTER>& plan, const GemmWork& w, int* last) {
  constexpr int SUMS = Shape::SLABS * Shape::REGS, BATCH = SUMS >= 64 ? 1 : 64 / SUMS;  // pieces whose sums are on their way together
  float* sum = sums[0];
  const int thread = int(threadIdx.x) - WARPGROUP, pieces = plan.pieces;
  const auto piece = [&](int i) {
    const int64_t slot = (i * plan.split_tiles + w.tile) * Shape::CLUSTER + plan.rank();
    return reinterpret_cast<float4*>(plan.partials + slot * (GEMM_P * Shape::BN)) + thread;
  };
  float4* mine = piece(plan.cluster() / plan.split_tiles);
#pragma unroll
  for (int i = 0; i < SUMS / 4; i++) mine[i * GEMM_CONSUMERS] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
  named_barrier(GEMM_BARRIER, GEMM_CONSUMERS);
  uint32_t* counter = plan.counters + w.tile * Shape::CLUSTER + plan.rank();
  if (thread == 0) *last = atom_inc_acq_rel_gpu(counter, uint32_t(pieces - 1)) == uint32_t(pieces - 1);
  named_barrier(GEMM_BARRIER, GEMM_CONSUMERS);
  if (!*last) return false;
#pragma unroll
  for (int i = 0; i < SUMS; i++) sum[i] = 0.f;
  for (int k0 = 0; k0 < pieces; k0 += BATCH) {
    float4 part[BATCH][SUMS / 4];
#pragma unroll
    for (int k = 0; k < BATCH; k++)
#pragma unroll
      for (int i = 0; i < SUMS / 4; i++)
        part[k][i] = k0 + k < pieces ? ld_global_f4(piece(k0 + k) + i * GEMM_CONSUMERS) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int k = 0; k < BATCH; k++)
#pragma unroll
      for (int i = 0; i < SUMS / 4; i++) {
        sum[4 * i] += part[k][i].x, sum[4 * i + 1] += part[k][i].y;
        sum[4 * i + 2] += part[k][i].z, sum[4 * i + 3] += part[k][i].w;
      }
  }
  return true;
}

// The whole kernel. out(sum, p_tile, q_tile): what becomes of a tile's sums, which it may change; called by the consumers, all threads of a warp together.
template <class Product, class Shape, class P, class Q, class Out>
DEVICE void gemm_sm90(const GemmPlan<Shape::CLUSTER>& plan, const P& p, const Q& q, const Out& out) {
  DYN_SHARED_TILES(unsigned char, memory);
  const GemmRing<Shape> ring{memory};
  ring.init();
  griddep_launch();
  if (threadIdx.x < WARPGROUP) {
    register_decrease<Shape::BLOCKS == 1 ? 40 : 48>();
    if (threadIdx.x == 0) gemm_produce<Product, Shape>(ring, plan, p, q);
    __syncwarp();
  } else {
    register_increase<Shape::BLOCKS == 1 ? 232 : 96>();
    griddep_wait();
    GemmSchedule<Shape::CLUSTER> schedule(plan);
    RingPosition<Shape::STAGES> r;
    typename Shape::Sums sum;
    for (GemmWork w; schedule.next(w);) {
      gemm_multiply<Product, Shape>(sum, ring, r, w.k1 - w.k0);
      if (w.k1 - w.k0 == plan.k_blocks || gemm_combine<Shape>(sum, plan, w, ring.last())) out(sum, plan.p(w.tile), plan.q(w.tile));
    }
  }
  if (Shape::CLUSTER > 1) cluster_sync();  // nobody leaves while another block may still arrive at its barriers
}
