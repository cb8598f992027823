// gemm_sm90.cuh - C = P·Qᵀ on Hopper's tensor cores: bulk tensor copies into a ring, warpgroup products, one wave of blocks.
//
// P [p, K] and Q [q, K] row-major; one is the weights, the other the tokens. A block computes tiles of 128 × BN of C. In warpgroup 2 are
// the producers: one thread for each operand keeps STAGES slices of 128 bytes of K on their way (`full` barriers). Warpgroups 0 and 1
// wait for a slice, issue its products, and give the slice before it back (`empty` barriers).
//   many tokens: P = tokens, 64 for each warpgroup; Q = weights; BN is chosen so that the tiles fill the last wave too
//   few tokens:  P = weights, in two slabs of 64; Q = all the tokens, half of them for each warpgroup: the weights are read once, and a tile
//                is hardly wider than there are tokens
// Clusters: two blocks work on neighbouring tiles along P, and each brings one half of the slices of Q that both need, to both; or along Q,
// sharing P's. What an SM takes from L2 is what bounds a block of its own.
// Trays: behind a tile's slices the producers let SLOTS stages of the ring pass empty. The consumers write what becomes of the tile's sums
// there, a bulk copy takes it from there to memory while they go on with the next tile, and once it is read the stage is free again.
//
// Tiles (of a cluster: CLUSTER of a block's): numbered with P's fastest, so that blocks that run together share Q's slices in L2. The first
// `split_tiles`, those that would not fill a wave, are cut along K into `pieces`, one for each cluster; the same stretch of K of all tiles at
// once, so that slices are shared here too. A tile in pieces is summed by the last block to arrive, in the order of K: the same bits every
// time. Then whole tiles, wave by wave.
// The weights' first slices are requested before griddep_wait: nothing that runs before this kernel writes them.
//
// grid: at most as many blocks as are resident, whole clusters; block: 384, 320 where clusters cut tiles; dynamic shared memory: GemmRing::BYTES, a kilobyte for the barriers.
// bytes moved: P once for each group of tiles that run together, Q once; partial sums 128·BN·4 twice for each piece.
// PRECOND  sm_90a; rows of whole 16 bytes; tensor maps with boxes of 128 bytes × 128 (P) or BN rows (Q), half of that where the cluster shares
//          the operand, for pairs as include/gemm_operand_sm90.cuh says; what GemmPlan says
#pragma once
#include "block_scale.cuh"
#include "gemm_ring_sm90.cuh"

// The consumers' sums over some slices of a tile.
template <class Product, class Shape, class Trays>
DEVICE void gemm_multiply(typename Shape::Sums& sum, const GemmRing<Shape>& ring, RingPosition<Shape::STAGES>& r, Trays& trays, int slices) {
  const int group = int(threadIdx.x) / WARPGROUP;
  const int p_row = Shape::FEW ? 0 : group * 64, q_row = Shape::FEW ? group * (Shape::BN / 2) : 0;
  int before = -1;
  const int late = slices > 1;  // by then the copies from the trays have read them
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
    if (k == late) trays.finish(ring);
    before = r.stage;
    r.next();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int slab = 0; slab < Shape::SLABS; slab++) wgmma_results(sum[slab]);
  ring.release(before);
}

// The same with tokens that have a scale for each slice: sums are in units of the latest slice's, in the end in those of the row's last. A warp goes on as above
// while its rows' scales stay; where one changes it waits for its sums, under the other warpgroup's products. A thread has two rows.
struct GemmBlocks {
  const uint8_t* exponents;  // [T, whole 16 bytes]
  int T, slices;
  DEVICE const uint8_t* row(int t) const { return exponents + int64_t(min(t, T - 1)) * ((slices + 15) / 16 * 16); }
  DEVICE int last(int t) const { return row(t)[slices - 1]; }
};
template <class Product, class Shape, class Trays>
DEVICE void gemm_multiply_blocks(typename Shape::Sums& sum, const GemmRing<Shape>& ring, RingPosition<Shape::STAGES>& r, Trays& trays, const GemmWork& w,
                                 const GemmBlocks& blocks) {
  static_assert(!Shape::FEW, "a thread's rows are tokens");
  const int group = int(threadIdx.x) / WARPGROUP, token = w.p * GEMM_P + int(threadIdx.x) / WARP * 16 + int(threadIdx.x) % WARP / 4;
  const uint8_t *row0 = blocks.row(token), *row1 = blocks.row(token + 8);
  int e0 = row0[w.k0], e1 = row1[w.k0];
  const int late = w.k0 + (w.k1 - w.k0 > 1);  // by then the copies from the trays have read them
  for (int k = w.k0; k < w.k1;) {
    int before = -1, n0, n1;
    bool same;
    do {
      const int next = k + 1 < w.k1 ? k + 1 : blocks.slices - 1;  // of a piece, what all pieces end with
      n0 = row0[next], n1 = row1[next];                           // looked at when the slice's products have been issued
      mbarrier_wait(ring.full(r.stage), r.parity);
      const uint64_t a = wgmma_tile(ring.p(r.stage) + group * 64 * SWIZZLE_ROW), b = wgmma_tile(ring.q(r.stage));
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < SWIZZLE_ROW / 32; i++) Product::add(sum[0], a + 2 * i, b + 2 * i, k > w.k0 || i > 0);
      wgmma_commit();
      wgmma_wait<1>();  // the slice before this one has been read
      if (before >= 0) ring.release(before);
      if (k == late) trays.finish(ring);
      before = r.stage;
      r.next();
      k++;
      same = __all_sync(FULL_MASK, n0 == e0 && n1 == e1);
    } while (k < w.k1 && same);
    wgmma_wait<0>();
    wgmma_results(sum[0]);
    ring.release(before);
    if (!same) {
      const float by[2] = {block_ratio(e0, n0), block_ratio(e1, n1)};
#pragma unroll
      for (int i = 0; i < Shape::REGS; i++) sum[0][i] *= by[i / 2 % 2];
      e0 = n0, e1 = n1;
    }
  }
}

