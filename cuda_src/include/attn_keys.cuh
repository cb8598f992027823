// attn_keys.cuh - one warp attends 8·NT query rows to 16 keys at a time on tensor cores, with the keys as the 16-row operand.
//
// A group of query heads is seldom larger than 8, so rows are the mma's N: half the products, and half the state, of a 16-row tile of
// queries. Every load is a whole 16-byte pack that goes straight into fragments, without shared memory (g = lane/4, t = lane%4):
//   Sᵀ = K·Qᵀ  a sum over dimensions may run in any order: thread t holds dimensions 32j + 8t … + 7 of K and Q, two k-steps a pack.
//   Pᵀ         leaves Sᵀ's layout for that of an operand by movmatrix, as bf16.
//   Oᵀ = Vᵀ·Pᵀ  the tile of 16 dimensions (j, e) has dimension 64j + 8g + 2e in its row g and the next one in row g + 8: a thread reads packs
//         of eight neighbours of four keys, pairs them by key, and ends with dimensions 64j + 8g … + 7 of rows 2t and 2t + 1.
// Scores and sums are fp32; P is rounded to 16 bits for the second product, as everywhere in the field.
// Packs of an e4m3 cache are 8 bytes, of the same dimensions, and become f16 in registers, exactly; Q and P are f16 then. Second parts of
// keys (kv_cache.cuh) are 16 more dimensions of Sᵀ, whose Q is that of the dimensions they belong to.
#pragma once
#include "attn_format.cuh"

constexpr int ATTN_KEYS = 16;  // keys of one tile: the mma's M

// Online softmax state of a warp's rows; a thread holds rows 8n + 2t and 8n + 2t + 1.
template <int HD, int NT>
struct AttnState {
  float o[NT][HD / 16][4];  // unnormalised output: o[n][4j + e] = {dimension 64j + 8g + 2e of both rows, the next dimension of both}
  float m[NT][2];           // running maximum of scores, in units of log2
  float l[NT][2];           // this thread's share of the running sum of 2^(score - m)
};
template <int HD, int NT>
DEVICE void attn_init(AttnState<HD, NT>& s) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
#pragma unroll
    for (int i = 0; i < HD / 16; i++) s.o[n][i][0] = s.o[n][i][1] = s.o[n][i][2] = s.o[n][i][3] = 0.f;
    s.m[n][0] = s.m[n][1] = NEG_INF;
    s.l[n][0] = s.l[n][1] = 0.f;
  }
}

// Row 8n + g of Q: dimensions 32j + 8t …, and with FINE those that this thread's second parts 4t … 4t + 3 belong to.
template <class F, int HD>
struct AttnQuery {
  uint4 q[HD / 32];
  uint32_t fine[2];
};
// Zero where there is no row. `dims`: four bytes, of the second parts (attn_fine_dims).
template <class F, int HD>
DEVICE void attn_load_row(AttnQuery<F, HD>& query, const bf16* row, uint32_t dims) {
  bf16 fine[4];
#pragma unroll
  for (int j = 0; j < HD / 32; j++)
    query.q[j] = row ? ld_global_v4(row + F::K_DIMS * (4 * (j / F::K_CHUNKS) + threadIdx.x % 4) + 8 * (j % F::K_CHUNKS)) : make_uint4(0, 0, 0, 0);
  if constexpr (F::FINE_PARTS) {  // all are requested before one is converted
#pragma unroll
    for (int i = 0; i < 4; i++) fine[i] = row ? row[dims >> (8 * i) & 255] : __float2bfloat16_rn(0.f);
#pragma unroll
    for (int j = 0; j < HD / 32; j++) query.q[j] = F::query(query.q[j]);
    query.fine[0] = pack_f16(__bfloat162float(fine[0]), __bfloat162float(fine[1]));
    query.fine[1] = pack_f16(__bfloat162float(fine[2]), __bfloat162float(fine[3]));
  }
}
// The dimensions of this thread's second parts, from the head's pairs.
template <int HD>
DEVICE uint32_t attn_fine_dims(const uint8_t* pairs) {
  const int t = threadIdx.x % 4;
  return *reinterpret_cast<const uint32_t*>(pairs + 4 * (t % 2)) + uint32_t(t / 2 * (HD / 2)) * 0x01010101u;
}

