// attn.cuh - one warp attends 16 query rows to 16 keys at a time on tensor cores, reading K and V straight into mma fragments.
//
// mma.sync wants each thread to hold scattered elements of K and V. Two permutations make every load a whole 16-byte pack, so that
// neither shared memory nor ldmatrix is needed (g = lane/4, t = lane%4):
//   Q·Kᵀ  a sum over dimensions may run in any order, so the instruction's k index is mapped to dimensions such that thread t holds
//         the eight neighbours 32j + 8t … 32j + 8t + 7, the same for Q and K: one pack feeds two k-steps.
//   P·V   the output's column n = g of tile e is dimension 64j + 8g + e: a thread reads packs of eight neighbours of four keys and
//         pairs them by key; at the end it owns the sixteen neighbouring dimensions 64j + 16t … 64j + 16t + 15 of rows g and g + 8.
// Scores and sums are fp32; P is rounded to 16 bits for the second product, as everywhere in the field. With an e4m3 cache packs are 8
// bytes and operands f16, and second parts of keys are 16 more dimensions of Q·Kᵀ, as in attn_keys.cuh.
#pragma once
#include "attn_format.cuh"

constexpr int ATTN_ROWS = 16;  // query rows of one warp: the mma's M
constexpr int ATTN_KEYS = 16;  // keys of one step

// Online softmax state of a warp's 16 rows; a thread holds rows g (index 0) and g + 8 (index 1).
template <int HD>
struct AttnState {
  float o[HD / 8][4];  // unnormalised output, mma accumulator layout: o[8j + e] is tile e of dimensions 64j … 64j + 63
  float m[2];          // running maximum of scores, in units of log2
  float l[2];          // this thread's share of the running sum of 2^(score - m)
};

template <int HD>
DEVICE void attn_init(AttnState<HD>& s) {
#pragma unroll
  for (int i = 0; i < HD / 8; i++) s.o[i][0] = s.o[i][1] = s.o[i][2] = s.o[i][3] = 0.f;
  s.m[0] = s.m[1] = NEG_INF;
  s.l[0] = s.l[1] = 0.f;
}

// Q fragments from the rows of this thread: q0 and q1 point at rows g and g + 8 (HD bf16 each), or are null for a row that is not there.
template <class F, int HD>
DEVICE void attn_load_q(uint32_t (&qf)[HD / 16][4], const bf16* q0, const bf16* q1) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < HD / 32; j++) {
    const uint4 a = q0 ? F::query(ld_global_v4(q0 + 32 * j + 8 * t)) : make_uint4(0, 0, 0, 0);
    const uint4 b = q1 ? F::query(ld_global_v4(q1 + 32 * j + 8 * t)) : make_uint4(0, 0, 0, 0);
    qf[2 * j][0] = a.x, qf[2 * j][1] = b.x, qf[2 * j][2] = a.y, qf[2 * j][3] = b.y;
    qf[2 * j + 1][0] = a.z, qf[2 * j + 1][1] = b.z, qf[2 * j + 1][2] = a.w, qf[2 * j + 1][3] = b.w;
  }
}

// The same for the dimensions that second parts 4t … 4t + 3 of the head's pairs belong to.
template <int HD>
DEVICE void attn_load_fine_q(uint32_t (&qf)[4], const bf16* q0, const bf16* q1, const uint8_t* pairs) {
  const int t = threadIdx.x % 4;
  const bf16* rows[2] = {q0, q1};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float f[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (rows[r]) f[i] = __bfloat162float(rows[r][pairs[4 * (t % 2) + i] + t / 2 * (HD / 2)]);
    qf[r] = pack_f16(f[0], f[1]), qf[2 + r] = pack_f16(f[2], f[3]);
  }
}

// K and V of one step's 16 keys as they lie in memory. Both are requested before either is used: one latency, not two.
template <class F, int HD>
struct AttnKeys {
  typename F::Eight k[2][HD / 32];  // key 8i + g, dimensions 32j + 8t …
  typename F::Eight v[HD / 64][4];  // keys 2t, 2t + 1, 2t + 8, 2t + 9, dimensions 64j + 8g …
  uint32_t fine[2];                // key 8i + g, second parts 4t …
};

// Keys k0 … k0 + 15; rows past `last_key` are read as last_key.
template <class F, int HD>
DEVICE void attn_fetch(AttnKeys<F, HD>& kv, const AttnHead<F>& head, int k0, int last_key) {
  const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < HD / 32; j++) kv.k[i][j] = F::load_again(head.k + int64_t(min(k0 + 8 * i + g, last_key)) * HD + 32 * j + 8 * t);
  if constexpr (F::FINE_PARTS)
