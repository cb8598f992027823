// gemm_ring_sm90.cuh - the plan of a product (tiles, pieces, clusters), the ring of slices in shared memory, and the threads that fill it
// (include/gemm_sm90.cuh tells how they work together).
#pragma once
#include "gemm_operand_sm90.cuh"
#include "vec.cuh"

constexpr int GEMM_P = 128;  // rows of a tile
constexpr int GEMM_CONSUMERS = 2 * WARPGROUP;  // threads; the producers' are behind them
constexpr int GEMM_BARRIER = 1;  // named barrier of the consumers

// One instance of the kernel. BLOCKS: that a multiprocessor holds. CLUSTER_BLOCKS: that share slices; 0: the cluster, of any size, cuts a tile.
template <bool FEW_TOKENS, int TILE_WIDTH, int RING_STAGES, int BLOCKS_PER_SM, int CLUSTER_BLOCKS>
struct GemmShape {
  static constexpr bool FEW = FEW_TOKENS;
  static constexpr int BN = TILE_WIDTH, STAGES = RING_STAGES, BLOCKS = BLOCKS_PER_SM, CLUSTER = CLUSTER_BLOCKS ? CLUSTER_BLOCKS : 1;
  static constexpr bool CUT = CLUSTER_BLOCKS == 0;
  // Where tiles are cut the producers are two warps, and no registers move.
  static constexpr int THREADS = GEMM_CONSUMERS + (CUT ? 2 * WARP : WARPGROUP);
  // A consumer thread's sums: of each slab of 64 rows that its warpgroup multiplies, and of the columns that it multiplies it with.
  static constexpr int SLABS = FEW ? 2 : 1, REGS = BN / 2 / SLABS;
  using Sums = float[SLABS][REGS];
};

struct ProductBf16 {
  static constexpr int K = 64;  // elements of a slice
  static constexpr bool SCALED = false, BLOCKS = false;
  template <int REGS>
  static DEVICE void add(float (&d)[REGS], uint64_t a, uint64_t b, int accumulate) { wgmma_bf16(d, a, b, accumulate); }
};
struct ProductE4m3 {
  static constexpr int K = 128;
  static constexpr bool SCALED = true, BLOCKS = false;
  template <int REGS>
  static DEVICE void add(float (&d)[REGS], uint64_t a, uint64_t b, int accumulate) { wgmma_e4m3(d, a, b, accumulate); }
};
struct ProductBlocks : ProductE4m3 {  // a token has a scale for each slice
  static constexpr bool BLOCKS = true;
};

// PRECOND  split_tiles·pieces <= clusters; pieces <= k_blocks; partials [split_tiles·pieces·CLUSTER, 128·BN]; counters [split_tiles·CLUSTER], 0 at first.
template <int CLUSTER>
struct GemmPlan {
  int p_tiles, q_tiles;  // of blocks
  int k_blocks, split_tiles, pieces;
  bool share_p;  // the cluster's tiles are neighbours along Q
  bool cut;      // the blocks of a hardware cluster have a tile's pieces: all tiles are split ones, and the grid is split_tiles·pieces
  float* partials;
  uint32_t* counters;
  static DEVICE int clusters() { return int(gridDim.x) / CLUSTER; }
  static DEVICE int cluster() { return int(blockIdx.x) / CLUSTER; }
  static DEVICE int rank() { return int(blockIdx.x) % CLUSTER; }
  DEVICE int p_groups() const { return share_p ? p_tiles : (p_tiles + CLUSTER - 1) / CLUSTER; }
  DEVICE int tiles() const { return p_groups() * (share_p ? (q_tiles + CLUSTER - 1) / CLUSTER : q_tiles); }
  // The block's own tile of the cluster's; one beyond the last is computed from zeros and written nowhere.
  DEVICE int p(int tile) const { return share_p ? tile % p_tiles : tile % p_groups() * CLUSTER + rank(); }
  DEVICE int q(int tile) const { return share_p ? tile / p_tiles * CLUSTER + rank() : tile / p_groups(); }
};

