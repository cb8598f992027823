// gemv_rows.cuh - 2 to 16 activation rows against a weight matrix, Y = X·Wᵀ: decode's products for the verification of drafted tokens and for
// small batches. The same functions as include/gemv.cuh, for M rows (tokens) at once; each weight is read once.
//
// W is [N, K] row-major, bf16 or e4m3 (then with one fp32 scale per row, applied after the sum). A block owns a contiguous range of rows and
// sums them in fp32, each warp its share of K (include/gemv_mma.cuh). The shares meet in shared memory, G tiles of 16 rows at a time, in two
// buffers: one barrier a group, and the weights of the next are on their way. Where K is too long for the registers that hold x, S blocks
// share a range of rows: each leaves its sums in the workspace, the last to arrive adds them, in the order of the splits. But for bf16 weights
// and normed rows of more than 8 tokens they may be a cluster (`together`): each finishes every S-th quad of rows, and all push its sums to it.
//
// As in include/gemv.cuh the first weights, norm weights, scales and biases are requested before griddep_wait, RMSNorm's scalar is applied
// after the sums, and nothing that a previous kernel writes is read through the read-only path.
//
// grid: R·S blocks, in clusters of S if `together`; block b is split b % S of range b / S; any R. block: ceil(K_block / RowsMma::WARP_K) warps, K_block = K of a split.
// dynamic shared memory: the ring, g of the block's K, then RowsShared. bytes moved: N·K·sizeof(weight) once from HBM; x (2·M·K or 4·M·K bytes) R times from L2.
// PRECOND  1 <= M <= TOKENS.  PRECOND  K % 8 == 0 (bf16) or K % 16 == 0 (e4m3), and so is K_block, of which S cover K.
// PRECOND  W, x 16-byte aligned.  PRECOND  counters zero (they return to it).
#pragma once
#include "gemv_mma.cuh"
#include "kv_cache.cuh"
#include "push.cuh"

// How the grid divides the product, and where splits meet: ws is squares [R, S, 16] fp32, then partial sums [S, M, N] fp32; counters [R].
struct RowsSplit {
  float* ws;
  uint32_t* counters;
  int S, K_block, G, together;
  DEVICE float* squares(int range, int s) const { return ws + (range * S + s) * 16; }
  // In a cluster: of the quads of a range, four rows each, block q % S finishes quad q; the most that fall to one.
  DEVICE int quads(const RowsRange& range) const { return (4 * range.tiles + S - 1) / S; }
  DEVICE float* partial(int s, int m, int M, int64_t N) const { return ws + int(gridDim.x) * 16 + (int64_t(s) * M + m) * N; }
};
#define ROWS_SPLIT float* ws, uint32_t* counters, int S, int K_block, int G, int together

DEVICE RowsRange rows_range(int units, int rows_per_unit, int S) {
  const int R = gridDim.x / S, r = blockIdx.x / S;
  const int begin = int(int64_t(units) * r / R), count = (int(int64_t(units) * (r + 1) / R) - begin) * rows_per_unit;
  const int tiles = (count + 15) / 16;
  return {begin, count, tiles, tiles ? ((count + tiles - 1) / tiles + 1) / 2 * 2 : 0};
}

