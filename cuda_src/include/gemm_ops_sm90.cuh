// gemm_ops_sm90.cuh - the prefill products of include/gemm_sm90.cuh for either weight type, as their entry points call them.
#pragma once
#include "gemm_out_sm90.cuh"

DEVICE int tiles_of(int n, int tile) { return (n + tile - 1) / tile; }

// What all entry points take. K in elements. Scales: of the tokens, of the weights' rows, of up's rows; null for bf16.
struct GemmArgs {
  const TensorMap &x, &w;
  float* partials;
  uint32_t* counters;
  const float *x_scale, *w_scale, *up_scale;
  int T, K, split_tiles, pieces;
};

// `rows` of weights.
template <class Product, class Shape, class Weights, class Out>
DEVICE void gemm_run(const GemmArgs& a, int rows, const Weights& weights, const Out& out) {
  const int p_rows = Shape::FEW ? rows : a.T, q_rows = Shape::FEW ? a.T : rows;
  const GemmPlan plan{tiles_of(p_rows, GEMM_P), tiles_of(q_rows, Shape::BN), tiles_of(a.K, Product::K), a.split_tiles, a.pieces,
                      a.partials, a.counters};
  const Scales scales{a.x_scale, a.w_scale, a.up_scale, a.T, rows, a.up_scale ? rows / 2 : rows};
  const auto finish = [&](typename Shape::Sums& sum, int p, int q) {
    if constexpr (!Product::SCALED) {
      out(sum, p, q, ScaleNothing());
    } else if constexpr (Shape::FEW) {
      scale_few<Shape>(sum, scales, weights, p, q);
      out(sum, p, q, ScaleNothing());
    } else {
      out(sum, p, q, ScaleMany<Shape>(scales, weights, p, q));
    }
  };
  if constexpr (Shape::FEW)
    gemm_sm90<Product, Shape>(plan, weights, PlainOperand<Shape::BN>{a.x}, finish);
  else
    gemm_sm90<Product, Shape>(plan, PlainOperand<GEMM_P>{a.x}, weights, finish);
}

template <class Product, class Shape, class Out>
DEVICE void gemm_plain(const GemmArgs& a, int rows, const Out& out) {
  gemm_run<Product, Shape>(a, rows, PlainOperand<Shape::FEW ? GEMM_P : Shape::BN>{a.w}, out);
}

template <class Product, class Shape>
DEVICE void gemm_add(const GemmArgs& a, float* h, int N) {
  if constexpr (Shape::FEW)
    gemm_plain<Product, Shape>(a, N, AddFewTokens<Shape>{h, a.T, N});
  else
    gemm_plain<Product, Shape>(a, N, AddManyTokens<Shape>{h, a.T, N});
}

template <class Product, class Shape>
DEVICE void gemm_store(const GemmArgs& a, bf16* c, int N) {
  if constexpr (Shape::FEW)
    gemm_plain<Product, Shape>(a, N, StoreFewTokens<Shape>{c, a.T, N});
  else
    gemm_plain<Product, Shape>(a, N, StoreManyTokens<Shape>{c, a.T, N});
}

// The weights: gate's rows, then up's.
template <class Product, class Shape>
DEVICE void gemm_swiglu(const GemmArgs& a, bf16* act, int I) {
  constexpr int ROWS = Shape::FEW ? GEMM_P : Shape::BN;
  const PairOperand<ROWS> weights{a.w, ROWS / 2, ROWS / 2, I};
  if constexpr (Shape::FEW)
    gemm_run<Product, Shape>(a, 2 * I, weights, SwigluFewTokens<Shape>{act, a.T, I});
  else
    gemm_run<Product, Shape>(a, 2 * I, weights, SwigluManyTokens<Shape>{act, a.T, I});
}

// The weights: whole heads.
template <class Product, class Shape>
DEVICE void gemm_qkv(const GemmArgs& a, const QkvTarget& to) {
  const int half = 1 << to.shift, rows = to.heads() * 2 * half;
  if constexpr (Shape::FEW)
    gemm_run<Product, Shape>(a, rows, PairOperand<GEMM_P>{a.w, half, 2 * half, half}, QkvFewTokens<Shape>{to});
  else
    gemm_plain<Product, Shape>(a, rows, QkvManyTokens<Shape>{to});
}
