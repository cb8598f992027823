// gemv.cuh - one activation vector against a weight matrix, y = W·x, for one token: the kernel bodies that decode spends its life in.
//
// W is [N, K] row-major, bf16 or e4m3 (then with one fp32 scale per row, applied after the sum). A block owns a contiguous range of rows and
// sums them in fp32, each warp its share of K; the shares meet in shared memory once, at the end. How a block multiplies is its engine's
// matter: include/gemv_fma.cuh, include/gemv_diagonal.cuh.
//
// Boundaries between kernels are short because little lies on the way from the previous kernel's end to this one's. Norm weights, the first
// weights, scales and biases are requested before griddep_wait: they do not depend on the previous kernel. The norm weights come first, as
// loads come back in the order in which they were asked for. RMSNorm's scalar is applied
// after the sums, where its own sum is one more row: no barrier for it stands between the arrival of h and the first product. What the
// epilogue needs of earlier results is requested right after the wait. A thread's first scales and biases stay in registers, and epilogues are
// short and without loops over warps: what is executed once is fetched as it goes.
//
// Nothing that a previous kernel writes may be declared const __restrict__: the compiler would read it through the read-only path, and
// may do so before griddep_wait. Two rows that an epilogue must see together (a rotation's pair, a gate and its up) are one unit; a
// block's range is a range of units.
//
// grid: up to a block a unit; the units are spread evenly. block: the engine's. dynamic shared memory: that of Sums.
// bytes moved: N·K·sizeof(weight) once from HBM; x (2K or 4K bytes) once per block from L2.
// PRECOND  K % 8 == 0 (bf16) or K % 16 == 0 (e4m3): rows are whole 16-byte packs.  PRECOND  W, x 16-byte aligned.
// PRECOND  gemv_qkv: pos was written before the last ordinary (not dependent) launch of the stream; it is read before griddep_wait.
#pragma once
#include "choose.cuh"
#include "gemv_sums.cuh"
#include "kv_cache.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

// Plain x, residual add: h[n] += scale[n]·(W·x)[n]. O-projection and down-projection.
template <class Engine>
DEVICE void gemv_add(float* h, const bf16* x, const typename Engine::W::type* w, const float* scale, int N, int K, float* shared) {
  griddep_launch();
  const Share rows = block_share(N);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  const typename Engine::Sum sums{shared, rows.count};
  Engine engine;
  engine.request(at, rows.count, K);
  const int j = threadIdx.x;
  const float first = j < rows.count ? scale_of<Engine>(scale, rows.begin + j) : 0.f;
  engine.wait(x, K);
  engine.input();
  h += rows.begin;
  const float old = j < rows.count ? h[j] : 0.f;
  engine.multiply(sums, 0.f);
  if (j < rows.count) h[j] = old + sums.total(j) * first;
#pragma unroll 1
  for (int i = j + blockDim.x; i < rows.count; i += blockDim.x) h[i] += sums.total(i) * scale_of<Engine>(scale, rows.begin + i);
}

// One rank's share of a row-parallel product: y[n] = bf16(scale[n]·(W·x)[n]). The ranks' shares are summed by an all-reduce.
template <class Engine>
DEVICE void gemv_store(bf16* y, const bf16* x, const typename Engine::W::type* w, const float* scale, int N, int K, float* shared) {
  griddep_launch();
  const Share rows = block_share(N);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  const typename Engine::Sum sums{shared, rows.count};
  Engine engine;
  engine.request(at, rows.count, K);
  const int j = threadIdx.x;
  const float first = j < rows.count ? scale_of<Engine>(scale, rows.begin + j) : 0.f;
  engine.wait(x, K);
  engine.input();
  engine.multiply(sums, 0.f);
  if (j < rows.count) y[rows.begin + j] = __float2bfloat16_rn(sums.total(j) * first);
#pragma unroll 1
  for (int i = j + blockDim.x; i < rows.count; i += blockDim.x)
    y[rows.begin + i] = __float2bfloat16_rn(sums.total(i) * scale_of<Engine>(scale, rows.begin + i));
}

// RMSNorm, then gate and up, then SwiGLU: act[i] = silu(gate_i·x)·(up_i·x).
template <class Engine>
DEVICE void gemv_swiglu(bf16* act, const float* h, const bf16* g, const typename Engine::W::type* w_gate, const float* s_gate,
                        const typename Engine::W::type* w_up, const float* s_up, int I, int K, float eps, float* shared) {
  griddep_launch();
  const Share units = block_share(I);
  const RowsGateUp<typename Engine::W::type> at{w_gate + int64_t(units.begin) * K, w_up + int64_t(units.begin) * K, K};
  const typename Engine::Sum sums{shared, 2 * units.count};
  Engine engine;
  engine.norm_weight(g, K);
  engine.request(at, sums.rows, K);
  const int j = threadIdx.x;
  const bool has = j < units.count;
  const float gate_scale = has ? scale_of<Engine>(s_gate, units.begin + j) : 0.f, up_scale = has ? scale_of<Engine>(s_up, units.begin + j) : 0.f;
  engine.wait(h, K);
  const float ss = engine.normed();
  engine.multiply(sums, ss);
  const auto finish = [&](int u, float gate_scale, float up_scale) {
    const float inv = sums.inverse_rms(K, eps), gate = sums.total(2 * u) * inv * gate_scale, up = sums.total(2 * u + 1) * inv * up_scale;
    act[units.begin + u] = __float2bfloat16_rn(gate * rcp_approx(1.f + ex2_approx(-LOG2_E * gate)) * up);
  };
  if (has) finish(j, gate_scale, up_scale);
#pragma unroll 1
  for (int u = j + blockDim.x; u < units.count; u += blockDim.x)
    finish(u, scale_of<Engine>(s_gate, units.begin + u), scale_of<Engine>(s_up, units.begin + u));
}

