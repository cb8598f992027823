// gemv_each.cuh - the products of include/gemv.cuh for the M rows of a speculative pass, each row with the bits that it has alone.
//
// The arithmetic of a row is that of its engine (include/gemv_fma.cuh, include/gemv_diagonal.cuh): the same threads hold the same stretches of x, sum
// them in the same order, and warps meet in the same order. Only the weights are shared: a pack is read once and multiplied for all rows of the block.
// So it is exact where include/gemv_rows.cuh, which gives tensor cores whole tiles of rows, is not, and multiplies more slowly than that.
//
// x of the rows lies in shared memory as the engine takes it, each thread's part where that thread alone reads it back: no barrier. A pack of weights
// makes room for the next as soon as the last rows of the pass take it. A block has sums of `chunk` rows of W at a time, then its epilogue runs.
//
// grid: (blocks that share the rows of W, groups of `group` rows of the pass); block: as of the product for one token. dynamic shared memory:
// group·(PACKS·threads·16 + (chunk + 1)·WIDTH·4), chunk a multiple of 8. bytes moved: N·K·sizeof(weight) a group, all but the first from L2
// where they are resident together; x once a block.
// PRECOND  those of include/gemv.cuh; M <= 16. PRECOND  rows of x, h, out follow each other without gaps; row m's position is *pos + m.
#pragma once
#include "exchange.cuh"
#include "gemv.cuh"
#include "gemv_each_diagonal.cuh"
#include "gemv_each_fma.cuh"

// f(m, j) for every row m of the pass and unit j of the chunk.
template <class F>
DEVICE void each_unit(int count, int units, const F& f) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count * units; i += blockDim.x) {
    const int m = int(unsigned(i) / unsigned(units));
    f(m, i - m * units);
  }
}

// A launch's rows of the pass: M in groups of `group`; `chunk`: rows of W at a time.
struct PassShape {
  int M, group, chunk;
};

// The block's `rows` rows of W, PER to a unit, a chunk after another; finish(sums, first unit, units) is its epilogue.
template <int PER, class Engine, class Finish>
DEVICE void each_chunk(Engine& engine, const PassSums<typename Engine::Sum>& sums, int rows, int count, const Finish& finish) {
#pragma unroll 1
  for (int j = 0; j < rows; j += sums.chunk) {
    const int n = min(sums.chunk, rows - j);
    if (j) __syncthreads();
    engine.multiply(sums, n, count);
    finish(sums, j / PER, n / PER);
  }
}

// x bf16 [M, K] through the block's rows of W: what the row-parallel products have in common. finish(sums, rows, pass)
template <class Engine, class Finish>
DEVICE void each_plain(const bf16* x, const typename Engine::W::type* w, int N, int K, const PassShape& shape, unsigned char* memory,
                       const Finish& finish) {
  griddep_launch();
  const PassRows pass = pass_rows(shape.M, shape.group);
  const Share rows = block_share(N);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  Engine engine;
  engine.x = Engine::Input::in(memory);
  const PassSums<typename Engine::Sum> sums{Engine::Input::behind(memory, shape.group), shape.chunk};
  engine.request(at, rows.count, K);
  engine.wait(x + int64_t(pass.first) * K, K);
  engine.inputs(pass.count, K);
  each_chunk<1>(engine, sums, rows.count, pass.count, [&](const PassSums<typename Engine::Sum>& sums, int first, int n) {
    finish(sums, Share{rows.begin + first, n}, pass);
  });
}

// h[m] += W·x[m].
template <class Engine>
DEVICE void each_add(float* h, const bf16* x, const typename Engine::W::type* w, const float* scale, int N, int K, const PassShape& shape,
                     unsigned char* memory) {
  each_plain<Engine>(x, w, N, K, shape, memory, [&](const PassSums<typename Engine::Sum>& sums, const Share& rows, const PassRows& pass) {
    each_unit(pass.count, rows.count, [&](int m, int j) {
      float* out = h + int64_t(pass.first + m) * N + rows.begin + j;
      const float old = *out;
      *out = old + sums.of(m).total(j) * scale_of<Engine>(scale, rows.begin + j);
    });
  });
}

