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
#include "gemv_diagonal.cuh"
#include "gemv_fma.cuh"

constexpr int VALUES = 8;  // sums of a warp that are reduced together: of so many rows of W times rows of the pass

// This block's rows of the pass.
struct PassRows {
  int first, count;
};
DEVICE PassRows pass_rows(int M, int group) {
  const int first = int(blockIdx.y) * group;
  return {first, min(group, M - first)};
}

// Sums of each of them, one behind the other; of `chunk` rows of W.
template <class Sum>
struct PassSums {
  float* part;
  int chunk;
  DEVICE Sum of(int m) const { return Sum{part + m * (chunk + 1) * Sum::WIDTH, chunk}; }
};

// Where a block's threads keep x: PACKS of 16 bytes a row, a thread's own next to its neighbours'.
template <int PACKS>
struct PassInput {
  uint4* first;  // this thread's
  DEVICE uint4* at(int m, int q) const { return first + (m * PACKS + q) * int(blockDim.x); }
  static DEVICE PassInput in(unsigned char* memory) { return {reinterpret_cast<uint4*>(memory) + threadIdx.x}; }
  static DEVICE float* behind(unsigned char* memory, int group) {
    return reinterpret_cast<float*>(memory + 16 * group * PACKS * int(blockDim.x));
  }
};

// What takes the place of Q rows in flight, P at once, pack by pack as the last rows of the pass consume them.
template <int P, int Q, class InFlight>
struct Refill {
  decltype(InFlight::pairs) pairs[Q / P];
  bool more[Q / P];
  DEVICE Refill(InFlight& flight, bool last) {
#pragma unroll
    for (int q = 0; q < Q / P; q++) {
      more[q] = last && flight.pairs.more();
      if (more[q]) flight.pairs.advance();
      pairs[q] = flight.pairs;
    }
  }
  DEVICE void load(InFlight& flight, int r, int c) const {
#pragma unroll
    for (int q = 0; q < Q / P; q++) {
      if (!more[q]) continue;
      flight.packs[r + P * q][c] = ld_once_v4(pairs[q].a + flight.at[c]);
      if (P == 2) flight.packs[r + P * q + P - 1][c] = ld_once_v4(pairs[q].b() + flight.at[c]);
    }
  }
};

DEVICE void unpack_half(float (&f)[4], uint4 v, int half) {
  const uint32_t a = half ? v.z : v.x, b = half ? v.w : v.y;
  f[0] = bf16_lo(a), f[1] = bf16_hi(a), f[2] = bf16_lo(b), f[3] = bf16_hi(b);
}

template <class W_, int C, int R, bool NORMED, int WARPS>
struct EachFma : Fma<W_, C, R, NORMED, WARPS> {
  using One = Fma<W_, C, R, NORMED, WARPS>;
  using Sum = typename One::Sum;
  using One::flight;
  using One::weighted;
  static constexpr int PACKS = NORMED ? 2 * C : C, BATCH = C < 4 ? 4 / C : 1;
  // Rows of W that a value of x is loaded for, rows of the pass beside.
  static constexpr int P = Flight<W_, C, R>::AT_ONCE, Q = C == 1 && R > 4 ? 4 : P, EACH = P == 1 ? VALUES / 2 : VALUES / Q, V = EACH * Q;
  using Input = PassInput<PACKS>;
  Input x;

