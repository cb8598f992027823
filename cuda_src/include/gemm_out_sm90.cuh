// gemm_out_sm90.cuh - what becomes of a tile's sums (include/gemm_sm90.cuh): added to the residual stream, stored, SwiGLU, Q and K and V.
//
// With many tokens consumer thread 128 + 32·warp + 4g + t holds, in sum[0][4j + 2i] and the next, columns 8j + 2t and the next (outputs) of
// the tile's row 16·warp + g + 8i (a token). With few, in sum[slab][4j + 2i] and the next, columns 8j + 2t and the next (tokens) of its
// warpgroup's half, of row 64·slab + 16·(warp % 4) + g + 8i (an output).
#pragma once
#include "gemm_sm90.cuh"
#include "kv_cache.cuh"

// The tokens and outputs of a consumer thread's sums.
template <class Shape>
struct ManyAt {
  int token0, output0;
  DEVICE ManyAt(int p, int q)
      : token0(p * GEMM_P + (int(threadIdx.x) - WARPGROUP) / WARP * 16 + int(threadIdx.x) % WARP / 4),
        output0(q * Shape::BN + int(threadIdx.x) % 4 * 2) {}
  DEVICE int token(int i) const { return token0 + 8 * i; }
  DEVICE int output(int j) const { return output0 + 8 * j; }
};
template <class Shape>
struct FewAt {
  int token0, row;  // row: of a slab
  DEVICE explicit FewAt(int q)
      : token0(q * Shape::BN + (int(threadIdx.x) / WARPGROUP - 1) * (Shape::BN / 2) + int(threadIdx.x) % 4 * 2),
        row(int(threadIdx.x) % WARPGROUP / WARP * 16 + int(threadIdx.x) % WARP / 4) {}
  DEVICE int token(int s) const { return token0 + s / 4 * 8 + s % 2; }  // of sum s
  DEVICE int in_slab(int s) const { return row + s / 2 % 2 * 8; }
};

// e4m3: every sum times its token's scale and its output's, that of the weights' row. `weights`: the operand, which knows the rows of a tile.
struct Scales {
  const float *token, *low, *high;
  int T, rows, half;  // rows from `half` on have theirs in `high`
  DEVICE float of_token(int t) const { return t < T ? token[t] : 0.f; }
  DEVICE const float* at(int n) const { return n < half ? low + n : high + (n - half); }
  DEVICE float of_row(int n) const { return n < rows ? *at(n) : 0.f; }
};
// tiles(sum, j, n): column tiles j … j + n - 1. Few at a time where the sums are about to be used: the compiler would keep all scales in registers.
template <class Shape>
struct ScaleMany {
  Scales s;
  float t0, t1;
  int first[2];  // the weights' rows of each half of the tile: they lie in one unit
  template <class Weights>
  DEVICE ScaleMany(const Scales& scales, const Weights& weights, int p, int q) : s(scales), first{weights.row(q, 0, 0), weights.row(q, 1, 0)} {
    const ManyAt<Shape> at(p, q);
    t0 = s.of_token(at.token(0)), t1 = s.of_token(at.token(1));
  }
  DEVICE void tiles(typename Shape::Sums& sum, int j0, int n) const {
#pragma unroll
    for (int j = j0; j < j0 + n; j++) {
      const int row = first[j / (Shape::BN / 16)] + j % (Shape::BN / 16) * 8 + int(threadIdx.x) % 4 * 2;
      const float2 o = row < s.rows ? ld_global_f2(s.at(row)) : make_float2(0.f, 0.f);
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

// ---- h[t, n] += y, fp32 ---------------------------------------------------------------------------------------------------------
template <class Shape>
struct AddManyTokens {
  float* h;
  int T, N;
  template <class Scale>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, const Scale& scale) const {
    const ManyAt<Shape> at(p, q);
#pragma unroll
    for (int j0 = 0; j0 < Shape::BN / 8; j0 += 4) {
      scale.tiles(sum, j0, 4);
#pragma unroll
      for (int j = j0; j < j0 + 4; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int t = at.token(i), n = at.output(j);
          if (t < T && n < N) red_add_f32x2(h + int64_t(t) * N + n, sum[0][4 * j + 2 * i], sum[0][4 * j + 2 * i + 1]);
        }
    }
  }
};
template <class Shape>
struct AddFewTokens {
  float* h;
  int T, N;
  DEVICE void operator()(const typename Shape::Sums& sum, int p, int q, ScaleNothing) const {
    each_few<Shape>(sum, p, q, T, N, [&](int t, int n, float y) { atomicAdd(h + int64_t(t) * N + n, y); });
  }
};

// ---- c[t, n] = y, bf16 -----------------------------------------------------------------------------------------------------------
template <class Shape>
struct StoreManyTokens {
  bf16* c;
  int T, N;
  template <class Scale>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, const Scale& scale) const {
    scale.tiles(sum, 0, Shape::BN / 8);
    const ManyAt<Shape> at(p, q);
#pragma unroll
    for (int j = 0; j < Shape::BN / 8; j += 4)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int t = at.token(i);
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) w[k] = pack_bf16(sum[0][4 * (j + k) + 2 * i], sum[0][4 * (j + k) + 2 * i + 1]);
        const uint4 pack = quad_transpose(w);
        const int n = q * Shape::BN + 8 * (j + int(threadIdx.x) % 4);
        if (t < T && n < N) *reinterpret_cast<uint4*>(c + int64_t(t) * N + n) = pack;
      }
  }
};
template <class Shape>
struct StoreFewTokens {
  bf16* c;
  int T, N;
  DEVICE void operator()(const typename Shape::Sums& sum, int p, int q, ScaleNothing) const {
    each_few<Shape>(sum, p, q, T, N, [&](int t, int n, float y) { c[int64_t(t) * N + n] = __float2bfloat16_rn(y); });
  }
};

