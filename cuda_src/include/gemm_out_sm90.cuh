// gemm_out_sm90.cuh - what becomes of a tile's sums (include/gemm_sm90.cuh): added to the residual stream, stored, SwiGLU.
//
// With many tokens consumer thread 32·warp + 4g + t holds, in sum[0][4j + 2i] and the next, columns 8j + 2t and the next (outputs) of
// the tile's row 16·warp + g + 8i (a token). With few, in sum[slab][4j + 2i] and the next, columns 8j + 2t and the next (tokens) of its
// warpgroup's half, of row 64·slab + 16·(warp % 4) + g + 8i (an output).
#pragma once
#include "gemm_sm90.cuh"

// The tokens and outputs of a consumer thread's sums.
template <class Shape>
struct ManyAt {
  int token0, output0;
  DEVICE ManyAt(int p, int q)
      : token0(p * GEMM_P + int(threadIdx.x) / WARP * 16 + int(threadIdx.x) % WARP / 4),
        output0(q * Shape::BN + int(threadIdx.x) % 4 * 2) {}
  DEVICE int token(int i) const { return token0 + 8 * i; }
  DEVICE int output(int j) const { return output0 + 8 * j; }
};
template <class Shape>
struct FewAt {
  int token0, row;  // row: of a slab
  DEVICE explicit FewAt(int q)
      : token0(q * Shape::BN + int(threadIdx.x) / WARPGROUP * (Shape::BN / 2) + int(threadIdx.x) % 4 * 2),
        row(int(threadIdx.x) % WARPGROUP / WARP * 16 + int(threadIdx.x) % WARP / 4) {}
  DEVICE int token(int s) const { return token0 + s / 4 * 8 + s % 2; }  // of sum s
  DEVICE int in_slab(int s) const { return row + s / 2 % 2 * 8; }
};

// e4m3: every sum times its token's scale and its output's, that of the weights' row. `weights`: the operand, which knows the rows of a tile.
struct Scales {
  const float *token, *low, *high;
  int T, rows, half;         // rows from `half` on have theirs in `high`
  const uint8_t* exponents;  // of tokens that have a scale for each of their slices
  int slices;
  DEVICE float of_token(int t) const { return t < T ? token[t] : 0.f; }
  DEVICE const float* at(int n) const { return n < half ? low + n : high + (n - half); }
  DEVICE float of_row(int n) const { return n < rows ? *at(n) : 0.f; }
};
// tiles(sum, j, n): column tiles j … j + n - 1. outputs: the scales of the tile's columns, in shared memory; t0, t1: of the thread's tokens.
template <class Shape>
struct ScaleMany {
  const float* outputs;
  float t0, t1;
  DEVICE void tiles(typename Shape::Sums& sum, int j0, int n) const {
#pragma unroll
    for (int j = j0; j < j0 + n; j++) {
      const float2 o = *reinterpret_cast<const float2*>(outputs + 8 * j + int(threadIdx.x) % 4 * 2);
      sum[0][4 * j] *= t0 * o.x, sum[0][4 * j + 1] *= t0 * o.y, sum[0][4 * j + 2] *= t1 * o.x, sum[0][4 * j + 3] *= t1 * o.y;
    }
  }
};
struct ScaleNothing {
  template <class Sums>
  DEVICE void tiles(Sums&, int, int) const {}
};
template <class Shape, class Weights>
DEVICE void scale_few(typename Shape::Sums& sum, const Scales& s, const Weights& weights, int p, int q) {
  const FewAt<Shape> at(q);
  float o[2][2];
#pragma unroll
  for (int i = 0; i < 4; i++) o[i / 2][i % 2] = s.of_row(weights.row(p, i / 2, at.in_slab(2 * (i % 2))));
#pragma unroll
  for (int k = 0; k < Shape::REGS; k++) {
    const float t = s.of_token(at.token(k));
    sum[0][k] *= t * o[0][k / 2 % 2], sum[1][k] *= t * o[1][k / 2 % 2];
  }
}