// A piece of a tile: its sums go to memory; the block that arrives last gets the whole tile's sums. Returns whether this one did.
template <class Shape>
DEVICE bool gemm_combine(typename Shape::Sums& sums, const GemmPlan<Shape::CLUSTER>& plan, const GemmWork& w, int* last) {
  constexpr int SUMS = Shape::SLABS * Shape::REGS, BATCH = SUMS >= 64 ? 1 : 64 / SUMS;  // pieces whose sums are on their way together
  constexpr int WIDTH = SUMS % 16 == 0 && SUMS > 64 ? SUMS / 16 : SUMS / 4;  // packs of each: more at once would not fit into registers
  static_assert(SUMS / 4 % WIDTH == 0, "whole batches");
  float* sum = sums[0];
  const int thread = int(threadIdx.x), pieces = plan.pieces;
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
  for (int k0 = 0; k0 < pieces; k0 += BATCH)
#pragma unroll
    for (int i0 = 0; i0 < SUMS / 4; i0 += WIDTH) {
      float4 part[BATCH][WIDTH];
#pragma unroll
      for (int k = 0; k < BATCH; k++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
          part[k][i] = k0 + k < pieces ? ld_global_f4(piece(k0 + k) + (i0 + i) * GEMM_CONSUMERS) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int k = 0; k < BATCH; k++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
          float* to = sum + 4 * (i0 + i);
          to[0] += part[k][i].x, to[1] += part[k][i].y, to[2] += part[k][i].z, to[3] += part[k][i].w;
        }
    }
  return true;
}

// The whole kernel. out(sum, p_tile, q_tile, tray, ahead, outputs): what becomes of a tile's sums, which it may change; called by the consumers,
// all threads of a warpgroup together. tray: GemmTrays::BYTES of the warpgroup's own, thread 0 of the warpgroup starts the copies from there.
// ahead: what out.begin(p_tile, q_tile) has requested before the tile's products, so that nobody waits for it. Cut tiles: out.exchange().
template <class Product, class Shape, int SLOTS, class P, class Q, class Out>
DEVICE void gemm_sm90(const GemmPlan<Shape::CLUSTER>& plan, const P& p, const Q& q, const TensorMap& y, const Out& out) {
  static_assert(Shape::STAGES >= SLOTS + 2, "the next tile's first two slices are multiplied before trays are given back");
  DYN_SHARED_TILES(unsigned char, memory);
  const GemmRing<Shape> ring{memory};
  if (threadIdx.x == GEMM_CONSUMERS) {
    tma_prefetch(p.map);
    if (SLOTS) tma_prefetch(y);
  }
  if (threadIdx.x == GEMM_CONSUMERS + WARP) tma_prefetch(q.map);
  ring.init();
  griddep_launch();
  if (threadIdx.x >= GEMM_CONSUMERS) {
    if constexpr (!Shape::CUT) register_decrease<Shape::BLOCKS == 1 ? 40 : 48>();
    if (threadIdx.x == GEMM_CONSUMERS) {
      if (!Shape::FEW) griddep_wait();
      gemm_feed_p<Product, Shape, SLOTS>(ring, plan, p);
    } else if (threadIdx.x == GEMM_CONSUMERS + WARP) {
      if (Shape::FEW) griddep_wait();
      gemm_feed_q<Product, Shape, SLOTS>(ring, plan, q);
    }
  } else {
    if constexpr (!Shape::CUT) register_increase<Shape::BLOCKS == 1 ? 232 : 96>();
    griddep_wait();
    GemmSchedule<Shape::CLUSTER> schedule(plan);
    RingPosition<Shape::STAGES> r;
    GemmTrays<Shape, SLOTS> trays;
    float* outputs = ring.outputs(int(threadIdx.x) / WARPGROUP);
    typename Shape::Sums sum;
    for (GemmWork w; schedule.next(w);) {
      auto ahead = out.begin(w.p, w.q);
      if constexpr (Product::BLOCKS)
        gemm_multiply_blocks<Product, Shape>(sum, ring, r, trays, w, out.blocks());
      else
        gemm_multiply<Product, Shape>(sum, ring, r, trays, w.k1 - w.k0);
      unsigned char* tray = trays.take(ring, r);
      if constexpr (Shape::CUT) {
        out.exchange(sum, ring, plan.pieces, w.p, w.q, ahead, outputs);
        return;
      } else if (w.k1 - w.k0 == plan.k_blocks || gemm_combine<Shape>(sum, plan, w, ring.last())) out(sum, w.p, w.q, tray, ahead, outputs);
    }
    trays.finish(ring);
  }
}
