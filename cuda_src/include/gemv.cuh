// gemv.cuh - one activation vector against a weight matrix, y = W·x, for one token: the kernel bodies that decode spends its life in.
//
// W is [N, K] row-major, bf16 or e4m3 (then with one fp32 scale per row, applied after the sum). A block owns a contiguous range of rows and
// sums them in fp32, each warp its share of K; the shares meet in shared memory once, at the end. How a block multiplies is its engine's
// matter: include/gemv_fma.cuh.
//
// Boundaries between kernels are short because little lies on the way from the previous kernel's end to this one's. The first weights, norm
// weights, scales and biases are requested before griddep_wait: they do not depend on the previous kernel. RMSNorm's scalar is applied
// after the sums, where its own sum is one more column: no barrier for it stands between the arrival of h and the first product. What the
// epilogue needs of earlier results is requested right after the wait.
//
// Nothing that a previous kernel writes may be declared const __restrict__: the compiler would read it through the read-only path, and
// may do so before griddep_wait. Two rows that an epilogue must see together (a rotation's pair, a gate and its up) are one unit; a
// block's range is a range of units.
//
// grid: any; the units are spread evenly. block: the engine's. dynamic shared memory: (warps·(rows + 1) + 2·rows)·4 bytes, rows of the block.
// bytes moved: N·K·sizeof(weight) once from HBM; x (2K or 4K bytes) once per block from L2.
// PRECOND  K % 8 == 0 (bf16) or K % 16 == 0 (e4m3): rows are whole 16-byte packs.  PRECOND  W, x 16-byte aligned.
#pragma once
#include "choose.cuh"
#include "gemv_sums.cuh"
#include "kv_cache.cuh"

// Plain x, residual add: h[n] += scale[n]·(W·x)[n]. O-projection and down-projection.
template <class Engine>
DEVICE void gemv_add(float* h, const bf16* x, const typename Engine::W::type* w, const float* scale, int N, int K, float* shared) {
  griddep_launch();
  const Share rows = block_share(N);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  const Sums sums{shared, rows.count};
  Engine engine;
  engine.request(at, rows.count, K);
  if (Engine::W::SCALED) stage(sums.constants(0), scale + rows.begin, rows.count);
  griddep_wait();
  const int j = threadIdx.x;
  h += rows.begin;
  const float old = j < rows.count ? h[j] : 0.f;
  engine.input(x, K);
  engine.multiply(sums, at, K, 0.f);
  const float* scales = sums.constants(0);
  if (j < rows.count) h[j] = old + (Engine::W::SCALED ? sums.total(j) * scales[j] : sums.total(j));
  for (int i = j + blockDim.x; i < rows.count; i += blockDim.x) h[i] += Engine::W::SCALED ? sums.total(i) * scales[i] : sums.total(i);
}

// One rank's share of a row-parallel product: y[n] = bf16(scale[n]·(W·x)[n]). The ranks' shares are summed by an all-reduce.
template <class Engine>
DEVICE void gemv_store(bf16* y, const bf16* x, const typename Engine::W::type* w, const float* scale, int N, int K, float* shared) {
  griddep_launch();
  const Share rows = block_share(N);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  const Sums sums{shared, rows.count};
  Engine engine;
  engine.request(at, rows.count, K);
  const float* scales = sums.constants(0);
  if (Engine::W::SCALED) stage(sums.constants(0), scale + rows.begin, rows.count);
  griddep_wait();
  engine.input(x, K);
  engine.multiply(sums, at, K, 0.f);
  for (int j = threadIdx.x; j < rows.count; j += blockDim.x)
    y[rows.begin + j] = __float2bfloat16_rn(Engine::W::SCALED ? sums.total(j) * scales[j] : sums.total(j));
}