// A tile, the block's place in it, and the slices of it that are this cluster's.
struct GemmWork {
  int tile, k0, k1, p, q;
};
template <int CLUSTER>
struct GemmSchedule {
  const GemmPlan<CLUSTER>& plan;
  int whole;  // the next whole tile; before that, below 0, a piece
  DEVICE explicit GemmSchedule(const GemmPlan<CLUSTER>& p) : plan(p), whole(-1) {}
  DEVICE bool next(GemmWork& w) {
    const int c = plan.cluster();
    w = {whole, 0, plan.k_blocks, 0, 0};
    if (whole < 0) {
      w.tile = plan.split_tiles + c;
      if (c < plan.split_tiles * plan.pieces) {
        const int piece = plan.cut ? c % plan.pieces : c / plan.split_tiles;
        w = {plan.cut ? c / plan.pieces : c % plan.split_tiles, plan.k_blocks * piece / plan.pieces, plan.k_blocks * (piece + 1) / plan.pieces, 0, 0};
        whole = plan.split_tiles + c;
      } else {
        whole = plan.split_tiles + c + plan.clusters();
      }
    } else {
      whole += plan.clusters();
    }
    w.p = plan.p(w.tile), w.q = plan.q(w.tile);  // divisions: once a tile, not for each of its slices
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
  DEVICE uint64_t* pushed() const { return full(2 * STAGES + 1); }  // counts the sums that other blocks bring
  // Behind the barriers: what the outputs of a tile need, a warpgroup's own two rows of BN floats; then, where tiles are cut, sums.
  static constexpr int OUTPUT_BYTES = (4 * Shape::BN * int(sizeof(float)) + 1023) / 1024 * 1024;
  DEVICE float* outputs(int group) const { return reinterpret_cast<float*>(base + STAGES * STAGE_BYTES + 1024) + group * 2 * Shape::BN; }
  DEVICE unsigned char* sums() const { return base + STAGES * STAGE_BYTES + 1024 + OUTPUT_BYTES; }
  DEVICE int* last() const { return reinterpret_cast<int*>(full(2 * STAGES)); }  // a word from one consumer to all
  DEVICE void init() const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < STAGES; s++) {
        mbarrier_init(full(s), 2);  // both feeding threads
        mbarrier_init(empty(s), Shape::CLUSTER * (GEMM_CONSUMERS / WARP));
      }
      if (Shape::CUT) push_init(pushed());
      mbarrier_init_fence();
    }
    if (Shape::CLUSTER == 1) {
      __syncthreads();
      if (Shape::CUT) cluster_arrive();
    } else {
      __syncwarp();
      cluster_arrive();
      cluster_wait();
      __syncthreads();
    }
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

// One thread for each operand brings its slices into the ring, `bytes` of a stage: load(work, stage, k). It stays until all stages have been given
// back: an arrival from the other block must not find this one gone.
template <class Product, class Shape, int SLOTS, class Load>
DEVICE void gemm_feed(const GemmRing<Shape>& ring, const GemmPlan<Shape::CLUSTER>& plan, int bytes, const Load& load) {
  GemmSchedule<Shape::CLUSTER> schedule(plan);
  RingPosition<Shape::STAGES> r;
  for (GemmWork w; schedule.next(w);) {
    for (int k = w.k0; k < w.k1; k++, r.next()) {
      mbarrier_wait(ring.empty(r.stage), r.parity ^ 1);  // of a stage that nobody has used yet: at once
      mbarrier_arrive_expect_tx(ring.full(r.stage), bytes);
      load(w, r.stage, k * Product::K);
    }
    for (int i = 0; i < SLOTS; i++, r.next()) {  // trays
      mbarrier_wait(ring.empty(r.stage), r.parity ^ 1);
      mbarrier_arrive(ring.full(r.stage));
    }
  }
  if (Shape::CLUSTER > 1)
    for (int i = 0; i < Shape::STAGES; i++, r.next()) mbarrier_wait(ring.empty(r.stage), r.parity ^ 1);
}
template <class Product, class Shape, int SLOTS, class P>
DEVICE void gemm_feed_p(const GemmRing<Shape>& ring, const GemmPlan<Shape::CLUSTER>& plan, const P& p) {
  gemm_feed<Product, Shape, SLOTS>(ring, plan, GemmRing<Shape>::P_BYTES, [&](const GemmWork& w, int stage, int k) {
    if (Shape::CLUSTER > 1 && plan.share_p)
      p.share(ring.p(stage), ring.full(stage), w.p, k, plan.rank());
    else
      p.load(ring.p(stage), ring.full(stage), w.p, k);
  });
}
template <class Product, class Shape, int SLOTS, class Q>
DEVICE void gemm_feed_q(const GemmRing<Shape>& ring, const GemmPlan<Shape::CLUSTER>& plan, const Q& q) {
  gemm_feed<Product, Shape, SLOTS>(ring, plan, GemmRing<Shape>::STAGE_BYTES - GemmRing<Shape>::P_BYTES, [&](const GemmWork& w, int stage, int k) {
    if (Shape::CLUSTER > 1 && !plan.share_p)
      q.share(ring.q(stage), ring.full(stage), w.q, k, plan.rank());
    else
      q.load(ring.q(stage), ring.full(stage), w.q, k);
  });
}

// The consumers' trays. mine: where a warpgroup's begins; a whole stage with two of them, half of one otherwise.
template <class Shape, int SLOTS>
struct GemmTrays {
  using Ring = GemmRing<Shape>;
  static constexpr int BYTES = SLOTS == 2 ? Ring::STAGE_BYTES : Ring::STAGE_BYTES / 2;  // of a warpgroup
  int stage[SLOTS ? SLOTS : 1];
  bool held = false;
  DEVICE unsigned char* take(const Ring& ring, RingPosition<Shape::STAGES>& r) {
    const int group = int(threadIdx.x) / WARPGROUP;
    unsigned char* mine = ring.base;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      mbarrier_wait(ring.full(r.stage), r.parity);
      stage[i] = r.stage;
      if (SLOTS == 2 && group == i) mine = ring.p(r.stage);
      if (SLOTS == 1) mine = ring.p(r.stage) + group * BYTES;
      r.next();
    }
    held = SLOTS > 0;
    return mine;
  }
  // Gives them back as soon as the copies that this thread has started have read them.
  DEVICE void finish(const Ring& ring) {
    if (!SLOTS || !held) return;
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SLOTS; i++) ring.release(stage[i]);
    held = false;
  }
};
