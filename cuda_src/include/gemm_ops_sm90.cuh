// gemm_ops_sm90.cuh - the prefill products of include/gemm_sm90.cuh for either weight type, as their entry points call them.
#pragma once
#include "gemm_cut_sm90.cuh"

DEVICE int tiles_of(int n, int tile) { return (n + tile - 1) / tile; }

// What all entry points take. K in elements. Scales: of the tokens, of the weights' rows, of up's rows; null for bf16.
struct GemmArgs {
  const TensorMap &x, &w, &y;  // y: the output, where it is copied in boxes
  float* partials;
  uint32_t* counters;
  const float *x_scale, *w_scale, *up_scale;
  int T, K, split_tiles, pieces, share_p;
  const uint8_t* exponents = nullptr;  // of tokens with a scale for each slice, in the place of x_scale
};

// What becomes of sums: scales, bias, then `out`. Many tokens: a thread's tokens' scales, and those of one or two outputs for its warpgroup, are
// requested before the tile's products.
template <class Product, class Shape, class Weights, class Out>
struct GemmFinish {
  const Scales& scales;
  const Weights& weights;
  const Out& out;
  static constexpr bool AHEAD = !Shape::FEW && (Product::SCALED || Out::BIASED);
  static constexpr int OUTPUTS = (Shape::BN + WARPGROUP - 1) / WARPGROUP;  // of a thread
  struct Ahead {
    float token[2], scale[OUTPUTS], bias[OUTPUTS];
    typename Out::Early early;
  };
  DEVICE int output(int i) const { return int(threadIdx.x) % WARPGROUP + i * WARPGROUP; }
  DEVICE GemmBlocks blocks() const { return {scales.exponents, scales.T, scales.slices}; }
  DEVICE Ahead begin(int p, int q) const {
    Ahead a{};
    if constexpr (Out::BIASED) a.early = out.early(p, q);
    if constexpr (AHEAD) {
      const ManyAt<Shape> at(p, q);
      if constexpr (Product::BLOCKS)
        a.token[0] = block_unit(blocks().last(at.token(0))), a.token[1] = block_unit(blocks().last(at.token(1)));
      else if constexpr (Product::SCALED)
        a.token[0] = scales.of_token(at.token(0)), a.token[1] = scales.of_token(at.token(1));
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) {
        const int c = output(i);
        if (c >= Shape::BN) break;
        const int row = weights.row(q, c / (Shape::BN / 2), c % (Shape::BN / 2));
        if constexpr (Product::SCALED) a.scale[i] = scales.of_row(row);
        if constexpr (Out::BIASED) a.bias[i] = row < scales.rows ? out.bias(row) : 0.f;
      }
    }
    return a;
  }
  template <class Place>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, Place& place, const Ahead& a, float* outputs) const {
    if constexpr (AHEAD) {
      meet_warpgroup();  // the last tile's have been read
#pragma unroll
      for (int i = 0; i < OUTPUTS; i++) {
        const int c = output(i);
        if (c >= Shape::BN) break;
        if constexpr (Product::SCALED) outputs[c] = a.scale[i];
        if constexpr (Out::BIASED) outputs[Shape::BN + c] = a.bias[i];
      }
      meet_warpgroup();
    }
    if constexpr (Product::SCALED && Shape::FEW) scale_few<Shape>(sum, scales, weights, p, q);
    if constexpr (Product::SCALED && !Shape::FEW)
      out(sum, p, q, ScaleMany<Shape>{outputs, a.token[0], a.token[1]}, place, outputs + Shape::BN, a.early);
    else
      out(sum, p, q, ScaleNothing(), place, outputs + Shape::BN, a.early);
  }
};

template <bool CUT, class... Args>
struct GemmEnd { using type = GemmFinish<Args...>; };
template <class... Args>
struct GemmEnd<true, Args...> { using type = GemmCutFinish<Args...>; };

