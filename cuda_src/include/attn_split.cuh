// attn_split.cuh - a block's part of one token's attention: some keys of one KV head, merged by the last block to arrive.
#pragma once
#include "attn.cuh"

DEVICE int attn_tiles(int H, int KV) { return KV * ((H / KV + ATTN_ROWS - 1) / ATTN_ROWS); }

constexpr int ATTN_WARPS = 8;
constexpr int MIN_SPLIT = ATTN_WARPS * ATTN_KEYS;  // a shorter split would leave warps idle
constexpr int GATHER = 8;                     // partials in flight a thread while splits are merged

// The warps' states side by side in shared memory, rows as [HD] with their maximum and sum.
template <int HD>
struct BlockPartial {
  float o[ATTN_WARPS][ATTN_ROWS][HD];
  float m[ATTN_WARPS][ATTN_ROWS], l[ATTN_WARPS][ATTN_ROWS];
};

template <int HD>
DEVICE void publish(BlockPartial<HD>& sh, const AttnState<HD>& st) {
  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = g + 8 * r;
    const float l = attn_row_sum(st.l[r]);
    if (t == 0) sh.m[warp][row] = st.m[r], sh.l[warp][row] = l;
#pragma unroll
    for (int j = 0; j < HD / 64; j++)
#pragma unroll
      for (int e = 0; e < 8; e++) {
        sh.o[warp][row][64 * j + 16 * t + e] = st.o[8 * j + e][2 * r];
        sh.o[warp][row][64 * j + 16 * t + 8 + e] = st.o[8 * j + e][2 * r + 1];
      }
  }
}

// A sum of partials that are relative to different maxima: o = Σ 2^(m_i - m)·o_i, l likewise, m = max m_i. Four dimensions a thread.
struct Merge {
  float4 o;
  float m, l;
};
DEVICE void merge(Merge& a, float4 o, float m, float l) {
  const float top = fmaxf(a.m, m), base = top == NEG_INF ? 0.f : top, fa = ex2_approx(a.m - base), fb = ex2_approx(m - base);
  a.o = make_float4(fmaf(fb, o.x, fa * a.o.x), fmaf(fb, o.y, fa * a.o.y), fmaf(fb, o.z, fa * a.o.z), fmaf(fb, o.w, fa * a.o.w));
  a.l = fmaf(fb, l, fa * a.l);
  a.m = top;
}

template <int HD>
DEVICE void attn_split(float* scratch, bf16* out, const bf16* q, const bf16* k_cache, const bf16* v_cache, float* part, uint32_t* counters,
                       int pos, int H, int KV, int max_len, float scale_log2, int split, int most_splits, int tile, int threads) {
  BlockPartial<HD>& sh = *reinterpret_cast<BlockPartial<HD>*>(scratch);
  uint32_t& arrived = *reinterpret_cast<uint32_t*>(scratch + ATTN_WARPS * ATTN_ROWS * (HD + 2));
  const int G = H / KV, tiles = (G + ATTN_ROWS - 1) / ATTN_ROWS;
  const int kv = tile / tiles, first = (tile % tiles) * ATTN_ROWS, rows = min(ATTN_ROWS, G - first);
  const int len = pos + 1;
  // Keys a split, in whole steps of the block; splits in use.
  const int chunk = ((len + most_splits - 1) / most_splits + MIN_SPLIT - 1) / MIN_SPLIT * MIN_SPLIT;
  const int splits = (len + chunk - 1) / chunk;
  if (split >= splits) return;

  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
  const bf16* qh = q + (kv * G + first) * HD;
  uint32_t qf[HD / 16][4];
  attn_load_q<HD>(qf, g < rows ? qh + g * HD : nullptr, g + 8 < rows ? qh + (g + 8) * HD : nullptr);
  const bf16 *k = k_cache + int64_t(kv) * max_len * HD, *v = v_cache + int64_t(kv) * max_len * HD;
  const int begin = split * chunk, end = min(len, begin + chunk), limit[2] = {end, end};
  if (warp < ATTN_WARPS) {
    AttnState<HD> st;
    attn_init<HD>(st);
    for (int k0 = begin + warp * ATTN_KEYS; k0 < end; k0 += ATTN_WARPS * ATTN_KEYS) attn_step<HD>(st, qf, k, v, k0, end - 1, limit, scale_log2);
    publish<HD>(sh, st);
  }
  named_barrier(1, threads);

  // The block's partial, {o[HD], m, l, unused} a row: a thread merges the warps for four dimensions of a row.
  constexpr int PART_ROW = HD + 4, QUADS = HD / 4;
  bf16* dst = out + (kv * G + first) * HD;
  float* mine = part + (int64_t(tile) * most_splits + split) * ATTN_ROWS * PART_ROW;
  for (int i = threadIdx.x; i < rows * QUADS; i += threads) {
    const int row = i / QUADS, d = i % QUADS * 4;
    Merge a = {make_float4(0.f, 0.f, 0.f, 0.f), NEG_INF, 0.f};
#pragma unroll
    for (int w = 0; w < ATTN_WARPS; w++) merge(a, *reinterpret_cast<const float4*>(&sh.o[w][row][d]), sh.m[w][row], sh.l[w][row]);
    if (splits == 1) {
      *reinterpret_cast<uint2*>(dst + row * HD + d) = make_uint2(pack_bf16(a.o.x / a.l, a.o.y / a.l), pack_bf16(a.o.z / a.l, a.o.w / a.l));
      continue;
    }
    *reinterpret_cast<float4*>(mine + row * PART_ROW + d) = a.o;
    if (d == 0) *reinterpret_cast<float2*>(mine + row * PART_ROW + HD) = make_float2(a.m, a.l);
  }
  if (splits == 1) return;

  // Last block to arrive: the barrier orders the block's stores before thread 0's acq_rel increment, that one before the readers'.
  named_barrier(1, threads);
  if (threadIdx.x == 0) arrived = atom_inc_acq_rel_gpu(counters + tile, splits - 1);
  named_barrier(1, threads);
  if (int(arrived) != splits - 1) return;
  const float* all = part + int64_t(tile) * most_splits * ATTN_ROWS * PART_ROW;
  for (int i = threadIdx.x; i < rows * QUADS; i += threads) {
    const int row = i / QUADS, d = i % QUADS * 4;
    Merge a = {make_float4(0.f, 0.f, 0.f, 0.f), NEG_INF, 0.f};
    for (int s0 = 0; s0 < splits; s0 += GATHER) {
      float4 o[GATHER];
      float2 ml[GATHER];
#pragma unroll
      for (int s = 0; s < GATHER; s++) {
        const float* p = all + (min(s0 + s, splits - 1) * ATTN_ROWS + row) * PART_ROW;
        o[s] = *reinterpret_cast<const float4*>(p + d);
        ml[s] = *reinterpret_cast<const float2*>(p + HD);
      }
#pragma unroll
      for (int s = 0; s < GATHER; s++)
        if (s0 + s < splits) merge(a, o[s], ml[s].x, ml[s].y);
    }
    *reinterpret_cast<uint2*>(dst + row * HD + d) = make_uint2(pack_bf16(a.o.x / a.l, a.o.y / a.l), pack_bf16(a.o.z / a.l, a.o.w / a.l));
  }
}
