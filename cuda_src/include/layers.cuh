// layers.cuh - all layers of one token's step in one launch: the body of layers_bf16.cu and layers_fp8.cu.
//
// A layer is norm + QKV + bias + RoPE + append · attention · O + residual · norm + gate/up + SwiGLU · down + residual, as in the launches of
// include/gemv.cuh and attn_decode.cu. Here a block keeps its multiprocessor from the first layer to the last: it owns the same share of rows
// of every product, and the barrier between two of them (include/grid_sync.cuh) stops nothing but the arithmetic. The weights come through
// one ring (include/weight_ring.cuh) that does not know of barriers: while the blocks wait for each other, and while they attend, HBM goes on
// to fill it with what comes next.
//
// grid: at most one block a multiprocessor, all resident; block: the consumers' warps and one that fetches. dynamic shared memory: the ring's
// stages, 2·MOST_STAGES barriers of 8 bytes, and scratch for a product's sums or attention's partials.
// bytes moved: the layers' weights once; activations from L2, once a block.
#pragma once
#include "attn_split.cuh"
#include "gemv_epilogue.cuh"
#include "grid_sync.cuh"
#include "weight_ring.cuh"

// One layer, as addresses; an array of these lies in device memory.
struct LayerAddresses {
  uint64_t norm1, qkv, qkv_scale, qkv_bias, o, o_scale, norm2, gate, gate_scale, up, up_scale, down, down_scale, k_cache, v_cache, unused;
};
template <class T>
DEVICE const T* address(uint64_t a) {
  return reinterpret_cast<const T*>(a);
}

struct LayersShape {
  int32_t L, D, H, KV, log_half, I, max_len;
  int32_t stage_bytes, stages, each_d, each_o, each_i;  // of the ring; rows of a stage, of D, H·HD and I weights
  float eps, scale_log2;
};
struct LayersState {
  float* h;               // [D] residual stream, in place
  bf16 *q, *attn, *act;   // [H, HD], [H, HD], [I]
  float* part;            // attention's partials, include/attn_split.cuh
  uint32_t* counters;
  const float2* rope;     // [max_len, HD/2] {cos, sin}
  int pos;
};

constexpr int BARRIERS = 5;  // a layer

template <class W, int CD, int CI, int HD>
struct Layers {
  using T = typename W::type;
  using Wide = Team<W, CD>;  // rows of D or H·HD weights
  using Long = Team<W, CI>;  // rows of I weights

  const LayerAddresses* layers;
  const LayersShape& s;
  LayersState st;
  GridSync sync;
  WeightRing ring;
  float* scratch;            // sums of a product, or attention's
  Share qkv, hidden, inner;  // this block's units of QKV, rows of O and down, units of gate and up

  DEVICE WeightRows of_qkv() const { return {2 * qkv.count, s.D * int(sizeof(T)), s.each_d}; }
  DEVICE WeightRows of_o() const { return {hidden.count, s.H * HD * int(sizeof(T)), s.each_o}; }
  DEVICE WeightRows of_gate_up() const { return {2 * inner.count, s.D * int(sizeof(T)), s.each_d}; }
  DEVICE WeightRows of_down() const { return {hidden.count, s.I * int(sizeof(T)), s.each_i}; }
  DEVICE RowsRotary<T> qkv_rows(const LayerAddresses& a) const { return {address<T>(a.qkv), s.D, qkv.begin, s.log_half}; }

  // The producer warp: every weight of every layer, in the order of their use.
  DEVICE void fetch() {
    for (int l = 0; l < s.L; l++) {
      const LayerAddresses a = layers[l];
      const int HHD = s.H * HD;
      const int64_t from = int64_t(inner.begin) * s.D;
      ring_produce(ring, qkv_rows(a), of_qkv());
      ring_produce(ring, RowsPlain<T>{address<T>(a.o) + int64_t(hidden.begin) * HHD, HHD}, of_o());
      ring_produce(ring, RowsGateUp<T>{address<T>(a.gate) + from, address<T>(a.up) + from, s.D}, of_gate_up());
      ring_produce(ring, RowsPlain<T>{address<T>(a.down) + int64_t(hidden.begin) * s.I, s.I}, of_down());
    }
  }

  // sums of RMSNorm(h)·rows without its scalar, which is in the last column.
  DEVICE void normed(const bf16* g, const WeightRows& p, const Sums& sums) {
    const Wide team(s.D, sync.threads);
    XBf16<W, CD> weight;
    XFloat<W, CD> x;
    fetch_x(weight, g, s.D, team.lane);
    sync.wait();
    const float ss = fetch_weighted(x, st.h, weight, s.D, team.lane);
    ring_multiply(ring, p, team, x, sums, ss);
    sync.block();
  }

