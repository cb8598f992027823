// attn_sm90.cuh - causal attention of many rows on Hopper: bulk tensor copies into a ring, warpgroup products, softmax in registers.
//
// A tile is 128 tokens of one head. Its keys are walked from the newest to the oldest, 128 at a time, counted from the end of what its last token
// sees: so only the first stretch has the diagonal in it, no key behind the last token is ever read, and what the oldest stretch has before key 0
// arrives as zeros and is masked.
// Warpgroup 0 is the producer: one thread of it brings Q and then K and V of each stretch in the order in which they are used. The other two have 64
// rows each: while the tensor cores multiply one stretch's P by V, and the next one's Q by K, a warpgroup takes the exponentials of the latter.
//   S = Q·Kᵀ  both from shared memory;  O += P·V  P from registers, where S leaves it, and V as it lies, its rows along HD
// TURNS: the warpgroups issue their products in turns, so that one's exponentials fall into the other's products; where exponentials take as long as
// products do (HD 64). Scores and sums are fp32; P is rounded to bf16 for the second product.
//
// Tiles: the ones with most keys first, all heads of the same tokens together; blocks take them there and back (0 … n - 1, n - 1 … 0), so that every
// block has about the same number of keys. One wave of blocks.
#pragma once
#include "block_scale.cuh"
#include "vec.cuh"
#include "wgmma.cuh"

constexpr int ATTN_ROWS = 128, ATTN_KEYS = 128;  // of a tile; of a stretch
constexpr int ATTN_GROUPS = 2, ATTN_BLOCK = (ATTN_GROUPS + 1) * WARPGROUP;
constexpr int ATTN_TURN = 1;  // named barriers: a consumer's turn

// A slab is 64 dimensions: rows of 128 bytes.
// BLOCKS: the output is e4m3 with a scale for each token and head (include/block_scale.cuh).
template <int HEAD_DIM, int RING_STAGES, bool IN_TURNS, bool TO_BLOCKS = false>
struct AttnShape {
  static constexpr bool BLOCKS = TO_BLOCKS;
  static_assert(!BLOCKS || HEAD_DIM == BLOCK_COLUMNS, "a head is a block");
  static constexpr int HD = HEAD_DIM, STAGES = RING_STAGES;
  static constexpr bool TURNS = IN_TURNS;
  static constexpr int SLABS = HD / 64, SLAB = ATTN_KEYS * SWIZZLE_ROW, STAGE = SLABS * SLAB;
};
static_assert(ATTN_ROWS == ATTN_KEYS, "Q's slabs are as large as a stretch's");

// What the kernel is asked for. Tensor maps: q (HD, H, rows), boxes of 64 × 1 × ROWS; k, v (HD, max_len, KV), boxes of 64 × KEYS × 1.
struct AttnArgs {
  const TensorMap &q, &k, &v;
  void* out;            // bf16, or e4m3
  uint8_t* exponents;   // [rows, H in whole 16 bytes], of e4m3
  int pos0, T, H, group;  // group: H / KV
  float scale_log2;
};

// A tile: its first token, its head, and how many keys its last token sees.
struct AttnTile {
  int t0, head, end;
};
struct AttnSchedule {
  const AttnArgs& a;
  int tiles, at = 0;
  bool back = false;
  DEVICE explicit AttnSchedule(const AttnArgs& args) : a(args), tiles((args.T + ATTN_ROWS - 1) / ATTN_ROWS * args.H) {}
  DEVICE bool next(AttnTile& tile) {
    const int i = at + (back ? int(gridDim.x) - 1 - int(blockIdx.x) : int(blockIdx.x));
    at += int(gridDim.x), back = !back;
    if (i >= tiles) return false;
    tile.t0 = (tiles - 1 - i) / a.H * ATTN_ROWS, tile.head = i % a.H;
    tile.end = a.pos0 + min(a.T, tile.t0 + ATTN_ROWS);
    return true;
  }
};
DEVICE int attn_stretches(const AttnTile& tile) { return (tile.end + ATTN_KEYS - 1) / ATTN_KEYS; }