// y[m] = W·x[m] as bf16.
template <class Engine>
DEVICE void each_store(bf16* y, const bf16* x, const typename Engine::W::type* w, const float* scale, int N, int K, const PassShape& shape,
                       unsigned char* memory) {
  each_plain<Engine>(x, w, N, K, shape, memory, [&](const PassSums<typename Engine::Sum>& sums, const Share& rows, const PassRows& pass) {
    each_unit(pass.count, rows.count, [&](int m, int j) {
      y[int64_t(pass.first + m) * N + rows.begin + j] = __float2bfloat16_rn(sums.of(m).total(j) * scale_of<Engine>(scale, rows.begin + j));
    });
  });
}

// h[m] += Σ over ranks of W·x[m]: include/exchange.cuh, whose D here is that of all rows together. A thread pushes all its shares, then waits.
template <class Engine>
DEVICE void each_exchange(float* h, const Exchange& end, int sum, const bf16* x, const typename Engine::W::type* w, const float* scale, int N, int K,
                          const PassShape& shape, unsigned char* memory) {
  each_plain<Engine>(x, w, N, K, shape, memory, [&](const PassSums<typename Engine::Sum>& sums, const Share& rows, const PassRows& pass) {
    const auto place = [&](int m, int j) { return (pass.first + m) * N + rows.begin + j; };
    const auto share = [&](int m, int j) { return sanitise(__float_as_uint(sums.of(m).total(j) * scale_of<Engine>(scale, rows.begin + j))); };
    each_unit(pass.count, rows.count, [&](int m, int j) {
      const uint32_t bits = share(m, j);
#pragma unroll 1
      for (int r = 0; r < end.world; r++)
        if (r != end.rank) st_volatile_u32(end.slot(r, sum, end.rank, place(m, j)), bits);
    });
    Watch watch = watch_start(end.limit);
    each_unit(pass.count, rows.count, [&](int m, int j) {
      const int row = place(m, j);
      const float old = h[row];
      float total = 0.f;
#pragma unroll 1
      for (int r = 0; r < end.world; r++) {
        uint32_t v = share(m, j);
        if (r != end.rank) {
          uint32_t* slot = end.slot(end.rank, sum, r, row);
          while ((v = ld_volatile_u32(slot)) == SENTINEL) watch_poll(watch, end.rank, r, uint32_t(sum) + 1);
          st_volatile_u32(slot, SENTINEL);
        }
        total += __uint_as_float(v);
      }
      h[row] = old + total;
    });
  });
}

// h f32 [M, K], normalised, through the block's rows, PER to a unit: what the other products have in common. finish(m, sums of row m, unit)
template <int PER, class Engine, class Rows, class Finish>
DEVICE void each_normed(const Rows& at, int rows, const float* h, const bf16* g, int K, const PassRows& pass, const PassShape& shape,
                        unsigned char* memory, const Finish& finish) {
  using Sum = typename Engine::Sum;
  Engine engine;
  engine.x = Engine::Input::in(memory);
  const PassSums<Sum> sums{Engine::Input::behind(memory, shape.group), shape.chunk};
  engine.norm_weight(g, K);
  engine.request(at, rows, K);
  engine.wait(h + int64_t(pass.first) * K, K);
  engine.normed(sums, pass.count, K);
  each_chunk<PER>(engine, sums, rows, pass.count, [&](const PassSums<Sum>& sums, int first, int n) {
    each_unit(pass.count, n, [&](int m, int u) { finish(m, sums.of(m), u, first + u); });
  });
}