  // After griddep_wait: x bf16 [count, K].
  DEVICE void inputs(int count, int K) {
#pragma unroll 1
    for (int m0 = 0; m0 < count; m0 += BATCH) {
      XBf16<W_, C> raw[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        flight.fetch(raw[b]);
        flight.template further<bf16>(m0 + b + 1 < count ? K : 0);
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++)
#pragma unroll
        for (int c = 0; c < C; c++)
          if (m0 + b < count) *x.at(m0 + b, c) = flight.there[c] ? raw[b].v[c][0] : make_uint4(0, 0, 0, 0);
    }
  }
  // h·weight, h fp32 [count, K], and each row's Σ h².
  DEVICE void normed(const PassSums<Sum>& sums, int count, int K) {
#pragma unroll 1
    for (int m0 = 0; m0 < count; m0 += BATCH) {
      float raw[BATCH][C][8];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        flight.fetch(raw[b]);
        flight.template further<float>(m0 + b + 1 < count ? K : 0);
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        if (m0 + b >= count) break;
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
          for (int i = 0; i < 8; i++) weighted[c][i] = raw[b][c][i];
        const float square_sum = warp_sum(One::weigh());
        if (threadIdx.x % WARP == 0) sums.of(m0 + b).put(sums.chunk, square_sum);
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
          for (int q = 0; q < 2; q++) {
            const float* f = &weighted[c][4 * q];
            *reinterpret_cast<float4*>(x.at(m0 + b, 2 * c + q)) = make_float4(f[0], f[1], f[2], f[3]);
          }
      }
    }
  }
  // Half of what this thread has of row m.
  DEVICE void input(float (&f)[4], int m, int c, int half) const {
    if (NORMED) {
      const float4 v = *reinterpret_cast<const float4*>(x.at(m, (NORMED ? 2 : 1) * c + half));
      f[0] = v.x, f[1] = v.y, f[2] = v.z, f[3] = v.w;
    } else {
      const uint2 v = reinterpret_cast<const uint2*>(x.at(m, c))[half];
      f[0] = bf16_lo(v.x), f[1] = bf16_hi(v.x), f[2] = bf16_lo(v.y), f[3] = bf16_hi(v.y);
    }
  }
  // The next `rows` rows of W for all rows of the pass. Ends with the block's barrier.
  DEVICE void multiply(const PassSums<Sum>& sums, int rows, int count) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int j0 = 0; j0 < rows; j0 += R)
#pragma unroll
      for (int r = 0; r < R; r += Q) {
#pragma unroll 1
        for (int m0 = 0; m0 < count && j0 + r < rows; m0 += EACH) {
          float s[EACH][Q][2] = {};
          Refill<P, Q, Flight<W_, C, R>> refill(flight, m0 + EACH >= count);
#pragma unroll
          for (int c = 0; c < C; c++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
              float w[Q][4];
#pragma unroll
              for (int q = 0; q < Q; q++) unpack_half(w[q], flight.packs[r + q][c], half);
              if (half) refill.load(flight, r, c);
#pragma unroll
              for (int m = 0; m < EACH; m++) {
                float f[4];
                input(f, min(m0 + m, count - 1), c, half);
#pragma unroll
                for (int q = 0; q < Q; q++)
#pragma unroll
                  for (int i = 0; i < 4; i++) s[m][q][i % 2] = fmaf(w[q][i], f[i], s[m][q][i % 2]);
              }
            }
          }
          float flat[V];
#pragma unroll
          for (int v = 0; v < V; v++) flat[v] = s[v / Q][v % Q][0] + s[v / Q][v % Q][1];
          const float sum = reduce_rows<V>(flat);
          const int v = lane / (WARP / V), m = m0 + v / Q, j = j0 + r + v % Q;
          if (lane % (WARP / V) == 0 && m < count && j < rows) sums.of(m).put(j, sum);
        }
      }
    __syncthreads();
  }
};

template <class W_, int C, int R, bool NORMED, int WARPS>
struct EachDiagonal : Diagonal<W_, C, R, NORMED, WARPS> {
  using One = Diagonal<W_, C, R, NORMED, WARPS>;
  using Sum = typename One::Sum;
  using One::flight;
  static constexpr int PARTS = One::PARTS, STEPS = W_::STEPS, TOGETHER = 2 / PARTS;  // steps whose x is in a pack
  static constexpr int PACKS = C * STEPS / TOGETHER, BATCH = C < 2 ? 2 / C : 1;
  static constexpr int P = 2, Q = C == 1 && R > 4 ? 4 : P, EACH = VALUES / Q;
  using Input = PassInput<PACKS>;
  Input x;

