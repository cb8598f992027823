// gemm.cuh - C = A·Wᵀ on tensor cores for prefill: the plain tiled kernel that runs on every architecture from sm_80 on.
//
// A [T, K] row-major in 16 bits, W [N, K] row-major, bf16 or e4m3, turned into A's type on the way into shared memory: e4m3 fits f16 and
// bf16 exactly, bf16 fits f16 exactly from 2^-14 to 65504 and to 2^-25 below. The scales of e4m3 rows are applied to the sums. Normed
// inputs are f16, what can be large is bf16, as in include/gemv.cuh. A block computes 64 × 128 of C; 8 warps as 2 × 4, each 32 × 32 by mma.sync m16n8k16 with fp32 accumulators.
// K runs in slices of 32, double-buffered: the next slice travels to registers while this one is multiplied.
// Shared rows are padded from 32 to 40 elements, so the eight rows a fragment load touches fall into different banks.
//
// grid: (ceil(N / 128), or ceil(pairs / 64) for SwiGLU and QKV, ceil(T / 64)); block: 256. bytes moved: A once per column block, W once per row block.
// PRECOND  K % 8 == 0 (bf16) or K % 16 == 0 (e4m3); A, W 16-byte aligned. T, N, K need not be multiples of the tile.
#pragma once
#include "kv_cache.cuh"

constexpr int GEMM_THREADS = 256, BM = 64, BN = 128, BK = 32, LDS = BK + 8;

// A's type: its bits travel as uint16_t.
struct OperandBf16 {
  static DEVICE uint4 pack(const float (&f)[8]) { return pack_bf16x8(f); }
  static DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16_16816(c, a, b); }
};
struct OperandF16 {
  static DEVICE uint4 pack(const float (&f)[8]) { return pack_f16x8(f); }
  static DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_f16_16816(c, a, b); }
};

struct GemmTile {
  uint16_t a[2][BM][LDS];
  uint16_t b[2][BN][LDS];
};

// A weight type under an operand type: how many weights a 16-byte pack holds, how many packs a thread moves per slice (PACKS), and how
// a pack is stored as operands.
template <class Op>
struct GemmBf16 {
  using type = bf16;
  using Operand = Op;
  static constexpr int PACK = 8, PACKS = BN * BK / 8 / GEMM_THREADS;
  static constexpr bool SCALED = false;
  static DEVICE void store(uint16_t* dst, uint4 v) {
    float f[8];
    unpack_bf16(f, v);
    *reinterpret_cast<uint4*>(dst) = Op::pack(f);  // under OperandBf16 the compiler sees that this is v
  }
};
template <class Op>
struct GemmE4m3 {
  using type = e4m3;
  using Operand = Op;
  static constexpr int PACK = 16, PACKS = BN * BK / 16 / GEMM_THREADS;
  static constexpr bool SCALED = true;
  static DEVICE void store(uint16_t* dst, uint4 v) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float q[2][4], f[8];
#pragma unroll
      for (int i = 0; i < 2; i++) unpack_e4m3(q[i], w[2 * half + i]);
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] = q[i / 4][i % 4];
      reinterpret_cast<uint4*>(dst)[half] = Op::pack(f);
    }
  }
};

// Which row of W feeds row r (0 … 127) of this block's tile: a pointer to its K weights, or null outside the matrix.
// Plain: the 128 rows from n0 on.
template <class T>
struct RowsPlain {
  static constexpr int COLUMNS = BN;  // columns of C that a block computes
  const T* w;
  int N, K;
  DEVICE const T* row(int r) const {
    const int n = int(blockIdx.x) * COLUMNS + r;
    return n < N ? w + int64_t(n) * K : nullptr;
  }
};
// Pairs that one thread must end with: each warp's 32 rows are 16 firsts and the same 16 pairs' seconds.
DEVICE int pair_column(int r) { return int(blockIdx.x) * (BN / 2) + r / 32 * 16 + r % 16; }
// A gate and its up.
template <class T>
struct RowsGateUp {
  static constexpr int COLUMNS = BN / 2;
  const T *gate, *up;
  int N, K;
  DEVICE const T* row(int r) const {
    const int n = pair_column(r);
    return n < N ? (r % 32 < 16 ? gate : up) + int64_t(n) * K : nullptr;
  }
};
// Dimensions d and d + HD/2 of a head, which RoPE rotates into each other; N counts pairs.
template <class T>
struct RowsRotary {
  static constexpr int COLUMNS = BN / 2;
  const T* w;
  int N, K, half;
  DEVICE const T* row(int r) const {
    const int p = pair_column(r), n = p / half * 2 * half + p % half + (r % 32 < 16 ? 0 : half);
    return p < N ? w + int64_t(n) * K : nullptr;
  }
};