// What the rotation of one unit needs besides its sums.
struct Rotation {
  float scale[2], bias[2];
  float2 angle;  // {cos, sin}
  int slot;      // in an e4m3 cache
};

// RMSNorm, then Q, K and V with bias, RoPE on Q and K, K and V appended to the cache at the token's position.
template <class Engine>
DEVICE void gemv_qkv(bf16* q, const KvCache& cache, const float* h, const bf16* g, const typename Engine::W::type* w, const float* scale,
                     const float* bias, const float2* rope, const int32_t* pos_ptr, int H, int log_half, int K, float eps, float* shared) {
  griddep_launch();
  const int half = 1 << log_half, HD = 2 * half, KV = cache.KV;
  const Share units = block_share((H + 2 * KV) * half);
  const RowsRotary<typename Engine::W::type> at{w, K, units.begin, log_half};
  const typename Engine::Sum sums{shared, 2 * units.count};
  Engine engine;
  const int pos = *pos_ptr, j = threadIdx.x, rotated = (H + KV) * half;
  engine.norm_weight(g, K);
  engine.request(at, sums.rows, K);
  // All but the angle is known before the wait; pos would have to be waited for.
  const auto turn_of = [&](int u) {
    const int i0 = at.index(2 * u), i1 = at.index(2 * u + 1), p = units.begin + u;
    return Rotation{{scale_of<Engine>(scale, i0), scale_of<Engine>(scale, i1)}, {bias[i0], bias[i1]}, make_float2(1.f, 0.f),
                cache.slot((p >> log_half) - H, half, p & (half - 1))};
  };
  Rotation first = turn_of(min(j, units.count - 1));
  engine.wait(h, K);
  const float ss = engine.normed();
  const float2* angles = rope + int64_t(pos) * half;
  const auto turn = [&](Rotation& t, int p) {
    if (p < rotated) t.angle = ld_global_f2(angles + (p & (half - 1)));
  };
  turn(first, units.begin + min(j, units.count - 1));
  engine.multiply(sums, ss);
  const auto finish = [&](int u, const Rotation& t) {
    const int p = units.begin + u, head = p >> log_half, d = p & (half - 1);
    const float inv = sums.inverse_rms(K, eps);
    const float x = fmaf(sums.total(2 * u) * inv, t.scale[0], t.bias[0]), y = fmaf(sums.total(2 * u + 1) * inv, t.scale[1], t.bias[1]);
    const float a = fmaf(x, t.angle.x, -y * t.angle.y), b = fmaf(y, t.angle.x, x * t.angle.y);
    if (head < H)
      q[head * HD + d] = __float2bfloat16_rn(a), q[head * HD + d + half] = __float2bfloat16_rn(b);
    else
      cache.append(head - H, pos, half, d, a, b, t.slot);
  };
  if (j < units.count) finish(j, first);
#pragma unroll 1
  for (int u = j + blockDim.x; u < units.count; u += blockDim.x) {
    Rotation t = turn_of(u);
    turn(t, units.begin + u);
    finish(u, t);
  }
}

// RMSNorm, then the LM head: logits[v] fp32.
template <class Engine>
DEVICE void gemv_logits(float* logits, const float* h, const bf16* g, const typename Engine::W::type* w, int V, int K, float eps, float* shared) {
  griddep_launch();
  const Share rows = block_share(V);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  const typename Engine::Sum sums{shared, rows.count};
  Engine engine;
  engine.norm_weight(g, K);
  engine.request(at, rows.count, K);
  engine.wait(h, K);
  const float ss = engine.normed();
  engine.multiply(sums, ss);
  const float inv = sums.inverse_rms(K, eps);
  for (int j = threadIdx.x; j < rows.count; j += blockDim.x) logits[rows.begin + j] = sums.total(j) * inv;
}

// RMSNorm, then the LM head, then the choice among its rows (choose.cuh): what gemv_logits and sample_f32 do, in one launch.
template <class Engine>
DEVICE void gemv_choose(float* logits, const float* h, const bf16* g, const typename Engine::W::type* w, int V, int K, float eps,
                        DecodeState* state, const SampleParams* params, uint64_t* best, uint32_t* counter, uint64_t* ring, int slots, float* shared) {
  griddep_launch();
  const Share rows = block_share(V);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  const typename Engine::Sum sums{shared, rows.count};
  SHARED(ChoiceShared, sh);
  Engine engine;
  engine.norm_weight(g, K);
  engine.request(at, rows.count, K);
  engine.wait(h, K);
  const float ss = engine.normed();
  const SampleParams p = *params;
  const uint32_t position = uint32_t(state->pos) + 1;
  engine.multiply(sums, ss);
  const float inv = sums.inverse_rms(K, eps);
  uint64_t rank = 0;
  uint32_t hash = 0;
  for (int j = threadIdx.x; j < rows.count; j += blockDim.x) {
    const float x = sums.total(j) * inv;
    const int v = rows.begin + j;
    logits[v] = x;
    if (v < p.text_vocab) consider(rank, hash, x, uint32_t(v), p, position);
  }
  if (best_of_grid(rank, hash, best, counter, sh) && threadIdx.x == 0) commit(state, ring, slots, rank, hash);
}