// Dynamic shared memory: sums [2 or 1 buffer][warp][G][token][COLUMN], Σ h² [warp][16], RMSNorm's scalars [16]; in a cluster what its blocks push:
// a barrier, sums [block][quad][token], Σ h² [block][16]; then up to two constants a row.
template <class E, int TOKENS>
struct RowsShared {
  float *part, *squares, *inverse, *constant;
  float4* pushed;
  float2* pushed_squares;
  uint64_t* arrived;
  int warps, G, rows, buffer;
  DEVICE RowsShared(float* shared, const RowsSplit& split, const RowsRange& range)
      : part(shared), warps(int(blockDim.x) / WARP), G(split.G), rows(range.count) {
    buffer = warps * G * TILE;
    squares = part + (range.tiles > G ? 2 : 1) * buffer;
    inverse = squares + warps * 16;
    constant = inverse + 16;
    if (E::CLUSTERS && split.together) {
      arrived = reinterpret_cast<uint64_t*>(constant);
      pushed = reinterpret_cast<float4*>(constant + 4);
      pushed_squares = reinterpret_cast<float2*>(pushed + split.S * split.quads(range) * TOKENS);
      constant = reinterpret_cast<float*>(pushed_squares + split.S * 16);
    }
  }
  static constexpr int TILE = TOKENS * E::COLUMN;
  DEVICE float* constants(int i) const { return constant + i * rows; }
  // Where warp w leaves tile i of a group.
  DEVICE float* tile(int parity, int w, int i) const { return part + parity * buffer + (w * G + i) * TILE; }
  // The sum of a tile's row r and token m over all warps.
  DEVICE float total(int parity, int i, int m, int r) const {
    const float* p = tile(parity, 0, i) + m * E::COLUMN + r;
    float s = 0.f;
#pragma unroll ROWS_SUMS
    for (int w = 0; w < warps; w++) s += p[w * G * TILE];
    return s;
  }
  // The same of rows 4·quad … 4·quad + 3.
  DEVICE float4 quad(int parity, int i, int m, int quad) const {
    const float* p = tile(parity, 0, i) + m * E::COLUMN + 4 * quad;
    float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll ROWS_SUMS
    for (int w = 0; w < warps; w++) {
      const float4 v = *reinterpret_cast<const float4*>(p + w * G * TILE);
      s = make_float4(s.x + v.x, s.y + v.y, s.z + v.z, s.w + v.w);
    }
    return s;
  }
};

// Calls f(early, i, m, r, j) for each row j of the block's tiles from `first` on, G at most, and each token m: i, r its tile and the row in
// it; early: it is the thread's first.
template <int TOKENS, int STEP, class F>
DEVICE void rows_each(const RowsRange& range, int first, int G, int M, F f) {
  constexpr int UNITS = 16 / STEP;
  const int tiles = min(G, range.tiles - first);
  for (int q = threadIdx.x; q < tiles * TOKENS * UNITS; q += blockDim.x) {
    const int i = q / (TOKENS * UNITS), m = q / UNITS % TOKENS, r = q % UNITS * STEP, j = (first + i) * range.tile_rows + r;
    if (m < M && r < range.tile_rows && j < range.count) f(q == int(threadIdx.x), i, m, r, j);
  }
}

// What a block of a cluster finishes: items q of `count`, each one row (or two) of one token, as they lie in RowsShared::pushed.
template <int TOKENS, int STEP>
struct RowsMine {
  static constexpr int UNITS = 4 / STEP;
  const RowsRange& range;
  int S, s, quads;
  DEVICE RowsMine(const RowsSplit& split, const RowsRange& range, int s) : range(range), S(split.S), s(s), quads((4 * range.tiles - s + S - 1) / S) {}
  DEVICE int count() const { return quads * TOKENS * UNITS; }
  DEVICE int token(int q) const { return q / UNITS % TOKENS; }
  // Of the block's rows; -1 if there is none.
  DEVICE int row(int q) const {
    const int quad = q / (UNITS * TOKENS) * S + s, r = quad % 4 * 4 + q % UNITS * STEP, j = quad / 4 * range.tile_rows + r;
    return r < range.tile_rows && j < range.count ? j : -1;
  }
};

