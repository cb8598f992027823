// gemm_cut_sm90.cuh - tiles of include/gemm_sm90.cuh that a cluster has cut along K: how its blocks exchange sums, and what becomes of them.
//
// The sums of a tile of 128 × 128 are four units: 2·half + i has the rows 8i … 8i + 7 of every 16, of columns 32·half … 32·half + 31 and the same
// of the tile's second half, so that both dimensions that RoPE turns are in one. Each block owns one or two units, gets the others' sums of these
// in its shared memory, adds them in the order of K, and finishes them.
#pragma once
#include "gemm_qkv_sm90.cuh"

constexpr int UNIT = 16, UNIT_PACKS = UNIT / 4;  // a thread's sums in a unit: pairs k, of column tile unit_column(half, k)
DEVICE int unit_column(int half, int k) { return k / 4 * 8 + half * 4 + k % 4; }
DEVICE int unit_owner(int unit, int pieces) { return unit * pieces / 4; }
DEVICE int unit_first(int rank, int pieces) { return pieces == 2 ? 2 * rank : pieces == 3 && rank > 0 ? rank + 1 : rank; }  // pieces: 2, 3 or 4

// All consumers. meanwhile(): called while sums are on their way. finish(v, unit): a unit of this block's.
template <class Shape, class Meanwhile, class Finish>
DEVICE void gemm_exchange(const typename Shape::Sums& sums, const GemmRing<Shape>& ring, int pieces, const Meanwhile& meanwhile, const Finish& finish) {
  static_assert(Shape::BN == 128 && Shape::SLABS == 1, "units are of tiles 128 wide");
  const int thread = int(threadIdx.x), rank = int(cluster_rank()), first = unit_first(rank, pieces), owned = unit_first(rank + 1, pieces) - first;
  // Of an owner's `local` unit, what the block with piece `other` of the others brings.
  const auto slot = [&](int local, int other, int k) {
    return reinterpret_cast<float4*>(ring.sums()) + ((local * (pieces - 1) + other) * UNIT_PACKS + k) * GEMM_CONSUMERS + thread;
  };
  const auto pack = [&](int unit, int k) {
    const int a = 4 * unit_column(unit / 2, 2 * k) + 2 * (unit % 2), b = 4 * unit_column(unit / 2, 2 * k + 1) + 2 * (unit % 2);
    return make_float4(sums[0][a], sums[0][a + 1], sums[0][b], sums[0][b + 1]);
  };
  if (thread == 0) push_expect(ring.pushed(), uint32_t(owned * (pieces - 1) * UNIT_PACKS * GEMM_CONSUMERS * sizeof(float4)));
  cluster_wait();  // all blocks have begun
#pragma unroll
  for (int u = 0; u < 4; u++) {
    const int owner = unit_owner(u, pieces), local = u - unit_first(owner, pieces);
    if (owner == rank) continue;
#pragma unroll
    for (int k = 0; k < UNIT_PACKS; k++) push_f4(slot(local, rank - (rank > owner), k), uint32_t(owner), pack(u, k), ring.pushed());
  }
  __syncwarp();  // what follows is not mixed with the pushes: it would spill
  float4 own[UNIT_PACKS], next[UNIT_PACKS];  // the units from `first` on
#pragma unroll
  for (int u = 0; u < 4; u++) {
    if (u > 0 && u != first) continue;
#pragma unroll
    for (int k = 0; k < UNIT_PACKS; k++) own[k] = pack(u, k), next[k] = pack(u < 3 ? u + 1 : 3, k);
  }
  meanwhile(first);
  const uint64_t begin = global_timer_ns();
  while (!push_arrived(ring.pushed()))
    if (global_timer_ns() - begin > 2000000000ull) trap();
#pragma unroll 1
  for (int local = 0; local < owned; local++) {
    float v[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; i++) v[i] = 0.f;
#pragma unroll 1
    for (int piece = 0; piece < pieces; piece++)
#pragma unroll
      for (int k = 0; k < UNIT_PACKS; k++) {
        const float4 part = piece == rank ? own[k] : *slot(local, piece - (piece > rank), k);
        v[4 * k] += part.x, v[4 * k + 1] += part.y, v[4 * k + 2] += part.z, v[4 * k + 3] += part.w;
      }
#pragma unroll
    for (int k = 0; k < UNIT_PACKS; k++) own[k] = next[k];
    finish(v, first + local);
  }
}

