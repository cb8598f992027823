// attn_decode.cu - attention of T new tokens (one, or a few to verify) to their KV cache: split-KV flash decoding, GQA-packed, in one launch.
//
//   out[t, h] = Σ_k softmax_k(q[t, h]·K[h/G, k] / √HD)·V[h/G, k],   k = 0 … pos + t,   G = H/KV
//
// A tile is up to 8·NT rows (t, h) that share a KV head, so that K and V are read once for the whole group. A block takes a tile and one
// split of the keys. Its warps take steps of 16 keys in turn, and their partial outputs meet in shared memory. The blocks of a cluster are
// splits of one tile: each finishes a share of the rows, which the others push into its shared memory. A tile has `clusters` of them, and
// `singles`, blocks that work for themselves in what multiprocessors the clusters of all tiles leave. Both meet in global memory, where the
// last to arrive finishes. How many blocks work follows the length in device memory, so that one captured graph serves every length:
// the first cluster's blocks one after another, then a cluster more for each 2^log_keys keys, then, when the blocks have 2^log_full each,
// all singles. Other blocks leave at once.
//
// Before griddep_wait a block requests the keys and values of its first step: all but the newest T rows are older than the launch before
// it. PRECOND  pos and the rows before it were written before the last ordinary (not dependent) launch of the stream.
//
// tiles: KV·ceil(T·G / (8·NT)), the row blocks of a KV head one after another. grid: (tiles·((clusters << log_cluster) + singles), rounded up to
// whole clusters; first all clusters, tile by tile, then all singles); cluster: (1 << log_cluster, 1, 1); block: 32·WARPS; dynamic shared
// memory: sizeof(Shared). bytes moved: 2·KV·(pos + T)·HD·2 (e4m3: KV·(pos + T)·(2·HD + 16)) for each row block.
// PRECOND  HD 64 or 128, NT 1 or 2 (by kernel name), T = 1 and G <= 8 for NT = 1; log_cluster 0 to 3, 0 before sm_90.
// PRECOND  pos + T <= max_len; q, caches 16-byte aligned; part and part_ml filled with ones (every bit), arrivals zero before the first launch.
//
// attn_decode_*_each: the rows of a speculative pass, grid.y of them, each with the bits that it has alone: token t's keys end at pos + t, and it is
// split as a step at that position is. part, part_ml, arrivals: a token's after another's. PRECOND  as for NT = 1, and no more tokens than those have room for.
// minimum arch: sm_80
#include "include/attn_merge.cuh"

constexpr int WARPS = 8;
constexpr int STEP = WARPS * ATTN_KEYS;  // keys of one step of the block, and the fewest of a split
constexpr int CLUSTER = 8;               // the largest cluster
constexpr int FEW = 4, MANY = 16;        // partials of clusters and singles in flight a thread

template <int HD, int NT>
struct Shared {
  static constexpr int R = 8 * NT;
  WarpPartial<HD, NT> warp[WARPS];
  float4 pushed[R * HD / 4];  // [source][rows a block finishes][HD / 4]
  float2 ml[WARPS][R];
  float2 pushed_ml[R];  // [source][rows a block finishes]
  uint64_t arrived;     // push barrier
};

// How a tile's keys are split, at most.
struct Geometry {
  int clusters, singles, log_cluster, log_keys, log_full;
  int per_cluster, per_single;  // 2^16 over each, rounded up: quotients of block numbers without a division
  DEVICE int sources() const { return clusters + singles; }
};