// The whole product. `rows` gives the block's rows their addresses. Op, what becomes of the sums:
//   PAIRED               rows 2u and 2u + 1 come together
//   before(shared)       stages constants, before griddep_wait;  after(m, j): requests earlier results, after
//                        it; row j (none below 0) of token m is the thread's first
//   operator()(early, m, j, a, b, inverse)   row j of the block (or rows j and j + 1), token m; inverse: RMSNorm's scalar
template <class E, bool NORMED, int TOKENS, class Rows, class Op>
DEVICE void rows_product(Op& op, const Rows& rows, const RowsRange& range, const RowsSplit& split, const void* x, const bf16* g, int N, int M, int K,
                         float eps, float* dynamic) {
  constexpr int STEP = Op::PAIRED ? 2 : 1;
  bf16* norm = reinterpret_cast<bf16*>(dynamic + E::RING_BYTES / 4 * blockDim.x);
  const RowsShared<E, TOKENS> shared(dynamic + E::RING_BYTES / 4 * blockDim.x + (NORMED ? split.K_block / 2 : 0), split, range);
  const int s = blockIdx.x % split.S, warp = int(threadIdx.x) / WARP;
  const int together = E::CLUSTERS ? split.together : 0;
  if (together) {
    if (threadIdx.x == 0) push_init(shared.arrived);
    cluster_arrive();
  }
  E e;
  const int begin = s * split.K_block, end = min(K, begin + split.K_block);
  e.place(dynamic, begin, end);
  if (NORMED) {
    for (int i = 8 * int(threadIdx.x); i < end - begin; i += 8 * int(blockDim.x)) cp_async_v4(norm + i, g + begin + i, true);
    cp_async_commit();
  }
  auto now = e.aim(rows, range, 0);
#pragma unroll
  for (int a = 0; a < E::AHEAD; a++) {
    const auto first = a ? e.aim(rows, range, a) : now;
#pragma unroll
    for (int i = 0; i < (E::STAGES < E::RING ? E::STAGES : E::RING); i++) e.request(a * E::STAGES + i, first, i);
  }
  op.before(shared);
  if (NORMED) {
    cp_async_wait<E::RING>();  // g; the ring's copies were requested after it
    __syncthreads();
  }
  griddep_wait();
  if (NORMED) {
    float squares[E::OWN];
    e.normed(squares, static_cast<const float*>(x), norm + (e.k - begin), M, K);
#pragma unroll
    for (int i = 0; i < E::OWN; i++) {
      float sum = squares[i] + __shfl_xor_sync(FULL_MASK, squares[i], 1);
      sum += __shfl_xor_sync(FULL_MASK, sum, 2);
      if (E::t() == 0 && (TOKENS > 4 || E::g() < 4)) shared.squares[warp * 16 + e.token(i)] = sum;
    }
  } else {
    e.input(static_cast<const bf16*>(x), M, K);
  }
  const RowsMine<TOKENS, STEP> mine(split, range, s);
  if (together) {
    op.after(mine.token(threadIdx.x), mine.row(threadIdx.x));
    if (threadIdx.x == 0) push_expect(shared.arrived, split.S * M * (16 * mine.quads + (NORMED ? 8 : 0)));
    cluster_wait();
  } else {
    const int q = threadIdx.x, r = q % (16 / STEP) * STEP, j = q / (16 / STEP * TOKENS) * range.tile_rows + r;
    op.after(q / (16 / STEP) % TOKENS, r < range.tile_rows && j < range.count ? j : -1);
  }

  const auto total_square = [&](int m) {
    float sum = 0.f;
    for (int w = 0; w < shared.warps; w++) sum += shared.squares[w * 16 + m];
    return sum;
  };
  int parity = 0, base = 0;
  for (int first = 0; first < range.tiles; first += split.G, parity ^= 1) {
    for (int i = 0; i < split.G && first + i < range.tiles; i++) {
      const auto next = e.aim(rows, range, first + i + E::AHEAD);
      e.tile(base, now, next, shared.tile(parity, warp, i));
      now = next;  // read only where a tile is requested while it is multiplied
      base = base + E::STAGES < E::RING ? base + E::STAGES : 0;
    }
    __syncthreads();
    if (together) {
      if (NORMED && first == 0)
        for (int q = threadIdx.x; q < split.S * M; q += blockDim.x)
          push_f2(shared.pushed_squares + s * 16 + q % M, q / M, make_float2(total_square(q % M), 0.f), shared.arrived);
      int q = threadIdx.x;
      if (E::TALL) {  // a group after the other begins with other warps: none is always the one that is waited for
        q -= first * 4 * TOKENS % int(blockDim.x);
        if (q < 0) q += int(blockDim.x);
      }
      for (; q < min(split.G, range.tiles - first) * 4 * TOKENS; q += blockDim.x) {
        const int i = q / (4 * TOKENS), m = q / 4 % TOKENS, quad = 4 * (first + i) + q % 4;
        if (m < M)
          push_f4(shared.pushed + (s * split.quads(range) + quad / split.S) * TOKENS + m, quad % split.S, shared.quad(parity, i, m, q % 4), shared.arrived);
      }
    } else if (split.S == 1) {
      if (NORMED && first == 0) {
        if (int(threadIdx.x) < M) shared.inverse[threadIdx.x] = rsqrtf(total_square(threadIdx.x) / float(K) + eps);
        __syncthreads();
      }
      rows_each<TOKENS, STEP>(range, first, split.G, M, [&](bool early, int i, int m, int r, int j) {
        op(early && first == 0, m, j, shared.total(parity, i, m, r), Op::PAIRED ? shared.total(parity, i, m, r + 1) : 0.f, NORMED ? shared.inverse[m] : 1.f);
      });
    } else {
      rows_each<TOKENS, 1>(range, first, split.G, M, [&](bool, int i, int m, int r, int j) {
        split.partial(s, m, M, N)[range.begin * STEP + j] = shared.total(parity, i, m, r);
      });
    }
  }
  cp_async_wait<0>();  // what was requested past the last tile: zeros
  if (split.S == 1) return;
  if (together) {
    uint32_t looks = 0;
    while (!push_arrived(shared.arrived)) look_again(looks);
    if (NORMED) {
      if (int(threadIdx.x) < M) {
        float sum = 0.f;
        for (int i = 0; i < split.S; i++) sum += shared.pushed_squares[i * 16 + threadIdx.x].x;
        shared.inverse[threadIdx.x] = rsqrtf(sum / float(K) + eps);
      }
      __syncthreads();
    }
    for (int q = threadIdx.x; q < mine.count(); q += blockDim.x) {
      const int m = mine.token(q), j = mine.row(q);
      if (m >= M || j < 0) continue;
      const float* p = reinterpret_cast<const float*>(shared.pushed + q / (4 / STEP)) + q % (4 / STEP) * STEP;
      float a = 0.f, b = 0.f;
#pragma unroll 4
      for (int i = 0; i < split.S; i++, p += 4 * TOKENS * split.quads(range)) {
        a += p[0];
        if (Op::PAIRED) b += p[1];
      }
      op(q == int(threadIdx.x), m, j, a, b, NORMED ? shared.inverse[m] : 1.f);
    }
    return;
  }

  // The last of the S blocks to arrive adds what all have left.
  const int group = blockIdx.x / split.S;
  if (NORMED && int(threadIdx.x) < M) split.squares(group, s)[threadIdx.x] = total_square(threadIdx.x);
  __syncthreads();
  uint32_t* last = reinterpret_cast<uint32_t*>(shared.inverse);
  if (threadIdx.x == 0) *last = atom_inc_acq_rel_gpu(split.counters + group, split.S - 1) == uint32_t(split.S - 1);
  __syncthreads();
  const bool is_last = *last;
  __syncthreads();
  if (!is_last) return;
  if (NORMED && int(threadIdx.x) < M) {
    float sum = 0.f;
    for (int i = 0; i < split.S; i++) sum += split.squares(group, i)[threadIdx.x];
    shared.inverse[threadIdx.x] = rsqrtf(sum / float(K) + eps);
  }
  __syncthreads();
  rows_each<TOKENS, STEP>(range, 0, range.tiles, M, [&](bool early, int, int m, int, int j) {
    float sum[2] = {0.f, 0.f};
#pragma unroll 4
    for (int i = 0; i < split.S; i++)
#pragma unroll
      for (int q = 0; q < STEP; q++) sum[q] += split.partial(i, m, M, N)[range.begin * STEP + j + q];
    op(early, m, j, sum[0], sum[1], NORMED ? shared.inverse[m] : 1.f);
  });
}