// act[m, i] = silu(gate_i·x)·(up_i·x).
template <class Engine>
DEVICE void each_swiglu(bf16* act, const float* h, const bf16* g, const typename Engine::W::type* w_gate, const float* s_gate,
                        const typename Engine::W::type* w_up, const float* s_up, int I, int K, float eps, const PassShape& shape,
                        unsigned char* memory) {
  griddep_launch();
  const PassRows pass = pass_rows(shape.M, shape.group);
  const Share units = block_share(I);
  const RowsGateUp<typename Engine::W::type> at{w_gate + int64_t(units.begin) * K, w_up + int64_t(units.begin) * K, K};
  each_normed<2, Engine>(at, 2 * units.count, h, g, K, pass, shape, memory, [&](int m, const typename Engine::Sum& sums, int j, int u) {
    const float gate_scale = scale_of<Engine>(s_gate, units.begin + u), up_scale = scale_of<Engine>(s_up, units.begin + u);
    const float inv = sums.inverse_rms(K, eps), gate = sums.total(2 * j) * inv * gate_scale, up = sums.total(2 * j + 1) * inv * up_scale;
    act[int64_t(pass.first + m) * I + units.begin + u] = __float2bfloat16_rn(gate * rcp_approx(1.f + ex2_approx(-LOG2_E * gate)) * up);
  });
}

// q[m], and the keys and values of position *pos + m.
template <class Engine>
DEVICE void each_qkv(bf16* q, const KvCache& cache, const float* h, const bf16* g, const typename Engine::W::type* w, const float* scale,
                     const float* bias, const float2* rope, const int32_t* pos_ptr, int H, int log_half, int K, float eps, const PassShape& shape,
                     unsigned char* memory) {
  griddep_launch();
  const PassRows pass = pass_rows(shape.M, shape.group);
  const int half = 1 << log_half, HD = 2 * half, KV = cache.KV, pos = *pos_ptr + pass.first;
  const Share units = block_share((H + 2 * KV) * half);
  const RowsRotary<typename Engine::W::type> at{w, K, units.begin, log_half};
  each_normed<2, Engine>(at, 2 * units.count, h, g, K, pass, shape, memory, [&](int m, const typename Engine::Sum& sums, int j, int u) {
    const int i0 = at.index(2 * u), i1 = at.index(2 * u + 1), p = units.begin + u, head = p >> log_half, d = p & (half - 1);
    const float2 angle = head < H + KV ? ld_global_f2(rope + int64_t(pos + m) * half + d) : make_float2(1.f, 0.f);
    const float inv = sums.inverse_rms(K, eps);
    const float x = fmaf(sums.total(2 * j) * inv, scale_of<Engine>(scale, i0), bias[i0]);
    const float y = fmaf(sums.total(2 * j + 1) * inv, scale_of<Engine>(scale, i1), bias[i1]);
    const float a = fmaf(x, angle.x, -y * angle.y), b = fmaf(y, angle.x, x * angle.y);
    if (head < H) {
      bf16* out = q + (int64_t(pass.first + m) * H + head) * HD + d;
      out[0] = __float2bfloat16_rn(a), out[half] = __float2bfloat16_rn(b);
    } else {
      cache.append(head - H, pos + m, half, d, a, b, cache.slot(head - H, half, d));
    }
  });
}

// logits[m, v] fp32.
template <class Engine>
DEVICE void each_logits(float* logits, const float* h, const bf16* g, const typename Engine::W::type* w, int V, int K, float eps, const PassShape& shape,
                        unsigned char* memory) {
  griddep_launch();
  const PassRows pass = pass_rows(shape.M, shape.group);
  const Share rows = block_share(V);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  each_normed<1, Engine>(at, rows.count, h, g, K, pass, shape, memory, [&](int m, const typename Engine::Sum& sums, int j, int v) {
    const float inv = sums.inverse_rms(K, eps);
    logits[int64_t(pass.first + m) * V + rows.begin + v] = sums.total(j) * inv;
  });
}