template <class W>
struct GemmSlice {
  uint4 a, b[W::PACKS];
};

// One K slice from device memory into registers; what lies outside the matrices is zero.
template <class W, class Rows>
DEVICE void gemm_fetch(GemmSlice<W>& s, const uint16_t* a, const Rows& rows, int T, int K, int k0) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const int row = int(blockIdx.y) * BM + int(threadIdx.x) / 4, ka = k0 + int(threadIdx.x) % 4 * 8;
  s.a = row < T && ka < K ? ld_global_v4(a + int64_t(row) * K + ka) : zero;
#pragma unroll
  for (int i = 0; i < W::PACKS; i++) {
    const int p = int(threadIdx.x) + i * GEMM_THREADS, kb = k0 + p % (BK / W::PACK) * W::PACK;
    const typename W::type* r = rows.row(p / (BK / W::PACK));
    s.b[i] = r && kb < K ? ld_global_v4(r + kb) : zero;
  }
}

template <class W>
DEVICE void gemm_stage(GemmTile& sh, int buf, const GemmSlice<W>& s) {
  *reinterpret_cast<uint4*>(&sh.a[buf][threadIdx.x / 4][threadIdx.x % 4 * 8]) = s.a;
#pragma unroll
  for (int i = 0; i < W::PACKS; i++) {
    const int p = int(threadIdx.x) + i * GEMM_THREADS;
    W::store(&sh.b[buf][p / (BK / W::PACK)][p % (BK / W::PACK) * W::PACK], s.b[i]);
  }
}

DEVICE uint32_t shared_pair(const uint16_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

template <class Operand>
DEVICE void gemm_multiply(float (&c)[2][4][4], const GemmTile& sh, int buf) {
  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
  const int m = warp / 4 * 32, n = warp % 4 * 32;
#pragma unroll
  for (int k = 0; k < BK; k += 16) {
    uint32_t a[2][4], b[4][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int q = 0; q < 4; q++) a[i][q] = shared_pair(&sh.a[buf][m + 16 * i + g + 8 * (q % 2)][k + 2 * t + 8 * (q / 2)]);
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int q = 0; q < 2; q++) b[j][q] = shared_pair(&sh.b[buf][n + 8 * j + g][k + 2 * t + 8 * q]);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) Operand::mma(c[i][j], a[i], b[j]);
  }
}

// The block's 64 × 128 sums, in c[16-row tile][8-column tile][mma accumulator].
template <class W, class Rows>
DEVICE void gemm_tile(float (&c)[2][4][4], GemmTile& sh, const uint16_t* a, const Rows& rows, int T, int K) {
#pragma unroll
  for (int i = 0; i < 32; i++) c[i / 16][i / 4 % 4][i % 4] = 0.f;
  GemmSlice<W> s;
  gemm_fetch(s, a, rows, T, K, 0);
  gemm_stage<W>(sh, 0, s);
  __syncthreads();
  for (int k0 = 0, buf = 0; k0 < K; k0 += BK, buf ^= 1) {
    if (k0 + BK < K) gemm_fetch(s, a, rows, T, K, k0 + BK);
    gemm_multiply<typename W::Operand>(c, sh, buf);
    if (k0 + BK < K) gemm_stage<W>(sh, buf ^ 1, s);  // the other buffer was last read before the previous barrier
    __syncthreads();
  }
}

// Calls f(t, n, y) for every sum of this thread that lies inside C [T, N].
template <class F>
DEVICE void gemm_each(const float (&c)[2][4][4], int T, int N, F f) {
  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const int m = i / 16, j = i / 4 % 4, r = i % 4;
    const int row = int(blockIdx.y) * BM + warp / 4 * 32 + 16 * m + g + 8 * (r / 2);
    const int col = int(blockIdx.x) * BN + warp % 4 * 32 + 8 * j + 2 * t + r % 2;
    if (row < T && col < N) f(row, col, c[m][j][r]);
  }
}