// ---- pairs: first and second of pair n, for token t (include/gemm_operand_sm90.cuh) --------------------------------------------------
// Many tokens: firsts and seconds are APART columns from each other, in blocks of 2·APART. f(t, n, x, y) turns the sums of pairs n and n + 1
// into what becomes of their firsts and seconds, as words; lane t of a quad then has eight neighbours of each, which put(inside, t, n, firsts,
// seconds) stores after a transposition. T tokens, N pairs.
template <class Shape, int APART, class F, class Put>
DEVICE void each_pair_many(const typename Shape::Sums& sum, int p, int q, int T, int N, const F& f, const Put& put) {
  const int token0 = ManyAt<Shape>(p, q).token0, lane = int(threadIdx.x) % 4;
#pragma unroll
  for (int j = 0; j < Shape::BN / 16; j += 4)  // column tiles of firsts
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = token0 + 8 * i, n0 = q * (Shape::BN / 2) + 8 * j, first = j + j / (APART / 8) * (APART / 8);
      uint32_t firsts[4] = {0, 0, 0, 0}, seconds[4] = {0, 0, 0, 0};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int n = n0 + 8 * k + 2 * lane, s = 4 * (first + k) + 2 * i, s2 = s + APART / 2;
        const float x[2] = {sum[0][s], sum[0][s + 1]}, y[2] = {sum[0][s2], sum[0][s2 + 1]};
        if (t < T && n < N) f(t, n, x, y, firsts[k], seconds[k]);
      }
      put(t < T && n0 + 8 * lane < N, t, n0 + 8 * lane, firsts, seconds);
    }
}
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
  bf16* act;
  int T, I;
  template <class Scale>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, const Scale& scale) const {
    scale.tiles(sum, 0, Shape::BN / 8);
    each_pair_many<Shape, Shape::BN / 2>(
        sum, p, q, T, I,
        [&](int, int, const float(&x)[2], const float(&y)[2], uint32_t& word, uint32_t&) {
          word = pack_bf16(swiglu(x[0], y[0]), swiglu(x[1], y[1]));
        },
        [&](bool inside, int t, int n, const uint32_t(&words)[4], const uint32_t(&)[4]) {
          const uint4 pack = quad_transpose(words);
          if (inside) *reinterpret_cast<uint4*>(act + int64_t(t) * I + n) = pack;
        });
  }
};
template <class Shape>
struct SwigluFewTokens {
  bf16* act;
  int T, I;
  DEVICE void operator()(const typename Shape::Sums& sum, int p, int q, ScaleNothing) const {
    each_pair_few<Shape>(sum, p, q, T, I, [&](int t, int n, float x, float y) {
      act[int64_t(t) * I + n] = __float2bfloat16_rn(swiglu(x, y));
    });
  }
};

// ---- q, k, v with bias and RoPE; k and v into the cache: the pairs are dimensions d and d + HD/2 of a head -------------------------------
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
};
template <class Shape>
struct QkvManyTokens {
  QkvTarget to;
  template <class Scale>
  DEVICE void operator()(typename Shape::Sums& sum, int p, int q, const Scale& scale) const {
    scale.tiles(sum, 0, Shape::BN / 8);
    if (to.shift == 6)
      store<64>(sum, p, q);
    else
      store<32>(sum, p, q);
  }
  template <int HALF>
  DEVICE void store(const typename Shape::Sums& sum, int p, int q) const {
    each_pair_many<Shape, HALF>(
        sum, p, q, to.tokens(), to.heads() * HALF,
        [&](int t, int n, const float(&x)[2], const float(&y)[2], uint32_t& first, uint32_t& second) {
          const int head = n / HALF, d = n % HALF, c = 2 * HALF * head + d;
          const float4 cs = to.turns(head) ? ld_global_f4(to.rope + int64_t(to.span[0] + t) * HALF + d) : make_float4(1.f, 0.f, 1.f, 0.f);
          const float2 b0 = *reinterpret_cast<const float2*>(to.bias + c), b1 = *reinterpret_cast<const float2*>(to.bias + c + HALF);
          const float x0 = x[0] + b0.x, x1 = x[1] + b0.y, y0 = y[0] + b1.x, y1 = y[1] + b1.y;
          first = pack_bf16(fmaf(x0, cs.x, -y0 * cs.y), fmaf(x1, cs.z, -y1 * cs.w));
          second = pack_bf16(fmaf(y0, cs.x, x0 * cs.y), fmaf(y1, cs.z, x1 * cs.w));
        },
        [&](bool inside, int t, int n, const uint32_t(&firsts)[4], const uint32_t(&seconds)[4]) {
          const uint4 first = quad_transpose(firsts), second = quad_transpose(seconds);
          if (!inside) return;
          const int head = n / HALF;
          if (head >= to.H) return to.cache.append8(head - to.H, to.span[0] + t, HALF, n % HALF, first, second);
          bf16* out = to.row(head, t) + n % HALF;
          *reinterpret_cast<uint4*>(out) = first;
          *reinterpret_cast<uint4*>(out + HALF) = second;
        });
  }
};
template <class Shape>
struct QkvFewTokens {
  QkvTarget to;
  DEVICE void operator()(const typename Shape::Sums& sum, int p, int q, ScaleNothing) const {
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