// Shared memory: Q, STAGES × (a stretch of K or of V), the barriers.
template <class Shape>
struct AttnRing {
  unsigned char* base;
  static constexpr int RING = Shape::STAGE, BARRIERS = RING + Shape::STAGES * Shape::STAGE;
  DEVICE unsigned char* q(int slab) const { return base + slab * Shape::SLAB; }
  DEVICE unsigned char* stretch(int stage, int slab) const { return base + RING + stage * Shape::STAGE + slab * Shape::SLAB; }
  DEVICE uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(base + BARRIERS) + stage; }
  DEVICE uint64_t* empty(int stage) const { return full(Shape::STAGES + stage); }
  DEVICE uint64_t* q_full() const { return full(2 * Shape::STAGES); }
  DEVICE uint64_t* q_empty() const { return full(2 * Shape::STAGES + 1); }
  DEVICE void init() const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < Shape::STAGES; s++) {
        mbarrier_init(full(s), 1);
        mbarrier_init(empty(s), 4 * ATTN_GROUPS);
      }
      mbarrier_init(q_full(), 1);
      mbarrier_init(q_empty(), 4 * ATTN_GROUPS);
      mbarrier_init_fence();
    }
    __syncthreads();
  }
};
// Called by every thread of a consumer warp.
DEVICE void attn_release(uint64_t* empty) {
  if (threadIdx.x % WARP == 0) mbarrier_arrive(empty);
}

// One thread: all tiles' Q, K and V, in the order of their use.
template <class Shape>
DEVICE void attn_produce(const AttnRing<Shape>& ring, const AttnArgs& a) {
  RingPosition<Shape::STAGES> r;
  AttnSchedule schedule(a);
  uint32_t q_parity = 0;
  for (AttnTile tile; schedule.next(tile); q_parity ^= 1) {
    const auto load = [&](const TensorMap& map, int j) {
      mbarrier_wait(ring.empty(r.stage), r.parity ^ 1);
      mbarrier_arrive_expect_tx(ring.full(r.stage), Shape::STAGE);
      for (int s = 0; s < Shape::SLABS; s++)
        tma_load_3d(ring.stretch(r.stage, s), map, ring.full(r.stage), 64 * s, tile.end - ATTN_KEYS * (j + 1), tile.head / a.group);
      r.next();
    };
    const int n = attn_stretches(tile);
    mbarrier_wait(ring.q_empty(), q_parity ^ 1);
    mbarrier_arrive_expect_tx(ring.q_full(), Shape::STAGE);
    for (int s = 0; s < Shape::SLABS; s++) tma_load_3d(ring.q(s), a.q, ring.q_full(), 64 * s, tile.head, tile.t0);
    load(a.k, 0);
    for (int j = 1; j < n; j++) load(a.k, j), load(a.v, j - 1);
    load(a.v, n - 1);
  }
}

constexpr int ATTN_S = ATTN_KEYS / 2;  // a thread's scores: 8j + 2t, 8j + 2t + 1 of row g in [4j], [4j + 1], of row g + 8 in [4j + 2], [4j + 3]

// A warpgroup's 64 rows; a thread has rows g and g + 8 of its warp's 16.
template <class Shape>
struct AttnRows {
  float o[Shape::HD / 2];  // unnormalised output, as scores are
  float m[2], l[2];        // running maximum of the scores; this thread's share of the running sum of 2^((score - m)·scale)
  uint32_t p[ATTN_KEYS / 16][4];
};

// Issues S = Q·Kᵀ of one stretch: q and k name the first slab.
template <class Shape>
DEVICE void attn_scores(float (&s)[ATTN_S], uint64_t q, uint64_t k) {
#pragma unroll
  for (int i = 0; i < Shape::HD / 16; i++)
    wgmma_bf16(s, q + i / 4 * (Shape::SLAB / 16) + i % 4 * 2, k + i / 4 * (Shape::SLAB / 16) + i % 4 * 2, i > 0);
}
// Issues O += P·V.
template <class Shape>
DEVICE void attn_values(AttnRows<Shape>& rows, uint64_t v) {
#pragma unroll
  for (int i = 0; i < ATTN_KEYS / 16; i++) wgmma_bf16_rows(rows.o, rows.p[i], v + 128 * i);
}

// Keys below `first` and from limit[r] on, counted in the stretch, count nothing.
DEVICE void attn_mask(float (&s)[ATTN_S], int first, const int (&limit)[2]) {
  const int t = int(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < ATTN_S; i++) {
    const int key = i / 4 * 8 + 2 * t + i % 2;
    if (key < first || key >= limit[i / 2 % 2]) s[i] = NEG_INF;
  }
}

// Scores become probabilities relative to the new maximum; fix: what older ones are to be multiplied by. Every row sees a key of
// the first stretch, so that no maximum is -inf.
template <bool FIRST, class Shape>
DEVICE void attn_softmax(AttnRows<Shape>& rows, float (&s)[ATTN_S], float (&fix)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float m = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
    for (int i = 4; i < ATTN_S; i += 4) m = fmaxf(m, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    m = fmaxf(m, __shfl_xor_sync(FULL_MASK, m, 1));
    m = fmaxf(m, __shfl_xor_sync(FULL_MASK, m, 2));
    if (!FIRST) m = fmaxf(m, rows.m[r]);
    const float base = m * scale_log2;
    fix[r] = FIRST ? 0.f : ex2_approx(fmaf(rows.m[r], scale_log2, -base));
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < ATTN_S; i += 4)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float& x = s[i + 2 * r + c];
        x = ex2_approx(fmaf(x, scale_log2, -base));
        sum += x;
      }
    rows.m[r] = m;
    rows.l[r] = FIRST ? sum : fmaf(rows.l[r], fix[r], sum);
  }
}