// Where a block stands: its keys, and who else works on the same rows.
struct Split {
  int tile;
  bool single;             // a block that is in no cluster of a tile's
  int rank, cluster;       // of this block in its cluster; of the cluster, or the single, among a tile's
  int len, chunk;          // keys; keys a block
  int begin, end;          // this block's keys
  int blocks, meeting;     // of this cluster, and clusters and singles: those that have keys
  DEVICE bool alone() const { return chunk >= len; }
};
DEVICE Split place_of(const Geometry& of, int tiles) {
  Split s;
  const int size = 1 << of.log_cluster, all = (tiles * of.clusters) << of.log_cluster;
  s.single = int(blockIdx.x) >= all;
  const int index = s.single ? int(blockIdx.x) - all : int(blockIdx.x) >> of.log_cluster;
  const int each = s.single ? of.singles : of.clusters;
  s.tile = (index * (s.single ? of.per_single : of.per_cluster)) >> 16, s.cluster = index - s.tile * each;
  s.rank = s.single ? 0 : int(blockIdx.x) & (size - 1);
  return s;
}
// False if the block has nothing to do.
DEVICE bool split_keys(Split& s, const Geometry& of, int len) {
  const int size = 1 << of.log_cluster, clusters = min(of.clusters, ((len - 1) >> of.log_keys) + 1), grouped = clusters << of.log_cluster;
  const int most = grouped + (len > grouped << of.log_full ? of.singles : 0);
  s.len = len;
  s.chunk = max(STEP, (int(unsigned(len + most - 1) / unsigned(most)) + ATTN_KEYS - 1) / ATTN_KEYS * ATTN_KEYS);
  s.begin = (s.single ? (of.clusters << of.log_cluster) + s.cluster : (s.cluster << of.log_cluster) + s.rank) * s.chunk;
  s.end = min(len, s.begin + s.chunk);
  const int splits = int(unsigned(len + s.chunk - 1) / unsigned(s.chunk)), whole = (splits + size - 1) >> of.log_cluster;
  s.blocks = s.single ? 1 : min(size, splits - (s.cluster << of.log_cluster));
  s.meeting = min(clusters, whole) + max(0, splits - grouped);
  const bool idle = s.alone() || s.single ? s.begin >= len : s.cluster >= whole;  // a cluster's blocks finish rows without keys too
  if (s.single) s.cluster += of.clusters;
  return !idle;
}

// All this block's keys, its steps TILES at a time; the tiles of the first are in flight. Keys before `seen` are masked for no row.
template <class F, int HD, int NT, int TILES>
DEVICE void attend(AttnState<HD, NT>& st, const AttnQuery<F, HD> (&q)[NT], AttnTile<F, HD> (&tile)[TILES], const AttnHead<F>& head, int begin, int end, int seen, const int (&limit)[NT][2], float scale_log2) {
  attn_init(st);
  for (int k0 = begin; k0 < end; k0 += TILES * STEP) {
    float s[TILES][NT][4];
    const int next = k0 + TILES * STEP;
#pragma unroll
    for (int i = 0; i < TILES; i++)
      if (i == 0 || k0 + i * STEP < end)
        attn_scores<F, HD, NT>(s[i], q, tile[i]);
      else
        attn_no_scores<NT>(s[i]);
#pragma unroll
    for (int i = 0; i < TILES; i++)
      if (next + i * STEP < end) attn_fetch_k<F, HD>(tile[i], head, next + i * STEP, 0, end - 1);
    if (k0 + (TILES - 1) * STEP + ATTN_KEYS > seen)
#pragma unroll
      for (int i = 0; i < TILES; i++) attn_mask<NT>(s[i], k0 + i * STEP, limit);
    attn_softmax<HD, NT, TILES>(st, s, scale_log2, k0 == begin);
#pragma unroll
    for (int i = 0; i < TILES; i++)
      if (i == 0 || k0 + i * STEP < end) attn_values<F, HD, NT>(st, s[i], tile[i]);
#pragma unroll
    for (int i = 0; i < TILES; i++)
      if (next + i * STEP < end) attn_fetch_v<F, HD>(tile[i], head, next + i * STEP, 0, end - 1);
  }
}

// The partials of clusters and singles c0 … c0 + count - 1, at most N, looked at until they are whole; o_of, ml_of: where c's are.
template <int N, class O, class ML>
DEVICE Partial gather(const O& o_of, const ML& ml_of, int c0, int count) {
  uint4 o[N];
  uint2 ml[N];
  uint32_t most, looks = 0;
  do {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const int c = c0 + min(i, count - 1);
      o[i] = ld_volatile_v4(o_of(c)), ml[i] = ld_volatile_v2(ml_of(c));
    }
    most = 0;
#pragma unroll
    for (int i = 0; i < N; i++) most = max(most, max(largest(o[i]), max(ml[i].x, ml[i].y)));
    look_again(looks);
  } while (most == HOLE);
  const auto f = [](uint32_t w) { return __uint_as_float(w); };
  return merge<N>([&](int i) { return make_float4(f(o[i].x), f(o[i].y), f(o[i].z), f(o[i].w)); },
                  [&](int i) { return make_float2(f(ml[i].x), f(ml[i].y)); }, count);
}