// RMSNorm, then gate and up, then SwiGLU: act[i] = silu(gate_i·x)·(up_i·x).
template <class Engine>
DEVICE void gemv_swiglu(bf16* act, const float* h, const bf16* g, const typename Engine::W::type* w_gate, const float* s_gate,
                        const typename Engine::W::type* w_up, const float* s_up, int I, int K, float eps, float* shared) {
  griddep_launch();
  const Share units = block_share(I);
  const RowsGateUp<typename Engine::W::type> at{w_gate + int64_t(units.begin) * K, w_up + int64_t(units.begin) * K, K};
  const Sums sums{shared, 2 * units.count};
  Engine engine;
  engine.request(at, sums.rows, K);
  engine.norm_weight(g, K);
  float *gates = sums.constants(0), *ups = sums.constants(1);
  if (Engine::W::SCALED) stage(gates, s_gate + units.begin, units.count), stage(ups, s_up + units.begin, units.count);
  griddep_wait();
  const float ss = engine.normed(h, K);
  engine.multiply(sums, at, K, ss);
  const float inv = sums.inverse_rms(K, eps);
  for (int u = threadIdx.x; u < units.count; u += blockDim.x) {
    float gate = sums.total(2 * u) * inv, up = sums.total(2 * u + 1) * inv;
    if (Engine::W::SCALED) gate *= gates[u], up *= ups[u];
    act[units.begin + u] = __float2bfloat16_rn(gate / (1.f + expf(-gate)) * up);
  }
}

// RMSNorm, then Q, K and V with bias, RoPE on Q and K, K and V appended to the cache at the token's position.
template <class Engine>
DEVICE void gemv_qkv(bf16* q, const KvCache& cache, const float* h, const bf16* g, const typename Engine::W::type* w, const float* scale,
                     const float* bias, const float2* rope, const int32_t* pos_ptr, int H, int log_half, int K, float eps, float* shared) {
  griddep_launch();
  const int half = 1 << log_half, HD = 2 * half, KV = cache.KV;
  const Share units = block_share((H + 2 * KV) * half);
  const RowsRotary<typename Engine::W::type> at{w, K, units.begin, log_half};
  const Sums sums{shared, 2 * units.count};
  Engine engine;
  engine.request(at, sums.rows, K);
  engine.norm_weight(g, K);
  float *biases = sums.constants(0), *scales = sums.constants(1);
  for (int j = threadIdx.x; j < sums.rows; j += blockDim.x) {
    biases[j] = bias[at.index(j)];
    if (Engine::W::SCALED) scales[j] = scale[at.index(j)];
  }
  const int own = units.begin + int(threadIdx.x), own_slot = cache.slot((own >> log_half) - H, half, own % half);  // of this thread's first unit
  griddep_wait();
  const int pos = *pos_ptr;
  const float ss = engine.normed(h, K);
  const float2* angles = rope + int64_t(pos) * half;
  const float2 early = angles[own % half];
  engine.multiply(sums, at, K, ss);
  const float inv = sums.inverse_rms(K, eps);
  for (int u = threadIdx.x; u < units.count; u += blockDim.x) {
    const int p = units.begin + u, head = p >> log_half, d = p % half;
    float x = sums.total(2 * u) * inv, y = sums.total(2 * u + 1) * inv;
    if (Engine::W::SCALED) x *= scales[2 * u], y *= scales[2 * u + 1];
    x += biases[2 * u], y += biases[2 * u + 1];
    const float2 cs = head >= H + KV ? make_float2(1.f, 0.f) : u < int(blockDim.x) ? early : angles[d];  // {cos, sin}
    const float first = fmaf(x, cs.x, -y * cs.y), second = fmaf(y, cs.x, x * cs.y);
    if (head >= H) {
      cache.append(head - H, pos, half, d, first, second, u < int(blockDim.x) ? own_slot : cache.slot(head - H, half, d));
    } else {
      q[head * HD + d] = __float2bfloat16_rn(first);
      q[head * HD + d + half] = __float2bfloat16_rn(second);
    }
  }
}

// RMSNorm, then the LM head: logits[v] fp32.
template <class Engine>
DEVICE void gemv_logits(float* logits, const float* h, const bf16* g, const typename Engine::W::type* w, int V, int K, float eps, float* shared) {
  griddep_launch();
  const Share rows = block_share(V);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  const Sums sums{shared, rows.count};
  Engine engine;
  engine.request(at, rows.count, K);
  engine.norm_weight(g, K);
  griddep_wait();
  const float ss = engine.normed(h, K);
  engine.multiply(sums, at, K, ss);
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
  const Sums sums{shared, rows.count};
  SHARED(ChoiceShared, sh);
  Engine engine;
  engine.request(at, rows.count, K);
  engine.norm_weight(g, K);
  griddep_wait();
  const SampleParams p = *params;
  const uint32_t position = uint32_t(state->pos) + 1;
  const float ss = engine.normed(h, K);
  engine.multiply(sums, at, K, ss);
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