// K and V of 16 keys as they lie in memory.
template <class F, int HD>
struct AttnTile {
  using V = typename F::template Values<HD>;
  typename F::Pack k[2][HD / (4 * F::K_DIMS)];           // key 8i + g, dimensions K_DIMS·(4j + t) …
  typename V::Pack v[HD / (8 * V::DIMS)][4];  // keys 2t, 2t + 1, 2t + 8, 2t + 9, dimensions V::DIMS·(8j + g) …
  uint32_t fine[2];                // key 8i + g, second parts 4t …
};
// Keys k0 … k0 + 15 from `first` on; those past `last` are read as `last`. Registers of keys before `first` keep what they hold.
// The common case, a whole tile, takes one address.
template <class F, int HD>
DEVICE void attn_fetch_k(AttnTile<F, HD>& tile, const AttnHead<F>& head, int k0, int first, int last) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  constexpr int PACKS = HD / (4 * F::K_DIMS), PITCH = 4 * F::K_DIMS;
  const typename F::Element* k = head.k + F::K_DIMS * t;
  if constexpr (F::FINE_PARTS) {
    const uint8_t* fine = head.fine + 4 * t;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int key = k0 + 8 * i + g;
      if (key >= first) tile.fine[i] = ld_once_u32(fine + int64_t(min(key, last)) * FINE);
    }
  }
  if (k0 >= first && k0 + ATTN_KEYS - 1 <= last) {
    k += int64_t(k0 + g) * HD;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < PACKS; j++) tile.k[i][j] = F::load(k + 8 * i * HD + PITCH * j);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int key = k0 + 8 * i + g;
    const typename F::Element* row = k + int64_t(min(key, last)) * HD;
    if (key >= first)
#pragma unroll
      for (int j = 0; j < PACKS; j++) tile.k[i][j] = F::load(row + PITCH * j);
  }
}
template <class F, int HD>
DEVICE void attn_fetch_v(AttnTile<F, HD>& tile, const AttnHead<F>& head, int k0, int first, int last) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  using V = typename F::template Values<HD>;
  constexpr int PACKS = HD / (8 * V::DIMS), PITCH = 8 * V::DIMS;
  const typename F::Element* v = head.v + V::DIMS * g;
  if (k0 >= first && k0 + ATTN_KEYS - 1 <= last) {
    v += int64_t(k0 + 2 * t) * HD;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < PACKS; j++) tile.v[j][i] = V::load(v + (8 * (i / 2) + i % 2) * HD + PITCH * j);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int key = k0 + 8 * (i / 2) + 2 * t + i % 2;
    const typename F::Element* row = v + int64_t(min(key, last)) * HD;
    if (key >= first)
#pragma unroll
      for (int j = 0; j < PACKS; j++) tile.v[j][i] = V::load(row + PITCH * j);
  }
}

// s[n] = Sᵀ of the tile's keys g and g + 8 (elements 0, 1 and 2, 3) and rows 8n + 2t, 8n + 2t + 1.
template <class F, int HD, int NT>
DEVICE void attn_scores(float (&s)[NT][4], const AttnQuery<F, HD> (&q)[NT], const AttnTile<F, HD>& tile) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    float odd[4] = {0.f, 0.f, 0.f, 0.f};  // two chains of dependent products instead of one
    s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
    for (int j = 0; j < HD / 32; j++) {
      const uint4 a = F::wide(tile.k[0][j / F::K_CHUNKS], j % F::K_CHUNKS), b = F::wide(tile.k[1][j / F::K_CHUNKS], j % F::K_CHUNKS);
      const uint32_t lo[4] = {a.x, b.x, a.y, b.y}, hi[4] = {a.z, b.z, a.w, b.w};
      const uint4 w = q[n].q[j];
      const uint32_t qlo[2] = {w.x, w.y}, qhi[2] = {w.z, w.w};
      F::mma(s[n], lo, qlo);
      F::mma(odd, hi, qhi);
    }
    if constexpr (F::FINE_PARTS) {
      const uint32_t rest[4] = {widen_e4m3(tile.fine[0]), widen_e4m3(tile.fine[1]), widen_e4m3(tile.fine[0] >> 16), widen_e4m3(tile.fine[1] >> 16)};
      F::mma(odd, rest, q[n].fine);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) s[n][c] += odd[c];
  }
}