// The partials of all clusters and singles of a tile meet: the last to arrive has them all, in their order. The arrival is relaxed and may
// overtake the partials, so these are looked at until they are whole. Called by whole warps; `active` threads have a partial.
// to, to_ml: this thread's place in the first's partials; the next one's is `stride` rows on.
template <int HD>
DEVICE bool meet(Partial& a, bool active, float4* to, float2* to_ml, int stride, uint32_t* arrivals, const Split& s) {
  const int lane = threadIdx.x % WARP;
  const bool first = int(threadIdx.x) % (HD / 4) == 0;
  const auto o_of = [&](int c) { return to + c * stride * (HD / 4); };
  const auto ml_of = [&](int c) { return to_ml + c * stride; };
  if (active) {
    st_volatile_v4(o_of(s.cluster), make_uint4(not_hole(a.o.x), not_hole(a.o.y), not_hole(a.o.z), not_hole(a.o.w)));
    if (first) st_volatile_v2(ml_of(s.cluster), make_uint2(not_hole(a.m), not_hole(a.l)));
  }
  uint32_t before = lane == 0 ? atomicInc(arrivals, s.meeting - 1) : 0;
  before = __shfl_sync(FULL_MASK, before, 0);
  if (int(before) != s.meeting - 1) return false;
  if (active) {
    if (s.meeting <= FEW) {
      a = gather<FEW>(o_of, ml_of, 0, s.meeting);
    } else {
      a = {make_float4(0.f, 0.f, 0.f, 0.f), NEG_INF, 0.f};
      for (int c = 0; c < s.meeting; c += MANY) a = merge(a, gather<MANY>(o_of, ml_of, c, min(MANY, s.meeting - c)));
    }
  }
  __syncwarp();  // all lanes have read {m, l}
  if (active)
#pragma unroll 1
    for (int c = 0; c < s.meeting; c++) {
      st_volatile_v4(o_of(c), make_uint4(HOLE, HOLE, HOLE, HOLE));
      if (first) st_volatile_v2(ml_of(c), make_uint2(HOLE, HOLE));
    }
  return true;
}

// A block's rows: `count` from row `first` on of the rows (t, h) = (r / G, r % G) of its KV head.
template <int HD, int NT>
struct Rows {
  int first, count, G, KV;
  int at;  // element of q and out where row `first` of token 0 begins
  DEVICE int element(int r) const {
    if (NT == 1) return at + r * HD;
    const int token = (first + r) / G;
    return at + (token * (KV - 1) * G + r) * HD;
  }
  // The first key that row r does not see.
  DEVICE int limit(int r, int pos, int end) const { return NT == 1 ? end : min(end, pos + (first + r) / G + 1); }
};

// Each block of a cluster finishes 1 << log_share rows.
template <int NT>
DEVICE int log_share(int log_cluster) { return (NT == 1 ? 3 : 4) - log_cluster; }

// The block's warps meet, a thread merging four dimensions of a row: that is the output, or goes to the block that finishes the row.
template <int HD, int NT>
DEVICE void hand_over(bf16* out, Shared<HD, NT>& sh, const Rows<HD, NT>& rows, const Split& s, int log_cluster) {
  constexpr int QUADS = HD / 4;
  const int log = log_share<NT>(log_cluster);
  for (int i = threadIdx.x; i < rows.count * QUADS; i += WARPS * WARP) {
    const int row = i / QUADS, d = i % QUADS;
    const Partial a = merge<WARPS>([&](int w) { return sh.warp[w].o[row][d ^ swizzle(row)]; }, [&](int w) { return sh.ml[w][row]; }, WARPS);
    if (s.alone()) {
      store_output(out + rows.element(row) + 4 * d, a);
    } else if (log_cluster && !s.single) {
      const int to = row >> log, place = (s.rank << log) + (row & ((1 << log) - 1));
      push_f4(&sh.pushed[place * QUADS + d], to, a.o, &sh.arrived);
      if (d == 0) push_f2(&sh.pushed_ml[place], to, make_float2(a.m, a.l), &sh.arrived);
    } else {  // by itself: as if pushed
      sh.pushed[row * QUADS + d] = a.o;
      if (d == 0) sh.pushed_ml[row] = make_float2(a.m, a.l);
    }
  }
}