// A barrier of the threads of a consumer warpgroup.
DEVICE void meet_warpgroup() { named_barrier(GEMM_BARRIER + 1 + int(threadIdx.x) / WARPGROUP, WARPGROUP); }

// Among the four lanes of a quad, lane t gets word t of each lane, in their order: eight neighbours of one column tile instead of two of four.
DEVICE uint4 quad_transpose(const uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  uint32_t x[4], y[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // the words of pairs of lanes
    const uint32_t keep = odd ? w[i + 1] : w[i], got = __shfl_xor_sync(FULL_MASK, odd ? w[i] : w[i + 1], 1);
    x[i] = odd ? got : keep;
    x[i + 1] = odd ? keep : got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {  // the pairs of both halves
    const uint32_t keep = high ? x[i + 2] : x[i], got = __shfl_xor_sync(FULL_MASK, high ? x[i] : x[i + 2], 2);
    y[i] = high ? got : keep;
    y[i + 2] = high ? keep : got;
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

// silu(gate)·up, silu(x) = x / (1 + e^-x)
DEVICE float swiglu(float gate, float up) { return gate * up * rcp_approx(1.f + ex2_approx(gate * -1.44269504f)); }

// Few tokens: f(t, n, y) for every sum that lies inside C [T, N].
template <class Shape, class F>
DEVICE void each_few(const typename Shape::Sums& sum, int p, int q, int T, int N, const F& f) {
  const FewAt<Shape> at(q);
#pragma unroll
  for (int slab = 0; slab < 2; slab++)
#pragma unroll
    for (int s = 0; s < Shape::REGS; s++) {
      const int t = at.token(s), n = p * GEMM_P + slab * 64 + at.in_slab(s);
      if (t < T && n < N) f(t, n, sum[slab][s]);
    }
}

// ---- through a tray: boxes of 64 rows × 128 bytes, swizzled, each written by a warpgroup and sent by its first thread ----------------------
template <class Shape, int SLOTS>
struct Boxes {
  static constexpr int BYTES = 64 * SWIZZLE_ROW, HELD = GemmTrays<Shape, SLOTS>::BYTES / BYTES;  // a tray holds as many
  unsigned char* tray;
  DEVICE unsigned char* box(int i) const { return tray + i % HELD * BYTES; }
  // Before box i is written: what lay in its place has been read.
  DEVICE void begin(int i) const {
    if (i < HELD) return;
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_read<HELD - 1>();
    meet_warpgroup();
  }
  // Behind it: send() by one thread.
  template <class Send>
  DEVICE void end(int i, const Send& send) const {
    async_fence();
    meet_warpgroup();
    if (threadIdx.x % WARPGROUP == 0) {
      send(box(i));
      bulk_commit();
    }
  }
};
// Of WIDTH columns the last boxes may overlap: what both have is written twice.
template <int COLUMNS, int WIDTH>
DEVICE constexpr int box_column(int i) {
  static_assert(COLUMNS >= WIDTH, "a box begins in its tile");
  return (i + 1) * WIDTH <= COLUMNS ? i * WIDTH : COLUMNS - WIDTH;
}
// The first row of the tokens of this warpgroup; their part of a box.
DEVICE int group_token(int p) { return p * GEMM_P + int(threadIdx.x) / WARPGROUP * 64; }

// bf16: word(j, i) has the outputs of column tile j (of 8 in the box), row half i.
template <class Word>
DEVICE void put_bf16_box(unsigned char* box, const Word& word) {
  const int lane = int(threadIdx.x) % WARP, row = int(threadIdx.x) % WARPGROUP / WARP * 16 + lane % 16, piece = lane / 16;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t w[4] = {word(j, 0), word(j, 1), word(j + 1, 0), word(j + 1, 1)};
    stmatrix_x4(box + row * SWIZZLE_ROW + ((j + piece) ^ (row % 8)) * 16, w);
  }
}
// fp32: sums of column tiles j0 … j0 + 3, 32 columns, of which the first `none` tiles are zeros, an even number. Rows of odd g write tile j ^ 2
// where even ones write j: no two lanes meet in a bank.
template <class Sums>
DEVICE void put_f32_box(unsigned char* box, const Sums& sum, int j0, int none) {
  const int lane = int(threadIdx.x) % WARP, g = lane / 4, t = lane % 4;
  const bool odd = g & 1;
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int even_at = 4 * (j0 + j) + 2 * i, odd_at = 4 * (j0 + (j ^ 2)) + 2 * i;
      const float even_x = j < none ? 0.f : sum[0][even_at], even_y = j < none ? 0.f : sum[0][even_at + 1];
      const float odd_x = (j ^ 2) < none ? 0.f : sum[0][odd_at], odd_y = (j ^ 2) < none ? 0.f : sum[0][odd_at + 1];
      const float x = odd ? odd_x : even_x, y = odd ? odd_y : even_y;
      const int row = int(threadIdx.x) % WARPGROUP / WARP * 16 + 8 * i + g, piece = (odd ? j ^ 2 : j) * 2 + t / 2;
      *reinterpret_cast<float2*>(box + row * SWIZZLE_ROW + (piece ^ g) * 16 + t % 2 * 8) = make_float2(x, y);
    }
}

struct Nothing {};  // that an output requests before the tile's products

// ---- h[t, n] += y, fp32 ---------------------------------------------------------------------------------------------------------
template <class Shape>
struct AddManyTokens {
  static constexpr bool BIASED = false;
  using Early = Nothing;
  static constexpr int SLOTS = 2, WIDTH = 32;  // of a box
  const TensorMap& h;
  int T, N;
  template <class Scale>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, const Scale& scale, unsigned char* tray, const float*, Nothing) const {
    const Boxes<Shape, SLOTS> boxes{tray};
    const int t = group_token(p);
#pragma unroll
    for (int i = 0; i < (Shape::BN + WIDTH - 1) / WIDTH; i++) {
      const int column = box_column<Shape::BN, WIDTH>(i), none = i * WIDTH - column;  // what a box before this one has is not added twice
      const int n = q * Shape::BN + column;
      if (t >= T || n >= N) break;  // all threads
      boxes.begin(i);
      scale.tiles(sum, i * 4, 4 - none / 8);
      put_f32_box(boxes.box(i), sum, column / 8, none / 8);
      boxes.end(i, [&](const void* box) { tma_add_2d(h, box, n, t); });
    }
  }
};
template <class Shape>
struct AddFewTokens {
  static constexpr bool BIASED = false;
  using Early = Nothing;
  static constexpr int SLOTS = 0;
  float* h;
  int T, N;
  template <class Place>
  DEVICE void operator()(const typename Shape::Sums& sum, int p, int q, ScaleNothing, const Place&, const float*, Nothing) const {
    each_few<Shape>(sum, p, q, T, N, [&](int t, int n, float y) { atomicAdd(h + int64_t(t) * N + n, y); });
  }
};