// Probabilities as the operand of the next product.
template <class Shape>
DEVICE void attn_pack(AttnRows<Shape>& rows, const float (&s)[ATTN_S]) {
#pragma unroll
  for (int i = 0; i < ATTN_KEYS / 16; i++)
#pragma unroll
    for (int w = 0; w < 4; w++) rows.p[i][w] = pack_bf16(s[8 * i + 2 * w], s[8 * i + 2 * w + 1]);
#pragma unroll
  for (int i = 0; i < ATTN_KEYS / 16; i++) wgmma_operand(rows.p[i]);
}

// Among the four lanes of a quad: this lane's words 0 … 3; then word t of lanes 0 … 3.
DEVICE void attn_exchange(uint32_t (&w)[4]) {
  const int t = int(threadIdx.x) % 4;
#pragma unroll
  for (int d = 1; d < 4; d *= 2)  // transpose: swap the half that belongs to the partner
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (!(i & d)) {
        const uint32_t give = t & d ? w[i] : w[i + d], got = __shfl_xor_sync(FULL_MASK, give, d);
        if (t & d)
          w[i] = got;
        else
          w[i + d] = got;
      }
}

// out = O / l. Four lanes exchange what they have of four column tiles, or of eight, so that each stores 16 bytes.
template <class Shape>
DEVICE void attn_store(const AttnRows<Shape>& rows, const AttnArgs& a, const AttnTile& tile, int row0) {
  const int t = int(threadIdx.x) % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float l = rows.l[r];
    l += __shfl_xor_sync(FULL_MASK, l, 1);
    l += __shfl_xor_sync(FULL_MASK, l, 2);
    const float inv = 1.f / l;
    const int row = row0 + 8 * r, token = tile.t0 + row;
    const int64_t at = (int64_t(token) * a.H + tile.head) * Shape::HD;
    if constexpr (Shape::BLOCKS) {
      float top = 0.f;
#pragma unroll
      for (int i = 2 * r; i < Shape::HD / 2; i += 4) top = fmaxf(top, fmaxf(fabsf(rows.o[i]), fabsf(rows.o[i + 1])));
      const BlockScale by(quad_max(top) * inv);
      const float f = inv * by.factor;
      e4m3* o = static_cast<e4m3*>(a.out) + at + 16 * t;
#pragma unroll
      for (int j = 0; j < Shape::HD / 64; j++) {
        uint32_t w[4];  // column tiles 8j + 2i and the next
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* x = rows.o + 32 * j + 8 * i + 2 * r;
          w[i] = pack_e4m3x4(x[0] * f, x[1] * f, x[4] * f, x[5] * f);
        }
        attn_exchange(w);
        if (token < a.T)
          *reinterpret_cast<uint4*>(o + 64 * j) =
              make_uint4(lower_halves(w[0], w[1]), lower_halves(w[2], w[3]), upper_halves(w[0], w[1]), upper_halves(w[2], w[3]));
      }
      if (t == 0 && token < a.T) a.exponents[int64_t(token) * ((a.H + 15) / 16 * 16) + tile.head] = uint8_t(by.e);
    } else {
      bf16* o = static_cast<bf16*>(a.out) + at + 8 * t;
#pragma unroll
      for (int j = 0; j < Shape::HD / 32; j++) {
        uint32_t w[4];  // column tiles 4j … 4j + 3
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = pack_bf16(rows.o[16 * j + 4 * i + 2 * r] * inv, rows.o[16 * j + 4 * i + 2 * r + 1] * inv);
        attn_exchange(w);
        if (token < a.T) *reinterpret_cast<uint4*>(o + 32 * j) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

// A consumer warpgroup at work on a tile: newest(), older() for each further stretch, finish().
template <class Shape>
struct AttnConsumer {
  const AttnRing<Shape>& ring;
  const int group;
  const float scale_log2;
  const uint64_t q;
  RingPosition<Shape::STAGES> r;
  AttnRows<Shape> rows;
  float s[ATTN_S];

  DEVICE AttnConsumer(const AttnRing<Shape>& memory, float scale)
      : ring(memory), group(int(threadIdx.x) / WARPGROUP - 1), scale_log2(scale), q(wgmma_tile(memory.q(0) + group * 64 * SWIZZLE_ROW)) {
    if (Shape::TURNS && group == 1) named_barrier_arrive(ATTN_TURN, ATTN_GROUPS * WARPGROUP);
  }
  DEVICE int take() {
    const int stage = r.stage;
    mbarrier_wait(ring.full(stage), r.parity);
    r.next();
    return stage;
  }
  DEVICE void begin_scores(int k_stage) {
    wgmma_fence();
    attn_scores<Shape>(s, q, wgmma_tile(ring.stretch(k_stage, 0)));
    wgmma_commit();
  }
  DEVICE void begin_values(int v_stage) {
    wgmma_fence();
    attn_values(rows, wgmma_columns(ring.stretch(v_stage, 0), Shape::SLAB));
    wgmma_commit();
  }
  // One group of products may still be in flight; Q is given back with the last stretch of K.
  template <int IN_FLIGHT>
  DEVICE void end_scores(int k_stage, bool oldest) {
    wgmma_wait<IN_FLIGHT>();
    wgmma_results(s);
    attn_release(ring.empty(k_stage));
    if (oldest) attn_release(ring.q_empty());
  }
  DEVICE void end_values(int v_stage) {
    wgmma_wait<0>();
    wgmma_results(rows.o);
    attn_release(ring.empty(v_stage));
  }

  // first: where key 0 is, counted in the stretch; limit: where what a row sees ends.
  DEVICE void newest(int first, const int (&limit)[2]) {
    const int k_stage = take();
    begin_scores(k_stage);
    end_scores<0>(k_stage, first >= 0);
    attn_mask(s, first, limit);
    float fix[2];
    attn_softmax<true>(rows, s, fix, scale_log2);
    attn_pack(rows, s);
#pragma unroll
    for (int i = 0; i < Shape::HD / 2; i++) rows.o[i] = 0.f;
    wgmma_results(rows.o);
  }
  DEVICE void older(int first) {
    const int k_stage = take();
    if (Shape::TURNS) named_barrier(ATTN_TURN + group, ATTN_GROUPS * WARPGROUP);
    begin_scores(k_stage);
    const int v_stage = take();  // of the stretch before
    begin_values(v_stage);
    if (Shape::TURNS) named_barrier_arrive(ATTN_TURN + (1 - group), ATTN_GROUPS * WARPGROUP);
    end_scores<1>(k_stage, first >= 0);
    const int all[2] = {ATTN_KEYS, ATTN_KEYS};
    if (first > 0) attn_mask(s, first, all);
    float fix[2];
    attn_softmax<false>(rows, s, fix, scale_log2);
    end_values(v_stage);
#pragma unroll
    for (int i = 0; i < Shape::HD / 2; i++) rows.o[i] *= fix[i / 2 % 2];
    wgmma_results(rows.o);
    attn_pack(rows, s);
  }
  DEVICE void finish() {
    const int v_stage = take();
    begin_values(v_stage);
    end_values(v_stage);
  }
};

// One warpgroup: its rows of every tile.
template <class Shape>
DEVICE void attn_consume(const AttnRing<Shape>& ring, const AttnArgs& a) {
  AttnConsumer<Shape> c(ring, a.scale_log2);
  const int row0 = c.group * 64 + int(threadIdx.x) % WARPGROUP / WARP * 16 + int(threadIdx.x) % WARP / 4;
  AttnSchedule schedule(a);
  uint32_t q_parity = 0;
  for (AttnTile tile; schedule.next(tile); q_parity ^= 1) {
    int first = ATTN_KEYS - tile.end;
    const int end = first + a.pos0 + tile.t0 + row0 + 1, limit[2] = {end, end + 8};
    mbarrier_wait(ring.q_full(), q_parity);
    c.newest(first, limit);
    while (first < 0) {
      first += ATTN_KEYS;
      c.older(first);
    }
    c.finish();
    attn_store(c.rows, a, tile, row0);
  }
  if (Shape::TURNS && c.group == 0) named_barrier(ATTN_TURN, ATTN_GROUPS * WARPGROUP);  // nobody's last turn is left over
}

// The whole kernel.
template <class Shape>
DEVICE void attn_sm90(const TensorMap& q, const TensorMap& k, const TensorMap& v, void* out, uint8_t* exponents, const int32_t* span, int H, int KV, float scale_log2) {
  DYN_SHARED_TILES(unsigned char, memory);
  const AttnRing<Shape> ring{memory};
  ring.init();
  griddep_launch();
  if (threadIdx.x < WARPGROUP) {
    register_decrease<40>();
    if (threadIdx.x == 0) attn_produce(ring, AttnArgs{q, k, v, out, exponents, span[0], span[1], H, H / KV, scale_log2});
  } else {
    register_increase<232>();
    attn_consume(ring, AttnArgs{q, k, v, out, exponents, span[0], span[1], H, H / KV, scale_log2});
  }
}
