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
  // Eight neighbouring dimensions from d on, and their seconds.
  DEVICE void put(int head, int t, int d, uint4 first, uint4 second) const {
    const int half = 1 << shift;
    if (head >= H) return cache.append8(head - H, span[0] + t, half, d, first, second);
    bf16* out = row(head, t) + d;
    *reinterpret_cast<uint4*>(out) = first;
    *reinterpret_cast<uint4*>(out + half) = second;
  }
};
// Two pairs (x, y), turned by angles {cos, sin, cos, sin}; their firsts and seconds as bf16.
DEVICE void turn_pairs(float2 x, float2 y, float4 c, uint32_t& first, uint32_t& second) {
  first = pack_bf16(fmaf(x.x, c.x, -y.x * c.y), fmaf(x.y, c.z, -y.y * c.w));
  second = pack_bf16(fmaf(y.x, c.x, x.x * c.y), fmaf(y.y, c.z, x.y * c.w));
}

// Firsts in the tile's first half, their seconds in the other. Widths of no whole heads: as HeadOperand has them. A warp turns the pairs of its 16
// rows in registers, lays them into its warpgroup's tray, and takes them from there to memory, eight pairs a lane.
template <class Shape>
struct QkvManyTokens {
  static constexpr bool BIASED = true;
  static constexpr int SLOTS = 2, TILES = Shape::BN / 16;  // column tiles of firsts
  static constexpr int PITCH = Shape::BN * int(sizeof(bf16)) + 16;  // bytes of a row in the tray: neighbours are in other banks
  static_assert(64 * PITCH <= GemmTrays<Shape, SLOTS>::BYTES, "a warpgroup's rows fit into its tray");
  QkvTarget to;
  DEVICE float bias(int row) const { return to.bias[row]; }
  // The angles of a thread's two tokens, as its eight column tiles need them; from there on they repeat, as a head has at most 64 pairs. They are
  // requested before the tile's products: a wait for memory costs as much as several slices. Where there are no registers for both, the second
  // token's take the places of the first's.
  static constexpr bool MIXED = Shape::BN % 128 != 0, LATE = Shape::BN >= 192;
  static constexpr int ANGLES = MIXED ? TILES : 8;
  using Mixed = HeadOperand<MIXED ? Shape::BN : 144>;
  struct Early {
    float4 angles[LATE ? 1 : 2][ANGLES];
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
  DEVICE const float2* angles(int p, int q, int i) const {
    const int t = max(min(ManyAt<Shape>(p, q).token(i), to.tokens() - 1), 0);
    return to.rope + (int64_t(to.span[0] + t) << to.shift) + 2 * (int(threadIdx.x) % 4);
  }
  DEVICE Early early(int p, int q) const {
    Early e;
#pragma unroll
    for (int i = 0; i < (LATE ? 1 : 2); i++) {
      const float2* row = angles(p, q, i);
#pragma unroll
      for (int j = 0; j < ANGLES; j++) e.angles[i][j] = ld_global_f4(row + dimension(q, j));
    }
    return e;
  }
  template <class Scale>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, const Scale& scale, unsigned char* tray, const float* biases, Early early) const {
    scale.tiles(sum, 0, Shape::BN / 8);
    const int lane = int(threadIdx.x) % WARP, warp_row = int(threadIdx.x) % WARPGROUP / WARP * 16;
    uint32_t words[2 * TILES][2];
    const auto lay = [&](int row, int j, const uint32_t (&w)[4]) { stmatrix_x4(tray + (warp_row + row) * PITCH + j * 16, w); };  // one row of a matrix
    const float2* late = LATE ? angles(p, q, 1) : nullptr;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const int s = 4 * j + 2 * i, s2 = s + 4 * TILES;
        float4& angle = early.angles[LATE ? 0 : i][j % ANGLES];
        const float4 c = to.turns(head(q, j)) ? angle : make_float4(1.f, 0.f, 1.f, 0.f);
        const float2 b0 = *reinterpret_cast<const float2*>(biases + 8 * j + lane % 4 * 2);
        const float2 b1 = *reinterpret_cast<const float2*>(biases + Shape::BN / 2 + 8 * j + lane % 4 * 2);
        const float2 x = make_float2(sum[0][s] + b0.x, sum[0][s + 1] + b0.y), y = make_float2(sum[0][s2] + b1.x, sum[0][s2 + 1] + b1.y);
        turn_pairs(x, y, c, words[j][i], words[TILES + j][i]);
        if (LATE && i == 0 && j + ANGLES >= TILES) angle = ld_global_f4(late + dimension(q, j % ANGLES));  // the last one that needs it
        if (j % 4 < 3) continue;
        if (LATE)
#pragma unroll
          for (int k = j - 3; k < 2 * TILES; k += TILES) lay(8 * i + lane % 8, k + lane / 8, {words[k][i], words[k + 1][i], words[k + 2][i], words[k + 3][i]});
        __syncwarp();  // what later tiles need is not read yet: it would spill
      }
    if (!LATE)
#pragma unroll
      for (int j = 0; j < 2 * TILES; j += 2) lay(lane % 16, j + lane / 16, {words[j][0], words[j][1], words[j + 1][0], words[j + 1][1]});
    __syncwarp();
    const int T = to.tokens(), heads = to.heads(), t0 = group_token(p) + warp_row;
#pragma unroll 1
    for (int n = lane; n < 16 * TILES; n += WARP) {
      const int row = n / TILES, j = n % TILES, t = t0 + row, h = head(q, j);
      if (t >= T || h >= heads) continue;
      const unsigned char* from = tray + (warp_row + row) * PITCH + j * 16;
      to.put(h, t, dimension(q, j), *reinterpret_cast<const uint4*>(from), *reinterpret_cast<const uint4*>(from + TILES * 16));
    }
    async_fence();  // before a copy may write there
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