// Calls f(t, p, first, second) for every pair of this thread that lies inside [T, N pairs].
template <class F>
DEVICE void gemm_each_pair(const float (&c)[2][4][4], int T, int N, F f) {
  const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int m = i / 8, j = i / 4 % 2, r = i % 4;  // column tiles 0 and 1 hold the firsts, 2 and 3 the seconds
    const int row = int(blockIdx.y) * BM + warp / 4 * 32 + 16 * m + g + 8 * (r / 2);
    const int p = pair_column(warp % 4 * 32 + 8 * j + 2 * t + r % 2);
    if (row < T && p < N) f(row, p, c[m][j][r], c[m][j + 2][r]);
  }
}

// ---- the kernels, for either weight type --------------------------------------------------------------------------------------

// h[t, n] += scale[n]·(A·Wᵀ)[t, n] in fp32 (ADD), or plainly = .
template <class W, bool ADD>
DEVICE void gemm_f32(float* h, const uint16_t* a, const typename W::type* w,
                     const float* scale, int T, int N, int K) {
  SHARED(GemmTile, sh);
  float c[2][4][4];
  gemm_tile<W>(c, sh, a, RowsPlain<typename W::type>{w, N, K}, T, K);
  gemm_each(c, T, N, [&](int t, int n, float y) {
    if (W::SCALED) y *= scale[n];
    float& dst = h[int64_t(t) * N + n];
    dst = ADD ? dst + y : y;
  });
}

// y[t, n] = scale[n]·(A·Wᵀ)[t, n] as bf16: one rank's share of a row-parallel product.
template <class W>
DEVICE void gemm_store(bf16* y, const uint16_t* a, const typename W::type* w, const float* scale, int T, int N, int K) {
  SHARED(GemmTile, sh);
  float c[2][4][4];
  gemm_tile<W>(c, sh, a, RowsPlain<typename W::type>{w, N, K}, T, K);
  gemm_each(c, T, N, [&](int t, int n, float v) { y[int64_t(t) * N + n] = __float2bfloat16_rn(W::SCALED ? v * scale[n] : v); });
}

// act[t, i] = silu(s_gate[i]·gate)·(s_up[i]·up), as bf16.
template <class W>
DEVICE void gemm_swiglu(bf16* act, const uint16_t* a, const typename W::type* w_gate,
                        const float* s_gate, const typename W::type* w_up, const float* s_up, int T,
                        int I, int K) {
  SHARED(GemmTile, sh);
  float c[2][4][4];
  gemm_tile<W>(c, sh, a, RowsGateUp<typename W::type>{w_gate, w_up, I, K}, T, K);
  gemm_each_pair(c, T, I, [&](int t, int i, float gate, float up) {
    if (W::SCALED) gate *= s_gate[i], up *= s_up[i];
    act[int64_t(t) * I + i] = __float2bfloat16_rn(gate / (1.f + expf(-gate)) * up);
  });
}

// Q, K and V with bias, RoPE on Q and K; Q to q, K and V to the cache at positions span.pos0 + t. Of T rows the first span.T are tokens:
// the others are padding, computed and dropped. A graph is replayed with other spans, so they come from device memory.
template <class W>
DEVICE void gemm_qkv(bf16* q, const KvCache& cache, const uint16_t* a,
                     const typename W::type* w, const float* scale, const float* bias,
                     const float2* rope, const int32_t* span, int T, int H, int HD, int K) {
  SHARED(GemmTile, sh);
  const int half = HD / 2, KV = cache.KV, pairs = (H + 2 * KV) * half, pos0 = span[0], tokens = min(T, span[1]);
  float c[2][4][4];
  gemm_tile<W>(c, sh, a, RowsRotary<typename W::type>{w, pairs, K, half}, T, K);
  gemm_each_pair(c, tokens, pairs, [&](int t, int p, float x, float y) {
    const int head = p / half, d = p % half, n = head * HD + d, pos = pos0 + t;
    if (W::SCALED) x *= scale[n], y *= scale[n + half];
    x += bias[n], y += bias[n + half];
    const float2 cs = head < H + KV ? rope[int64_t(pos) * half + d] : make_float2(1.f, 0.f);  // {cos, sin}
    const float first = fmaf(x, cs.x, -y * cs.y), second = fmaf(y, cs.x, x * cs.y);
    if (head >= H) return cache.append(head - H, pos, half, d, first, second, cache.slot(head - H, half, d));
    bf16* out = q + (int64_t(t) * H + head) * HD + d;
    out[0] = __float2bfloat16_rn(first);
    out[half] = __float2bfloat16_rn(second);
  });
}