#pragma unroll
    for (int i = 0; i < 2; i++) kv.fine[i] = *reinterpret_cast<const uint32_t*>(head.fine + int64_t(min(k0 + 8 * i + g, last_key)) * FINE + 4 * t);
#pragma unroll
  for (int j = 0; j < HD / 64; j++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      kv.v[j][i] = F::load_again(head.v + int64_t(min(k0 + 8 * (i / 2) + 2 * t + i % 2, last_key)) * HD + 64 * j + 8 * g);
}

// Scores of the 16 keys: s[i] is the accumulator of keys 8i … 8i + 7.
template <class F, int HD>
DEVICE void attn_scores(float (&s)[2][4], const uint32_t (&qf)[HD / 16][4], const uint32_t (&fine)[4], const AttnKeys<F, HD>& kv) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
    for (int j = 0; j < HD / 32; j++) {
      const uint4 v = F::wide(kv.k[i][j]);
      const uint32_t lo[2] = {v.x, v.y}, hi[2] = {v.z, v.w};
      F::mma(s[i], qf[2 * j], lo);
      F::mma(s[i], qf[2 * j + 1], hi);
    }
    if constexpr (F::FINE_PARTS) {
      const uint32_t rest[2] = {widen_e4m3(kv.fine[i]), widen_e4m3(kv.fine[i] >> 16)};
      F::mma(s[i], fine, rest);
    }
  }
}

// Softmax step: scores become probabilities relative to the new maximum, the state is rescaled to it.
// limit[r]: keys at or past it are masked for row g + 8r.
template <int HD>
DEVICE void attn_softmax(AttnState<HD>& st, float (&s)[2][4], int k0, const int (&limit)[2], float scale_log2) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float m = st.m[r];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float& x = s[c / 2][2 * r + c % 2];
      x = k0 + 8 * (c / 2) + 2 * t + c % 2 < limit[r] ? x * scale_log2 : NEG_INF;
      m = fmaxf(m, x);
    }
    m = fmaxf(m, __shfl_xor_sync(FULL_MASK, m, 1));
    m = fmaxf(m, __shfl_xor_sync(FULL_MASK, m, 2));
    const float base = m == NEG_INF ? 0.f : m;  // a row with no key yet: 2^(-inf - 0) = 0, never NaN
    const float fix = ex2_approx(st.m[r] - base);
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float& x = s[c / 2][2 * r + c % 2];
      x = ex2_approx(x - base);
      sum += x;
    }
    st.m[r] = m;
    st.l[r] = fmaf(st.l[r], fix, sum);
#pragma unroll
    for (int i = 0; i < HD / 8; i++) {
      st.o[i][2 * r] *= fix;
      st.o[i][2 * r + 1] *= fix;
    }
  }
}

// o += P·V for the same 16 keys.
template <class F, int HD>
DEVICE void attn_values(AttnState<HD>& st, const float (&s)[2][4], const AttnKeys<F, HD>& kv) {
  const uint32_t p[4] = {F::pack(s[0][0], s[0][1]), F::pack(s[0][2], s[0][3]), F::pack(s[1][0], s[1][1]), F::pack(s[1][2], s[1][3])};
#pragma unroll
  for (int j = 0; j < HD / 64; j++) {
    uint32_t w[2][8];  // [keys 2t, 2t + 1 or those 8 on][dimension]
#pragma unroll
    for (int i = 0; i < 2; i++) F::pairs(w[i], kv.v[j][2 * i], kv.v[j][2 * i + 1]);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const uint32_t b[2] = {w[0][e], w[1][e]};
      F::mma(st.o[8 * j + e], p, b);
    }
  }
}

// One step: 16 keys from k0 on.
template <class F, int HD>
DEVICE void attn_step(AttnState<HD>& st, const uint32_t (&qf)[HD / 16][4], const uint32_t (&fine)[4], const AttnHead<F>& head, int k0,
                      int last_key, const int (&limit)[2], float scale_log2) {
  AttnKeys<F, HD> kv;
  attn_fetch<F, HD>(kv, head, k0, last_key);
  float s[2][4];
  attn_scores<F, HD>(s, qf, fine, kv);
  attn_softmax<HD>(st, s, k0, limit, scale_log2);
  attn_values<F, HD>(st, s, kv);
}

// The row's whole sum, in each of the four threads that share it.
DEVICE float attn_row_sum(float l) {
  l += __shfl_xor_sync(FULL_MASK, l, 1);
  return l + __shfl_xor_sync(FULL_MASK, l, 2);
}