// ---- what becomes of the sums ---------------------------------------------------------------------------------------------------------
// h[m, n] += scale[n]·y. The old value of a thread's first sum is requested early.
template <bool SCALED>
struct RowsAdd {
  static constexpr bool PAIRED = false;
  float* h;
  const float* scale;
  int N, M;
  RowsRange range;
  float* scales;
  float early;
  template <class Shared>
  DEVICE void before(const Shared& shared) {
    scales = shared.constants(0);
    if (SCALED) stage(scales, scale + range.begin, range.count);
  }
  DEVICE void after(int m, int j) { early = m < M && j >= 0 ? h[int64_t(m) * N + range.begin + j] : 0.f; }
  DEVICE void operator()(bool first, int m, int j, float y, float, float) {
    float& dst = h[int64_t(m) * N + range.begin + j];
    dst = (first ? early : dst) + (SCALED ? y * scales[j] : y);
  }
};

// y[m, n] = bf16(scale[n]·y): one rank's share of a row-parallel product.
template <bool SCALED>
struct RowsStore {
  static constexpr bool PAIRED = false;
  bf16* y;
  const float* scale;
  int N;
  RowsRange range;
  float* scales;
  template <class Shared>
  DEVICE void before(const Shared& shared) {
    scales = shared.constants(0);
    if (SCALED) stage(scales, scale + range.begin, range.count);
  }
  DEVICE void after(int, int) {}
  DEVICE void operator()(bool, int m, int j, float v, float, float) {
    y[int64_t(m) * N + range.begin + j] = __float2bfloat16_rn(SCALED ? v * scales[j] : v);
  }
};

