// attn_decode.cu - attention of one new token to its KV cache (split-KV flash decoding), GQA-packed, in one launch.
//
//   out[h] = Σ_k softmax_k(q[h]·K[h/G, k] / √HD)·V[h/G, k],   k = 0 … pos,   G = H/KV
//
// A block takes up to 16 query heads that share a KV head (a group larger than 16 takes several blocks) and one split of the keys; its
// warps take every eighth step of 16 keys. K and V are read once for the whole group. The number of splits in use follows the length in
// device memory, so that one captured graph serves every length: blocks past it leave at once. Each block leaves its partial output in
// `part`; the last one to arrive merges them (the counter wraps to zero by itself).
//
// grid: (splits, KV·ceil(G/16)); block: 256; dynamic shared memory: 8·16·(HD + 2)·4. bytes moved: 2·KV·(pos + 1)·HD·2.
// PRECOND  HD 64 or 128 (by kernel name); H % KV == 0; q, caches 16-byte aligned; counters zero before the first launch.
// PRECOND  part holds gridDim.y·gridDim.x·16·(HD + 4) floats, 16-byte aligned. minimum arch: sm_80
#include "include/attn.cuh"

constexpr int WARPS = 8;
constexpr int MIN_SPLIT = WARPS * ATTN_KEYS;  // a shorter split would leave warps idle
constexpr int GATHER = 8;                     // partials in flight a thread while splits are merged

// The warps' states side by side in shared memory, rows as [HD] with their maximum and sum.
template <int HD>
struct BlockPartial {
  float o[WARPS][ATTN_ROWS][HD];
  float m[WARPS][ATTN_ROWS], l[WARPS][ATTN_ROWS];
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
DEVICE void attn_decode(bf16* out, const bf16* q, const bf16* k_cache, const bf16* v_cache, float* part, uint32_t* counters,
                        const int32_t* pos_ptr, int H, int KV, int max_len, float scale_log2) {
  DYN_SHARED(unsigned char, dynamic);
  BlockPartial<HD>& sh = *reinterpret_cast<BlockPartial<HD>*>(dynamic);
  SHARED(uint32_t, arrived);
  griddep_launch();
  griddep_wait();
  const int G = H / KV, tiles = (G + ATTN_ROWS - 1) / ATTN_ROWS;
  const int kv = blockIdx.y / tiles, first = (blockIdx.y % tiles) * ATTN_ROWS, rows = min(ATTN_ROWS, G - first);
  const int len = *pos_ptr + 1;
  // Keys a split, in whole steps of the block; splits in use.
  const int chunk = ((len + int(gridDim.x) - 1) / int(gridDim.x) + MIN_SPLIT - 1) / MIN_SPLIT * MIN_SPLIT;
  const int splits = (len + chunk - 1) / chunk;
  if (int(blockIdx.x) >= splits) return;

  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
  const bf16* qh = q + (kv * G + first) * HD;
  uint32_t qf[HD / 16][4];
  attn_load_q<HD>(qf, g < rows ? qh + g * HD : nullptr, g + 8 < rows ? qh + (g + 8) * HD : nullptr);
  const bf16 *k = k_cache + int64_t(kv) * max_len * HD, *v = v_cache + int64_t(kv) * max_len * HD;
  const int begin = blockIdx.x * chunk, end = min(len, begin + chunk), limit[2] = {end, end};
  AttnState<HD> st;
  attn_init<HD>(st);
  for (int k0 = begin + warp * ATTN_KEYS; k0 < end; k0 += WARPS * ATTN_KEYS) attn_step<HD>(st, qf, k, v, k0, end - 1, limit, scale_log2);
  publish<HD>(sh, st);
  __syncthreads();

  // The block's partial, {o[HD], m, l, unused} a row: a thread merges the warps for four dimensions of a row.
  constexpr int PART_ROW = HD + 4, QUADS = HD / 4;
  bf16* dst = out + (kv * G + first) * HD;
  float* mine = part + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * ATTN_ROWS * PART_ROW;
  for (int i = threadIdx.x; i < rows * QUADS; i += blockDim.x) {
    const int row = i / QUADS, d = i % QUADS * 4;
    Merge a = {make_float4(0.f, 0.f, 0.f, 0.f), NEG_INF, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) merge(a, *reinterpret_cast<const float4*>(&sh.o[w][row][d]), sh.m[w][row], sh.l[w][row]);
    if (splits == 1) {
      *reinterpret_cast<uint2*>(dst + row * HD + d) = make_uint2(pack_bf16(a.o.x / a.l, a.o.y / a.l), pack_bf16(a.o.z / a.l, a.o.w / a.l));
      continue;
    }
    *reinterpret_cast<float4*>(mine + row * PART_ROW + d) = a.o;
    if (d == 0) *reinterpret_cast<float2*>(mine + row * PART_ROW + HD) = make_float2(a.m, a.l);
  }
  if (splits == 1) return;

  // Last block to arrive: the barrier orders the block's stores before thread 0's acq_rel increment, that one before the readers'.
  __syncthreads();
  if (threadIdx.x == 0) arrived = atom_inc_acq_rel_gpu(counters + blockIdx.y, splits - 1);
  __syncthreads();
  if (int(arrived) != splits - 1) return;
  const float* all = part + int64_t(blockIdx.y) * gridDim.x * ATTN_ROWS * PART_ROW;
  for (int i = threadIdx.x; i < rows * QUADS; i += blockDim.x) {
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

#define ATTN_DECODE(HD)                                                                                             \
  KERNEL_OCC(WARPS * WARP, 1) void attn_decode_bf16_hd##HD(bf16* out,           /* [H, HD] */                       \
                                                           const bf16* q,       /* [H, HD] */                       \
                                                           const bf16* k_cache, /* [KV, max_len, HD] */             \
                                                           const bf16* v_cache, /* [KV, max_len, HD] */             \
                                                           float* part,         /* [grid.y, grid.x, 16, HD + 4] */  \
                                                           uint32_t* counters,  /* [grid.y] */                      \
                                                           const int32_t* pos,  /* [1] */                           \
                                                           int H, int KV, int max_len, float scale_log2) {          \
    attn_decode<HD>(out, q, k_cache, v_cache, part, counters, pos, H, KV, max_len, scale_log2);                     \
  }
ATTN_DECODE(64)
ATTN_DECODE(128)