  // One::x of row m.
  DEVICE void keep(int m) const {
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
      for (int i = 0; i < STEPS; i += TOGETHER) {
        const auto& first = One::x[c][i][0];
        const auto& second = One::x[c][i + TOGETHER - 1][PARTS - 1];
        *x.at(m, (c * STEPS + i) / TOGETHER) = make_uint4(first[0], first[1], second[0], second[1]);
      }
  }
  DEVICE void inputs(int count, int K) {
#pragma unroll 1
    for (int m0 = 0; m0 < count; m0 += BATCH) {
      XBf16<W_, C> raw[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        flight.fetch(raw[b]);
        flight.template further<bf16>(m0 + b + 1 < count ? K : 0);
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        if (m0 + b >= count) break;
        One::take(raw[b]);
        keep(m0 + b);
      }
    }
  }
  DEVICE void normed(const PassSums<Sum>& sums, int count, int K) {
#pragma unroll 1
    for (int m0 = 0; m0 < count; m0 += BATCH) {
      float raw[BATCH][C][W_::PACK];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        flight.fetch(raw[b]);
        flight.template further<float>(m0 + b + 1 < count ? K : 0);
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        if (m0 + b >= count) break;
        const float square_sum = warp_sum(One::weigh(raw[b]));
        if (threadIdx.x % WARP == 0) sums.of(m0 + b).put(sums.chunk, square_sum);
        keep(m0 + b);
      }
    }
  }
  // The next `rows` rows of W for all rows of the pass. Ends with the block's barrier.
  DEVICE void multiply(const PassSums<Sum>& sums, int rows, int count) {
    const DiagonalLane lane;
#pragma unroll 1
    for (int j0 = 0; j0 < rows; j0 += R)
#pragma unroll
      for (int r = 0; r < R; r += Q) {
#pragma unroll 1
        for (int m0 = 0; m0 < count && j0 + r < rows; m0 += EACH) {
          float sum[EACH][Q / 2][PARTS][4] = {};
          Refill<P, Q, Flight<W_, C, R>> refill(flight, m0 + EACH >= count);
#pragma unroll
          for (int c = 0; c < C; c++) {
            uint4 w[Q];
#pragma unroll
            for (int q = 0; q < Q; q++) w[q] = flight.packs[r + q][c];
            refill.load(flight, r, c);
#pragma unroll
            for (int i = 0; i < STEPS; i += TOGETHER) {
              uint32_t a[Q / 2][TOGETHER][4];
#pragma unroll
              for (int q = 0; q < Q / 2; q++)
#pragma unroll
                for (int t = 0; t < TOGETHER; t++) W_::operand(a[q][t], w[2 * q], w[2 * q + 1], i + t);
#pragma unroll
              for (int m = 0; m < EACH; m++) {
                const uint4 f = *x.at(min(m0 + m, count - 1), (c * STEPS + i) / TOGETHER);
                const uint32_t first[2] = {f.x, f.y}, second[2] = {f.z, f.w};
#pragma unroll
                for (int q = 0; q < Q / 2; q++) {
                  W_::mma(sum[m][q][0], a[q][0], first);
                  W_::mma(sum[m][q][PARTS - 1], a[q][TOGETHER - 1], second);
                }
              }
            }
          }
          float flat[VALUES];
#pragma unroll
          for (int m = 0; m < EACH; m++)
#pragma unroll
            for (int q = 0; q < Q; q++) {
              const auto diagonal = [&](int p) { return lane.odd ? sum[m][q / 2][p][2 * (q % 2) + 1] : sum[m][q / 2][p][2 * (q % 2)]; };
              flat[Q * m + q] = NORMED ? fmaf(diagonal(PARTS - 1), W_::LOW, diagonal(0)) : diagonal(0);
            }
          const float total = reduce_diagonal<VALUES>(flat, lane);
          const int m = m0 + lane.g / Q, j = j0 + r + lane.g % Q;
          if (lane.holds && m < count && j < rows) sums.of(m).put(j, total * (NORMED ? 1.f / W_::X_SCALE : 1.f / W_::PLAIN_SCALE));
        }
      }
    __syncthreads();
  }
};

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