// The cluster's blocks meet, then the clusters and singles: whole warps, each for 32·4 neighbouring outputs of the rows that a block of a cluster
// finishes. A single has all those shares to itself. part, part_ml, arrivals: of this tile's rows.
template <int HD, int NT>
DEVICE void finish(bf16* out, Shared<HD, NT>& sh, const Rows<HD, NT>& rows, const Split& s, int log_cluster, float4* part, float2* part_ml,
                   uint32_t* arrivals) {
  constexpr int QUADS = HD / 4;
  const int log = log_share<NT>(log_cluster), warps = max(1, (QUADS << log) / WARP), lane = threadIdx.x % WARP;
  const int units = s.single ? warps << log_cluster : warps;
  for (int u = int(threadIdx.x) / WARP; u < units; u += WARPS) {
    const int share = s.single ? int(unsigned(u) / unsigned(warps)) : s.rank, i = (s.single ? u - share * warps : u) * WARP + lane;
    const int mine = i / QUADS, row = (share << log) + mine, d = i % QUADS, warp_row = (share << log) + (i - lane) / QUADS;
    if (warp_row >= rows.count) continue;
    const bool active = mine < 1 << log && row < rows.count;
    Partial a = {make_float4(0.f, 0.f, 0.f, 0.f), NEG_INF, 0.f};
    if (active) {
      uint32_t looks = 0;
      while (log_cluster && !s.single && !push_arrived(&sh.arrived)) look_again(looks);
      const auto place = [&](int c) { return s.single ? row : (min(c, s.blocks - 1) << log) + mine; };
      a = merge<CLUSTER>([&](int c) { return sh.pushed[place(c) * QUADS + d]; }, [&](int c) { return sh.pushed_ml[place(c)]; }, s.blocks);
    }
    if (s.meeting > 1 && !meet<HD>(a, active, part + row * QUADS + d, part_ml + row, 8 * NT, arrivals + warp_row, s)) continue;
    if (active) store_output(out + rows.element(row) + 4 * d, a);
  }
}

// EACH: the block's token is one of several, each as if it were alone, with the splits of its own length; number blockIdx.y.
template <class F, int HD, int NT, int TILES, bool EACH = false>
DEVICE void attn_decode(bf16* out, const bf16* q, const typename F::Element* k_cache, const typename F::Element* v_cache, const uint8_t* fine,
                        float4* part, float2* part_ml, uint32_t* arrivals, const int32_t* pos_ptr, int T, int G, int KV, int max_len,
                        const Geometry& of, float scale_log2) {
  constexpr int R = 8 * NT;
  DYN_SHARED(unsigned char, dynamic);
  auto& sh = *reinterpret_cast<Shared<HD, NT>*>(dynamic);
  griddep_launch();
  if (of.log_cluster) {
    if (threadIdx.x == 0) push_init(&sh.arrived);
    __syncwarp();
    cluster_arrive();
  }
  const int row_blocks = NT == 1 ? 1 : int(unsigned(T * G + R - 1) / unsigned(R)), tiles = KV * row_blocks;
  Split s = place_of(of, tiles);
  if (s.tile >= tiles) return;
  const int token = EACH ? int(blockIdx.y) : 0;
  if (EACH) {
    const int64_t row = int64_t(token) * KV * G * HD, meeting = int64_t(token) * tiles * R * of.sources();
    out += row, q += row, part += meeting * (HD / 4), part_ml += meeting, arrivals += token * tiles * R;
  }
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4, kv = NT == 1 ? s.tile : int(unsigned(s.tile) / unsigned(row_blocks));
  const int warp = __shfl_sync(FULL_MASK, int(threadIdx.x) / WARP, 0);  // so that the compiler knows it to be the same in all lanes
  const int64_t first_row = int64_t(kv) * max_len;
  const AttnHead<F> head = {k_cache + first_row * HD, v_cache + first_row * HD, fine + first_row * FINE};
  const int pos = *pos_ptr;
  if (!split_keys(s, of, pos + token + (NT == 1 ? 1 : T))) return;

  // Keys of the first step. Rows from pos on belong to the launch before this one.
  AttnTile<F, HD> tile[TILES];
  int k0[TILES];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    k0[i] = s.begin + i * STEP + warp * ATTN_KEYS;
    if (k0[i] >= min(s.end, pos)) continue;
    attn_fetch_k<F, HD>(tile[i], head, k0[i], 0, pos - 1);
    attn_fetch_v<F, HD>(tile[i], head, k0[i], 0, pos - 1);
  }
  // Whatever else can be known before the wait.
  const int first_row_of = (s.tile - kv * row_blocks) * R;
  Rows<HD, NT> rows = {first_row_of, 0, G, KV, (kv * G + first_row_of) * HD};
  rows.count = min(R, (NT == 1 ? G : T * G) - rows.first);
  settle(rows.at);
  const uint32_t fine_dims = F::FINE_PARTS ? attn_fine_dims<HD>(fine_pairs(fine, KV, max_len, HD / 2, kv)) : 0;
  int limit[NT][2], q_at[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) {
    q_at[n] = 8 * n + g < rows.count ? rows.element(8 * n + g) : -1;
    settle(q_at[n]);
#pragma unroll
    for (int c = 0; c < 2; c++) limit[n][c] = rows.limit(8 * n + 2 * t + c, pos, s.end);
  }
  if (!s.alone() && of.log_cluster && !s.single) {
    const int log = log_share<NT>(of.log_cluster), mine = min(max(rows.count - (s.rank << log), 0), 1 << log);
    if (threadIdx.x == 0) push_expect(&sh.arrived, s.blocks * mine * (4 * HD + 8));
    cluster_wait();
  }
  settle(s.meeting), settle(s.blocks);
  griddep_wait();

  AttnQuery<F, HD> query[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) attn_load_row<F, HD>(query[n], q_at[n] >= 0 ? q + q_at[n] : nullptr, fine_dims);
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    if (k0[i] >= s.end || k0[i] + ATTN_KEYS <= pos) continue;
    attn_fetch_k<F, HD>(tile[i], head, k0[i], pos, s.end - 1);
    attn_fetch_v<F, HD>(tile[i], head, k0[i], pos, s.end - 1);
  }
  AttnState<HD, NT> st;
  attend<F, HD, NT, TILES>(st, query, tile, head, k0[0], s.end, rows.limit(0, pos, s.end), limit, scale_log2);
  publish<F::template Values<HD>::DIMS, HD, NT>(sh.warp[warp], sh.ml[warp], st);
  __syncthreads();
  if (s.begin < s.end) hand_over(out, sh, rows, s, of.log_cluster);
  if (s.alone()) return;
  if (!of.log_cluster || s.single) __syncthreads();
  const int tile_row = s.tile * R, sources = of.sources();
  finish(out, sh, rows, s, of.log_cluster, part + int64_t(tile_row) * sources * (HD / 4), part_ml + tile_row * sources, arrivals + tile_row);
}

