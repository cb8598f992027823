// gemm_qkv_sm90.cuh - what becomes of the sums of Q, K and V (include/gemm_sm90.cuh): bias, RoPE, queries to memory, keys and values to the cache.
// The pairs are dimensions d and d + HD/2 of a head.
#pragma once
#include "gemm_out_sm90.cuh"
#include "kv_cache.cuh"

struct QkvTarget {
  bf16* q;  // [T, H, HD]
  KvCache cache;
  const float* bias;    // [(H + 2·KV)·HD]
  const float2* rope;   // [max_len, HD/2] {cos, sin}
  const int32_t* span;  // {pos0, how many rows are tokens}: the others are padding, computed and dropped
  int T, H, shift;      // T rows; HD = 2 << shift
  DEVICE int tokens() const { return min(T, span[1]); }
  DEVICE int heads() const { return H + 2 * cache.KV; }
  DEVICE bool turns(int head) const { return head < H + cache.KV; }
  DEVICE bf16* row(int head, int t) const { return q + (int64_t(t) * H + head) * (2 << shift); }  // a query's
  // Eight neighbouring dimensions from d on, and their seconds, from the four lanes of a quad.
  DEVICE void put(bool inside, int head, int t, int d, const uint32_t (&firsts)[4], const uint32_t (&seconds)[4]) const {
    const uint4 first = quad_transpose(firsts), second = quad_transpose(seconds);
    if (!inside) return;
    const int half = 1 << shift;
    if (head >= H) return cache.append8(head - H, span[0] + t, half, d, first, second);
    bf16* out = row(head, t) + d;
    *reinterpret_cast<uint4*>(out) = first;
    *reinterpret_cast<uint4*>(out + half) = second;
  }
};
// Firsts in the tile's first half, their seconds in the other. Widths of no whole heads: as HeadOperand has them.
template <class Shape>
struct QkvManyTokens {
  static constexpr bool BIASED = true;
  static constexpr int SLOTS = 0, TILES = Shape::BN / 16;  // column tiles of firsts
  QkvTarget to;
  DEVICE float bias(int row) const { return to.bias[row]; }
  // The angles of a thread's two tokens, as its eight column tiles need them; from there on they repeat, as a head has at most 64 pairs. They are
  // requested before the tile's products: a wait for memory costs as much as several slices. Where there are no registers for both, the second
  // token's behind some of the first's outputs.
  static constexpr bool MIXED = Shape::BN % 128 != 0, LATE = Shape::BN >= 192;
  using Mixed = HeadOperand<MIXED ? Shape::BN : 144>;
  struct Early {
    float4 angles[2][MIXED ? TILES : 8];
  };
  // Of column tile j of the tile's first half.
  DEVICE int head(int q, int j) const {
    if constexpr (MIXED) return j < 8 ? Mixed::own_head(q) : Mixed::shared_head(q);
    return (q * (Shape::BN / 2) + 8 * j) >> to.shift;
  }
  DEVICE int dimension(int q, int j) const {
    if constexpr (MIXED) return 8 * (j % 8) + (j < 8 ? 0 : Mixed::shared_pair(q));
    return 8 * j & ((1 << to.shift) - 1);  // whole heads
  }
  DEVICE Early early(int p, int q) const {
    Early e;
    request(e, p, q, 0);
    if (!LATE) request(e, p, q, 1);
    return e;
  }
  DEVICE void request(Early& e, int p, int q, int i) const {
    const int t = max(min(ManyAt<Shape>(p, q).token(i), to.tokens() - 1), 0);
    const float2* row = to.rope + (int64_t(to.span[0] + t) << to.shift) + 2 * (int(threadIdx.x) % 4);
#pragma unroll
    for (int j = 0; j < (MIXED ? TILES : 8); j++) e.angles[i][j] = ld_global_f4(row + dimension(q, j));
  }
  template <class Scale, class Place>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, const Scale& scale, const Place&, const float* biases,
                         Early early) const {
    scale.tiles(sum, 0, Shape::BN / 8);
    const int lane = int(threadIdx.x) % 4, T = to.tokens(), heads = to.heads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = ManyAt<Shape>(p, q).token(i);
#pragma unroll
      for (int j0 = 0; j0 < TILES; j0 += 4) {
        __syncwarp();  // what later tiles need is not read yet: it would spill
        if (LATE && i == 0 && j0 == TILES - 4) request(early, p, q, 1);
        uint32_t firsts[4] = {0, 0, 0, 0}, seconds[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int j = j0 + k, s = 4 * j + 2 * i, s2 = s + 4 * TILES;
          if (j >= TILES) break;
          const float4 c = to.turns(head(q, j)) ? early.angles[i][MIXED ? j : j % 8] : make_float4(1.f, 0.f, 1.f, 0.f);
          const float2 b0 = *reinterpret_cast<const float2*>(biases + 8 * j + 2 * lane);
          const float2 b1 = *reinterpret_cast<const float2*>(biases + Shape::BN / 2 + 8 * j + 2 * lane);
          const float x0 = sum[0][s] + b0.x, x1 = sum[0][s + 1] + b0.y, y0 = sum[0][s2] + b1.x, y1 = sum[0][s2 + 1] + b1.y;
          firsts[k] = pack_bf16(fmaf(x0, c.x, -y0 * c.y), fmaf(x1, c.z, -y1 * c.w));
          seconds[k] = pack_bf16(fmaf(y0, c.x, x0 * c.y), fmaf(y1, c.z, x1 * c.w));
        }
        const int h = head(q, j0 + lane);
        to.put(t < T && h < heads && j0 + lane < TILES, h, t, dimension(q, j0 + lane), firsts, seconds);
      }
    }
  }
};
template <class Shape>
struct QkvFewTokens {
  static constexpr bool BIASED = false;
  using Early = Nothing;
  static constexpr int SLOTS = 0;
  QkvTarget to;
  template <class Place>
  DEVICE void operator()(const typename Shape::Sums& sum, int p, int q, ScaleNothing, const Place&, const float*, Nothing) const {
    each_pair_few<Shape>(sum, p, q, to.tokens(), to.heads() << to.shift, [&](int t, int n, float x, float y) {
      const int half = 1 << to.shift, head = n >> to.shift, d = n & (half - 1), c = 2 * half * head + d;
      const float2 cs = to.turns(head) ? to.rope[int64_t(to.span[0] + t) * half + d] : make_float2(1.f, 0.f);
      x += to.bias[c], y += to.bias[c + half];
      const float first = fmaf(x, cs.x, -y * cs.y), second = fmaf(y, cs.x, x * cs.y);
      if (head >= to.H) {
        const KvCache& cache = to.cache;
        return cache.append(head - to.H, to.span[0] + t, half, d, first, second, cache.slot(head - to.H, half, d));
      }
      bf16* out = to.row(head, t) + d;
      out[0] = __float2bfloat16_rn(first);
      out[half] = __float2bfloat16_rn(second);
    });
  }
};