  DEVICE void do_qkv(const LayerAddresses& a) {
    const Sums sums{scratch, 2 * qkv.count, Wide::warps(s.D)};
    const RowsRotary<T> rows = qkv_rows(a);
    const float *bias = address<float>(a.qkv_bias), *scale = address<float>(a.qkv_scale);
    const int half = 1 << s.log_half, u0 = threadIdx.x;
    const float2* angles = st.rope + int64_t(st.pos) * half;
    // What this thread's first unit needs besides its sums arrives while they are made.
    float early[4] = {0.f, 0.f, 1.f, 1.f};
    if (u0 < qkv.count) {
      const int i = rows.index(2 * u0), k = rows.index(2 * u0 + 1);
      early[0] = bias[i], early[1] = bias[k];
      if (W::SCALED) early[2] = scale[i], early[3] = scale[k];
    }
    const float2 early_cs = angles[(qkv.begin + u0) % half];
    normed(address<bf16>(a.norm1), of_qkv(), sums);
    const float inv = sums.inverse_rms(s.D, s.eps);
    const QkvOut out{st.q, const_cast<bf16*>(address<bf16>(a.k_cache)), const_cast<bf16*>(address<bf16>(a.v_cache)),
                     s.H,  s.KV, s.log_half, s.max_len, st.pos};
    for (int u = u0; u < qkv.count; u += sync.threads) {
      const bool is_early = u == u0;
      const int i = rows.index(2 * u), k = rows.index(2 * u + 1);
      float x = sums.total(2 * u) * inv, y = sums.total(2 * u + 1) * inv;
      if (W::SCALED) x *= is_early ? early[2] : scale[i], y *= is_early ? early[3] : scale[k];
      x += is_early ? early[0] : bias[i], y += is_early ? early[1] : bias[k];
      const float2 cs = !out.rotates(qkv.begin + u) ? make_float2(1.f, 0.f) : is_early ? early_cs : angles[(qkv.begin + u) % half];
      out.store(qkv.begin + u, x, y, cs);
    }
    sync.arrive();
  }

  // h[n] += W·x for this block's rows n, x bf16 [K].
  template <class T_>
  DEVICE void add(const bf16* x_in, int K, const float* scale, const WeightRows& p) {
    const T_ team(K, sync.threads);
    const Sums sums{scratch, hidden.count, T_::warps(K)};
    const int j0 = threadIdx.x;
    const float early = W::SCALED && j0 < hidden.count ? scale[hidden.begin + j0] : 1.f;
    XBf16<W, T_::C> x;
    sync.wait();
    fetch_x(x, x_in, K, team.lane);
    float* h = st.h + hidden.begin;
    const float old = j0 < hidden.count ? h[j0] : 0.f;
    ring_multiply(ring, p, team, x, sums, 0.f);
    sync.block();
    if (j0 < hidden.count) h[j0] = old + sums.total(j0) * early;
    for (int j = j0 + sync.threads; j < hidden.count; j += sync.threads) h[j] += sums.total(j) * (W::SCALED ? scale[hidden.begin + j] : 1.f);
    sync.arrive();
  }

  DEVICE void gate_up(const LayerAddresses& a) {
    const Sums sums{scratch, 2 * inner.count, Wide::warps(s.D)};
    const float *s_gate = address<float>(a.gate_scale) + inner.begin, *s_up = address<float>(a.up_scale) + inner.begin;
    const int u0 = threadIdx.x;
    float early[2] = {1.f, 1.f};
    if (W::SCALED && u0 < inner.count) early[0] = s_gate[u0], early[1] = s_up[u0];
    normed(address<bf16>(a.norm2), of_gate_up(), sums);
    const float inv = sums.inverse_rms(s.D, s.eps);
    for (int u = u0; u < inner.count; u += sync.threads) {
      float gate = sums.total(2 * u) * inv, up = sums.total(2 * u + 1) * inv;
      if (W::SCALED) gate *= u == u0 ? early[0] : s_gate[u], up *= u == u0 ? early[1] : s_up[u];
      st.act[inner.begin + u] = swiglu(gate, up);
    }
    sync.arrive();
  }

  DEVICE void attend(const LayerAddresses& a) {
    sync.wait();
    const int tiles = attn_tiles(s.H, s.KV), splits = max(1, int(gridDim.x) / tiles);
    for (int tile = blockIdx.x / splits; tile < tiles; tile += max(1, int(gridDim.x) / splits))
      attn_split<HD>(scratch, st.attn, st.q, address<bf16>(a.k_cache), address<bf16>(a.v_cache), st.part, st.counters, st.pos, s.H, s.KV,
                     s.max_len, s.scale_log2, blockIdx.x % splits, splits, tile, sync.threads);
    sync.arrive();
  }

  DEVICE void compute(const int32_t* pos) {
    griddep_wait();
    st.pos = *pos;
    for (int l = 0; l < s.L; l++) {
      const LayerAddresses a = layers[l];
      do_qkv(a);
      attend(a);
      add<Wide>(st.attn, s.H * HD, address<float>(a.o_scale), of_o());
      gate_up(a);
      add<Long>(st.act, s.I, address<float>(a.down_scale), of_down());
    }
  }
};

template <class Body>
DEVICE void layers_run(const LayersState& state, const int32_t* pos, uint32_t* arrivals, const uint64_t* layers, const LayersShape& s,
                       const PollLimit& limit, unsigned char* shared) {
  griddep_launch();
  const int consumers = int(blockDim.x) - WARP;
  uint64_t* bars = reinterpret_cast<uint64_t*>(shared + s.stages * s.stage_bytes);
  Body body{reinterpret_cast<const LayerAddresses*>(layers),
            s,
            state,
            {arrivals, 0, uint32_t(BARRIERS * s.L), limit, consumers},
            {shared, bars, bars + MOST_STAGES, s.stage_bytes, s.stages},
            reinterpret_cast<float*>(bars + 2 * MOST_STAGES),
            block_share((s.H + 2 * s.KV) << s.log_half),
            block_share(s.D),
            block_share(s.I)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < s.stages; i++) mbarrier_init(body.ring.full + i, 1), mbarrier_init(body.ring.empty + i, consumers / WARP);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (int(threadIdx.x) < consumers)
    body.compute(pos);
  else
    body.fetch();
}