#define ATTN_DECODE_AS(F, NAME, SUFFIX, HD, NT, TILES, EACH)                                                                                                 \
  KERNEL_OCC(WARPS * WARP, 1) void attn_decode_##NAME##_hd##HD##SUFFIX(                                                                     \
      bf16* out,                 /* [T, H, HD] */                                                                                           \
      const bf16* q,             /* [T, H, HD] */                                                                                           \
      const F::Element* k_cache, /* [KV, max_len, HD] */                                                                                    \
      const F::Element* v_cache, /* [KV, max_len, HD] */                                                                                    \
      const uint8_t* fine,       /* of an e4m3 cache: include/kv_cache.cuh */                                                               \
      float4* part,              /* [tiles, clusters + singles, 8·NT, HD] */                                                                \
      float2* part_ml,           /* [tiles, clusters + singles, 8·NT] */                                                                    \
      uint32_t* arrivals,        /* [tiles, 8·NT] */                                                                                        \
      const int32_t* pos,        /* [1]: of the first of the T tokens */                                                                    \
      int T, int G, int KV, int max_len, int clusters, int singles, int log_cluster, int log_keys, int log_full, int per_cluster,           \
      int per_single, float scale_log2) {                                                                                                   \
    attn_decode<F, HD, NT, TILES, EACH>(out, q, k_cache, v_cache, fine, part, part_ml, arrivals, pos, T, G, KV, max_len,                          \
                                  {clusters, singles, log_cluster, log_keys, log_full, per_cluster, per_single}, scale_log2);               \
  }
#define ATTN_DECODE(F, NAME, HD, NT, TILES) ATTN_DECODE_AS(F, NAME, _n##NT, HD, NT, TILES, false)
#define ATTN_DECODE_EACH(F, NAME, HD, TILES) ATTN_DECODE_AS(F, NAME, _each, HD, 1, TILES, true)
ATTN_DECODE(CacheBf16, bf16, 64, 1, 2)
ATTN_DECODE(CacheBf16, bf16, 128, 1, 2)
ATTN_DECODE(CacheBf16, bf16, 64, 2, 1)
ATTN_DECODE(CacheBf16, bf16, 128, 2, 1)
ATTN_DECODE(CacheE4m3, e4m3, 64, 1, 4)
ATTN_DECODE(CacheE4m3, e4m3, 128, 1, 4)
ATTN_DECODE(CacheE4m3, e4m3, 64, 2, 2)
ATTN_DECODE(CacheE4m3, e4m3, 128, 2, 2)
ATTN_DECODE_EACH(CacheBf16, bf16, 64, 2)
ATTN_DECODE_EACH(CacheBf16, bf16, 128, 2)
ATTN_DECODE_EACH(CacheE4m3, e4m3, 64, 4)
ATTN_DECODE_EACH(CacheE4m3, e4m3, 128, 4)