// As GemmFinish (include/gemm_ops_sm90.cuh).
template <class Product, class Shape, class Weights, class Out>
struct GemmCutFinish {
  const Scales& scales;
  const Weights& weights;
  const Out& out;
  struct Ahead {
    float token[2];
    typename Out::Early early;
  };
  DEVICE Ahead begin(int, int) const { return {}; }
  // Before unit(): `first` of this block's.
  DEVICE void meanwhile(Ahead& a, int p, int q, int first, float* outputs) const {
    a.early = out.early(p, q, first);
    if constexpr (!Product::SCALED && !Out::BIASED) return;
    const int c = int(threadIdx.x) % WARPGROUP, row = weights.row(q, c / 64, c % 64);
    if constexpr (Product::SCALED) {
      const ManyAt<Shape> at(p, q);
      a.token[0] = scales.of_token(at.token(0)), a.token[1] = scales.of_token(at.token(1));
      outputs[c] = scales.of_row(row);
    }
    if constexpr (Out::BIASED) outputs[Shape::BN + c] = row < scales.rows ? out.bias(row) : 0.f;
    meet_warpgroup();
  }
  DEVICE void exchange(const typename Shape::Sums& sums, const GemmRing<Shape>& ring, int pieces, int p, int q, Ahead& a, float* outputs) const {
    gemm_exchange<Shape>(
        sums, ring, pieces, [&](int first) { meanwhile(a, p, q, first, outputs); }, [&](float (&v)[UNIT], int u) { unit(v, p, q, u, a, outputs); });
  }
  DEVICE void unit(float (&v)[UNIT], int p, int q, int unit, Ahead& a, const float* outputs) const {
    if constexpr (Product::SCALED) {
      const float t = unit % 2 ? a.token[1] : a.token[0];
#pragma unroll
      for (int k = 0; k < UNIT / 2; k++) {
        const float2 o = *reinterpret_cast<const float2*>(outputs + 8 * unit_column(unit / 2, k) + int(threadIdx.x) % 4 * 2);
        v[2 * k] *= t * o.x, v[2 * k + 1] *= t * o.y;
      }
    }
    out.unit(v, p, q, unit, a.early, outputs + Shape::BN);
  }
};

// ---- h[t, n] += y, fp32 ---------------------------------------------------------------------------------------------------------
template <class Shape>
struct AddCutTile {
  static constexpr bool BIASED = false;
  static constexpr int SLOTS = 0;
  using Early = Nothing;
  float* h;
  int T, N;
  DEVICE Early early(int, int, int) const { return {}; }
  DEVICE void unit(const float (&v)[UNIT], int p, int q, int unit, Early&, const float*) const {
    const ManyAt<Shape> at(p, q);
    const int t = at.token(unit % 2);
#pragma unroll
    for (int k = 0; k < UNIT / 2; k++) {
      const int n = at.output(unit_column(unit / 2, k));
      if (t < T && n < N) red_add_f32x2(h + int64_t(t) * N + n, v[2 * k], v[2 * k + 1]);
    }
  }
};

// ---- c[t, n] = y, bf16 -----------------------------------------------------------------------------------------------------------
template <class Shape>
struct StoreCutTile {
  static constexpr bool BIASED = false;
  static constexpr int SLOTS = 0;
  using Early = Nothing;
  bf16* c;
  int T, N;
  DEVICE Early early(int, int, int) const { return {}; }
  DEVICE void unit(const float (&v)[UNIT], int p, int q, int unit, Early&, const float*) const {
    const int t = ManyAt<Shape>(p, q).token(unit % 2);
#pragma unroll
    for (int k0 = 0; k0 < UNIT / 2; k0 += 4) {
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; k++) w[k] = pack_bf16(v[2 * (k0 + k)], v[2 * (k0 + k) + 1]);
      const uint4 pack = quad_transpose(w);
      const int n = q * Shape::BN + 8 * (unit_column(unit / 2, k0) + int(threadIdx.x) % 4);
      if (t < T && n < N) *reinterpret_cast<uint4*>(c + int64_t(t) * N + n) = pack;
    }
  }
};

// ---- Q, K and V: a tile is a head of 128 dimensions ---------------------------------------------------------------------------------
template <class Shape>
struct QkvCutTile {
  static constexpr bool BIASED = true;
  static constexpr int SLOTS = 0, HALF = Shape::BN / 2;
  QkvTarget to;
  // The angles of a thread's token in a unit: of this block's first, requested while sums are on their way; of the next one, behind that.
  struct Early {
    float4 angles[4];
  };
  DEVICE float bias(int row) const { return to.bias[row]; }
  DEVICE void request(float4 (&angles)[4], int p, int q, int unit) const {
    const int t = max(min(ManyAt<Shape>(p, q).token(unit % 2), to.tokens() - 1), 0);
    const float2* row = to.rope + int64_t(to.span[0] + t) * HALF + unit / 2 % 2 * 32 + 2 * (int(threadIdx.x) % 4);
#pragma unroll
    for (int k = 0; k < 4; k++) angles[k] = ld_global_f4(row + 8 * k);
  }
  DEVICE Early early(int p, int q, int first) const {
    Early e;
    request(e.angles, p, q, first);
    return e;
  }
  DEVICE void unit(const float (&v)[UNIT], int p, int q, int unit, Early& early, const float* biases) const {
    const int lane = int(threadIdx.x) % 4, t = ManyAt<Shape>(p, q).token(unit % 2), half = unit / 2;
    uint32_t firsts[4], seconds[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float4 c = to.turns(q) ? early.angles[k] : make_float4(1.f, 0.f, 1.f, 0.f);
      const float2 b0 = *reinterpret_cast<const float2*>(biases + 8 * (4 * half + k) + 2 * lane);
      const float2 b1 = *reinterpret_cast<const float2*>(biases + HALF + 8 * (4 * half + k) + 2 * lane);
      const float2 x = make_float2(v[2 * k] + b0.x, v[2 * k + 1] + b0.y), y = make_float2(v[8 + 2 * k] + b1.x, v[8 + 2 * k + 1] + b1.y);
      turn_pairs(x, y, c, firsts[k], seconds[k]);
    }
    request(early.angles, p, q, unit + 1);
    const uint4 first = quad_transpose(firsts), second = quad_transpose(seconds);
    if (t < to.tokens() && q < to.heads()) to.put(q, t, 8 * (4 * half + lane), first, second);
  }
};