// act[m, u] = silu(gate)·up.
template <bool SCALED>
struct RowsSwiglu {
  static constexpr bool PAIRED = true;
  bf16* act;
  const float *s_gate, *s_up;
  int I;
  RowsRange range;
  float *gates, *ups;
  template <class Shared>
  DEVICE void before(const Shared& shared) {
    gates = shared.constants(0), ups = gates + range.count / 2;
    if (SCALED) stage(gates, s_gate + range.begin, range.count / 2), stage(ups, s_up + range.begin, range.count / 2);
  }
  DEVICE void after(int, int) {}
  DEVICE void operator()(bool, int m, int j, float gate, float up, float inverse) {
    gate *= inverse, up *= inverse;
    if (SCALED) gate *= gates[j / 2], up *= ups[j / 2];
    act[int64_t(m) * I + range.begin + j / 2] = __float2bfloat16_rn(gate / (1.f + expf(-gate)) * up);
  }
};

// Bias, RoPE, and K and V to the cache, token m at position pos + m.
template <bool SCALED, class T>
struct RowsQkv {
  static constexpr bool PAIRED = true;
  bf16* q;
  KvCache cache;
  const float *scale, *bias;
  const float2* rope;
  const int32_t* pos_ptr;
  int H, log_half;
  RowsRotary<T> at;
  RowsRange range;
  float *biases, *scales;
  int pos;
  template <class Shared>
  DEVICE void before(const Shared& shared) {
    biases = shared.constants(0), scales = shared.constants(1);
    for (int j = threadIdx.x; j < range.count; j += blockDim.x) {
      biases[j] = bias[at.index(j)];
      if (SCALED) scales[j] = scale[at.index(j)];
    }
  }
  DEVICE void after(int, int) { pos = *pos_ptr; }
  DEVICE void operator()(bool, int m, int j, float x, float y, float inverse) {
    const int half = 1 << log_half, HD = 2 * half, KV = cache.KV, p = range.begin + j / 2, head = p >> log_half, d = p % half;
    const int64_t at_pos = pos + m;
    x *= inverse, y *= inverse;
    if (SCALED) x *= scales[j], y *= scales[j + 1];
    x += biases[j], y += biases[j + 1];
    const float2 cs = head >= H + KV ? make_float2(1.f, 0.f) : rope[at_pos * half + d];  // {cos, sin}
    const float first = fmaf(x, cs.x, -y * cs.y), second = fmaf(y, cs.x, x * cs.y);
    if (head >= H) return cache.append(head - H, at_pos, half, d, first, second, cache.slot(head - H, half, d));
    bf16* out = q + (int64_t(m) * H + head) * HD + d;
    out[0] = __float2bfloat16_rn(first);
    out[half] = __float2bfloat16_rn(second);
  }
};