// ---- c[t, n] = y, bf16 -----------------------------------------------------------------------------------------------------------
// Where the rows of c lie; passed by value. Row t is row t % part of map t / part: this rank's memory, or a peer's (allreduce_rows.cu). A part is whole
// boxes of 64 rows: a store that begins above the first row of a tensor is an illegal instruction.
struct RowOwners {
  TensorMap map[8];
  int32_t part;
};
template <class Shape>
struct StoreManyTokens {
  static constexpr bool BIASED = false;
  using Early = Nothing;
  static constexpr int SLOTS = 2, WIDTH = 64;
  const RowOwners& c;
  int T, N;
  template <class Scale>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, const Scale& scale, unsigned char* tray, const float*, Nothing) const {
    scale.tiles(sum, 0, Shape::BN / 8);
    const Boxes<Shape, SLOTS> boxes{tray};
    const int t = __shfl_sync(FULL_MASK, group_token(p), 0), owner = t / c.part;  // shuffled: so the map's address is known to be the warp's
#pragma unroll
    for (int i = 0; i < (Shape::BN + WIDTH - 1) / WIDTH; i++) {
      constexpr auto column = box_column<Shape::BN, WIDTH>;
      const int n = q * Shape::BN + column(i);
      if (t >= T || n >= N) break;
      boxes.begin(i);
      put_bf16_box(boxes.box(i), [&](int j, int half) {
        const int s = 4 * (column(i) / 8 + j) + 2 * half;
        return pack_bf16(sum[0][s], sum[0][s + 1]);
      });
      boxes.end(i, [&](const void* box) { tma_store_2d(c.map[owner], box, n, t - owner * c.part); });
    }
  }
};
template <class Shape>
struct StoreFewTokens {
  static constexpr bool BIASED = false;
  using Early = Nothing;
  static constexpr int SLOTS = 0;
  bf16* c;
  int T, N;
  template <class Place>
  DEVICE void operator()(const typename Shape::Sums& sum, int p, int q, ScaleNothing, const Place&, const float*, Nothing) const {
    each_few<Shape>(sum, p, q, T, N, [&](int t, int n, float y) { c[int64_t(t) * N + n] = __float2bfloat16_rn(y); });
  }
};