// Those of a tile that is not there.
template <int NT>
DEVICE void attn_no_scores(float (&s)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = NEG_INF;
}

// Scores of keys that a row does not see: limit[n][c] is the first that is masked for row 8n + 2t + c.
template <int NT>
DEVICE void attn_mask(float (&s)[NT][4], int k0, const int (&limit)[NT][2]) {
  const int g = threadIdx.x % WARP / 4;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 4; c++)
      if (k0 + 8 * (c / 2) + g >= limit[n][c % 2]) s[n][c] = NEG_INF;
}

// Softmax step over TILES tiles: scores become probabilities relative to the new maximum, the state is rescaled to it. In stages over all
// rows, without a branch between them: what the rows wait for, shuffles and exponentials, overlaps.
template <int HD, int NT, int TILES>
DEVICE void attn_softmax(AttnState<HD, NT>& st, float (&s)[TILES][NT][4], float scale_log2, bool first_step) {
  float m[NT][2], base[NT][2], sum[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      m[n][c] = fmaxf(s[0][n][c], s[0][n][2 + c]);
#pragma unroll
      for (int i = 1; i < TILES; i++) m[n][c] = fmaxf(m[n][c], fmaxf(s[i][n][c], s[i][n][2 + c]));
    }
#pragma unroll
  for (int d = 4; d < WARP; d *= 2)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) m[n][c] = fmaxf(m[n][c], __shfl_xor_sync(FULL_MASK, m[n][c], d));
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      m[n][c] = fmaxf(st.m[n][c], m[n][c] * scale_log2);
      base[n][c] = m[n][c] == NEG_INF ? 0.f : m[n][c];  // a row with no key yet: 2^(-inf - 0) = 0, never NaN
      sum[n][c] = 0.f;
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float& x = s[i][n][2 * r + c];
          x = ex2_approx(fmaf(x, scale_log2, -base[n][c]));
          sum[n][c] += x;
        }
    }
  if (!first_step)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float fix = ex2_approx(st.m[n][c] - base[n][c]);
        sum[n][c] = fmaf(st.l[n][c], fix, sum[n][c]);
#pragma unroll
        for (int i = 0; i < HD / 16; i++) {
          st.o[n][i][c] *= fix;
          st.o[n][i][2 + c] *= fix;
        }
      }
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) st.m[n][c] = m[n][c], st.l[n][c] = sum[n][c];
}

// o += Vᵀ·Pᵀ for the tile's 16 keys.
template <class F, int HD, int NT>
DEVICE void attn_values(AttnState<HD, NT>& st, const float (&s)[NT][4], const AttnTile<F, HD>& tile) {
  uint32_t p[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int r = 0; r < 2; r++) p[n][r] = movmatrix_trans(F::pack(s[n][2 * r], s[n][2 * r + 1]));
  using V = typename F::template Values<HD>;
#pragma unroll
  for (int j = 0; j < HD / 64; j++) {
    uint32_t w[2][8];  // [keys 2t, 2t + 1 or those 8 on][dimension]
#pragma unroll
    for (int i = 0; i < 2; i++) V::pairs(w[i], tile.v[j / V::CHUNKS][2 * i], tile.v[j / V::CHUNKS][2 * i + 1], j % V::CHUNKS);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const uint32_t a[4] = {w[0][2 * e], w[0][2 * e + 1], w[1][2 * e], w[1][2 * e + 1]};
#pragma unroll
      for (int n = 0; n < NT; n++) F::mma(st.o[n][4 * j + e], a, p[n]);
    }
  }
}