struct RowsLogits {
  static constexpr bool PAIRED = false;
  float* logits;
  int V;
  RowsRange range;
  template <class Shared>
  DEVICE void before(const Shared&) {}
  DEVICE void after(int, int) {}
  DEVICE void operator()(bool, int m, int j, float y, float, float inverse) { logits[int64_t(m) * V + range.begin + j] = y * inverse; }
};

// ---- the kernels, for either weight type --------------------------------------------------------------------------------------------------
template <class W, int PARTS, int TOKENS>
using RowsEngine = RowsMma<W, PARTS, TOKENS>;

template <class W, int TOKENS>
DEVICE void rows_add(float* h, const bf16* x, const typename W::type* w, const float* scale, const RowsSplit& split, int N, int M, int K,
                     float* shared) {
  griddep_launch();
  const RowsRange range = rows_range(N, 1, split.S);
  const RowsPlain<typename W::type> rows{w + int64_t(range.begin) * K, K};
  RowsAdd<W::SCALED> op{h, scale, N, M, range};
  rows_product<RowsEngine<W, 1, TOKENS>, false, TOKENS>(op, rows, range, split, x, nullptr, N, M, K, 0.f, shared);
}

template <class W, int TOKENS>
DEVICE void rows_store(bf16* y, const bf16* x, const typename W::type* w, const float* scale, const RowsSplit& split, int N, int M, int K,
                       float* shared) {
  griddep_launch();
  const RowsRange range = rows_range(N, 1, split.S);
  const RowsPlain<typename W::type> rows{w + int64_t(range.begin) * K, K};
  RowsStore<W::SCALED> op{y, scale, N, range};
  rows_product<RowsEngine<W, 1, TOKENS>, false, TOKENS>(op, rows, range, split, x, nullptr, N, M, K, 0.f, shared);
}

template <class W, int TOKENS>
DEVICE void rows_swiglu(bf16* act, const float* h, const bf16* g, const typename W::type* w_gate, const float* s_gate,
                        const typename W::type* w_up, const float* s_up, const RowsSplit& split, int I, int M, int K, float eps, float* shared) {
  griddep_launch();
  const RowsRange range = rows_range(I, 2, split.S);
  const RowsGateUp<typename W::type> rows{w_gate + int64_t(range.begin) * K, w_up + int64_t(range.begin) * K, K};
  RowsSwiglu<W::SCALED> op{act, s_gate, s_up, I, range};
  rows_product<RowsEngine<W, 2, TOKENS>, true, TOKENS>(op, rows, range, split, h, g, 2 * I, M, K, eps, shared);
}

template <class W, int TOKENS>
DEVICE void rows_qkv(bf16* q, const KvCache& cache, const float* h, const bf16* g, const typename W::type* w, const float* scale,
                     const float* bias, const float2* rope, const int32_t* pos, const RowsSplit& split, int H, int log_half, int M, int K,
                     float eps, float* shared) {
  const int KV = cache.KV;
  griddep_launch();
  const RowsRange range = rows_range((H + 2 * KV) << log_half, 2, split.S);
  const RowsRotary<typename W::type> rows{w, K, range.begin, log_half};
  RowsQkv<W::SCALED, typename W::type> op{q, cache, scale, bias, rope, pos, H, log_half, rows, range};
  rows_product<RowsEngine<W, 2, TOKENS>, true, TOKENS>(op, rows, range, split, h, g, (H + 2 * KV) << (log_half + 1), M, K, eps, shared);
}

template <class W, int TOKENS>
DEVICE void rows_logits(float* logits, const float* h, const bf16* g, const typename W::type* w, const RowsSplit& split, int V, int M, int K,
                        float eps, float* shared) {
  griddep_launch();
  const RowsRange range = rows_range(V, 1, split.S);
  const RowsPlain<typename W::type> rows{w + int64_t(range.begin) * K, K};
  RowsLogits op{logits, V, range};
  rows_product<RowsEngine<W, 2, TOKENS>, true, TOKENS>(op, rows, range, split, h, g, V, M, K, eps, shared);
}