// `rows` of weights.
template <class Product, class Shape, class Weights, class Out>
DEVICE void gemm_run(const GemmArgs& a, int rows, const Weights& weights, const Out& out) {
  const int p_rows = Shape::FEW ? rows : a.T, q_rows = Shape::FEW ? a.T : rows;
  const GemmPlan<Shape::CLUSTER> plan{tiles_of(p_rows, GEMM_P), tiles_of(q_rows, Shape::BN), tiles_of(a.K, Product::K), a.split_tiles, a.pieces,
                                      a.share_p != 0, Shape::CUT, a.partials, a.counters};
  const Scales scales{a.x_scale, a.w_scale, a.up_scale, a.T, rows, a.up_scale ? rows / 2 : rows, a.exponents, tiles_of(a.K, Product::K)};
  const typename GemmEnd<Shape::CUT, Product, Shape, Weights, Out>::type finish{scales, weights, out};
  if constexpr (Shape::FEW)
    gemm_sm90<Product, Shape, Out::SLOTS>(plan, weights, PlainOperand<Shape::BN>{a.x}, a.y, finish);
  else
    gemm_sm90<Product, Shape, Out::SLOTS>(plan, PlainOperand<GEMM_P>{a.x}, weights, a.y, finish);
}

template <class Product, class Shape, class Out>
DEVICE void gemm_plain(const GemmArgs& a, int rows, const Out& out) {
  gemm_run<Product, Shape>(a, rows, PlainOperand<Shape::FEW ? GEMM_P : Shape::BN>{a.w}, out);
}

template <class Product, class Shape>
DEVICE void gemm_add(const GemmArgs& a, float* h, int N) {
  if constexpr (Shape::CUT)
    gemm_plain<Product, Shape>(a, N, AddCutTile<Shape>{h, a.T, N});
  else if constexpr (Shape::FEW)
    gemm_plain<Product, Shape>(a, N, AddFewTokens<Shape>{h, a.T, N});
  else
    gemm_plain<Product, Shape>(a, N, AddManyTokens<Shape>{a.y, a.T, N});
}

template <class Product, class Shape>
DEVICE void gemm_store(const GemmArgs& a, bf16* c, const RowOwners& owners, int N) {
  if constexpr (Shape::CUT)
    gemm_plain<Product, Shape>(a, N, StoreCutTile<Shape>{c, a.T, N});
  else if constexpr (Shape::FEW)
    gemm_plain<Product, Shape>(a, N, StoreFewTokens<Shape>{c, a.T, N});
  else
    gemm_plain<Product, Shape>(a, N, StoreManyTokens<Shape>{owners, a.T, N});
}

// The weights: gate's rows, then up's.
template <class Product, class Shape>
DEVICE void gemm_swiglu(const GemmArgs& a, bf16* act, int I) {
  constexpr int ROWS = Shape::FEW ? GEMM_P : Shape::BN;
  const PairOperand<ROWS> weights(a.w, ROWS / 2, ROWS / 2, ROWS / 2, I);
  if constexpr (Shape::FEW)
    gemm_run<Product, Shape>(a, 2 * I, weights, SwigluFewTokens<Shape>{act, a.T, I});
  else
    gemm_run<Product, Shape>(a, 2 * I, weights, SwigluManyTokens<Shape>{a.y, a.T, I});
}

// The weights: heads; whole ones, or as HeadOperand mixes them, with the smaller boxes' map where others have the output's.
template <class Product, class Shape>
DEVICE void gemm_qkv(const GemmArgs& a, const QkvTarget& to) {
  constexpr int ROWS = Shape::FEW ? GEMM_P : Shape::BN;
  const int half = 1 << to.shift, rows = to.heads() * 2 * half;
  const PairOperand<ROWS> weights(a.w, half, half, 2 * half, half);
  if constexpr (Shape::CUT)
    gemm_run<Product, Shape>(a, rows, PlainOperand<ROWS>{a.w}, QkvCutTile<Shape>{to});  // a tile is a head
  else if constexpr (ROWS % 128 != 0)
    gemm_run<Product, Shape>(a, rows, HeadOperand<ROWS>{a.w, a.y}, QkvManyTokens<Shape>{to});
  else if constexpr (Shape::FEW)
    gemm_run<Product, Shape>(a, rows, weights, QkvFewTokens<Shape>{to});
  else
    gemm_run<Product, Shape>(a, rows, weights, QkvManyTokens<Shape>{to});
}