// ---- pairs: first and second of pair n, for token t (include/gemm_operand_sm90.cuh) --------------------------------------------------
// Few tokens: f(t, n, x, y) with one pair.
template <class Shape, class F>
DEVICE void each_pair_few(const typename Shape::Sums& sum, int p, int q, int T, int N, const F& f) {
  const FewAt<Shape> at(q);
#pragma unroll
  for (int s = 0; s < Shape::REGS; s++) {
    const int t = at.token(s), n = p * (GEMM_P / 2) + at.in_slab(s);
    if (t < T && n < N) f(t, n, sum[0][s], sum[1][s]);
  }
}

// ---- act[t, i] = silu(gate)·up, bf16: the pairs are gate and up ------------------------------------------------------------------------
template <class Shape>
struct SwigluManyTokens {
  static constexpr bool BIASED = false;
  using Early = Nothing;
  static constexpr int SLOTS = 1, WIDTH = 64;
  static constexpr int OUTPUTS = Shape::BN / 2;
  const TensorMap& act;
  int T, I;
  template <class Scale>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, const Scale& scale, unsigned char* tray, const float*, Nothing) const {
    scale.tiles(sum, 0, Shape::BN / 8);
    const Boxes<Shape, SLOTS> boxes{tray};
    const int t = group_token(p);
#pragma unroll
    for (int i = 0; i < (OUTPUTS + WIDTH - 1) / WIDTH; i++) {
      constexpr auto column = box_column<OUTPUTS, WIDTH>;
      const int n = q * OUTPUTS + column(i);
      if (t >= T || n >= I) break;
      boxes.begin(i);
      put_bf16_box(boxes.box(i), [&](int j, int half) {
        const int s = 4 * (column(i) / 8 + j) + 2 * half, s2 = s + Shape::BN / 4;
        return pack_bf16(swiglu(sum[0][s], sum[0][s2]), swiglu(sum[0][s + 1], sum[0][s2 + 1]));
      });
      boxes.end(i, [&](const void* box) { tma_store_2d(act, box, n, t); });
    }
  }
};
template <class Shape>
struct SwigluFewTokens {
  static constexpr bool BIASED = false;
  using Early = Nothing;
  static constexpr int SLOTS = 0;
  bf16* act;
  int T, I;
  template <class Place>
  DEVICE void operator()(const typename Shape::Sums& sum, int p, int q, ScaleNothing, const Place&, const float*, Nothing) const {
    each_pair_few<Shape>(sum, p, q, T, I, [&](int t, int n, float x, float y) {
      act[int64_t(t) * I + n] = __float2bfloat16_rn(swiglu(x, y));
    });
  }
};
