// gemv_mma.cuh - the engine of include/gemv_rows.cuh: weights × 2 to 16 activation rows on tensor cores.
//
// The weights are the 16-row operand of mma.sync m16n8k16, the tokens its eight columns. A warp owns a stretch of K and keeps its part of x in
// registers for the whole kernel, as operands; the block's rows pass by, 16 at a time (a tile). The instruction's k index is mapped to memory
// such that lane (g, t) holds neighbours, the same for weights and x: one 16-byte pack of row g and one of row g + 8 feed 2 (bf16) or 4 (e4m3)
// instructions, without shared memory. F pairs of packs are in flight a lane; as soon as one is consumed its registers are loaded again, so
// that the loads never drain, not between tiles either.
//
// x is exact. bf16 inputs are operands as they are, or f16 for e4m3 weights, scaled by a power of two so that nothing overflows (exact from
// 2^-10 up, below to 2^-22). Normed inputs become two 16-bit parts, the second what rounding to the first took off, in columns of their own:
// 16 bits of x for bf16 weights, 22 for e4m3. With bf16 weights and up to four tokens both parts fit the eight columns, at no cost.
// block: ceil(K of the block / K of a warp) warps.
#pragma once
#include "gemv_operand.cuh"
#include "gemv_sums.cuh"

// A block's rows [begin, begin + count) of the matrix (begin counts units of one row or two), in tiles of an even number of rows, all but the
// last of the same.
struct RowsRange {
  int begin, count, tiles, tile_rows;
  DEVICE int first(int tile) const { return tile * tile_rows; }
  DEVICE int end(int tile) const { return min((tile + 1) * tile_rows, count); }
};

// ---- a warp's part -------------------------------------------------------------------------------------------------------------------------
// Hopper has tall blocks of up to 16 warps too; elsewhere they spill, and so do normed rows of more than 8 tokens.
// Loads of x at once, and of sums, and blocks a multiprocessor of e4m3 weights with up to 8 tokens: more spill.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000)
constexpr bool ROWS_HOPPER = false;
constexpr int ROWS_TALL = 256;
#else
constexpr bool ROWS_HOPPER = true;
constexpr int ROWS_TALL = 512;
#endif
constexpr int ROWS_THREADS = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int ROWS_ROUND_M8 = 4, ROWS_ROUND_M16 = 2, ROWS_SUMS = 1, ROWS_NARROW = 1;
#else
constexpr int ROWS_ROUND_M8 = 8, ROWS_ROUND_M16 = 8, ROWS_SUMS = 4, ROWS_NARROW = 2;
#endif

// TOKENS: columns are made for so many, 4 (two parts), 8 or 16. PARTS: of x, 1 or 2.
template <class W_, int PARTS, int TOKENS>
struct RowsMma {
  using W = W_;
  static constexpr int NT = PARTS * TOKENS / 8;              // tiles of eight columns
  // Blocks of up to 16 warps, one a multiprocessor; of up to 8, two a multiprocessor; the rest have one of up to 8.
  static constexpr bool TALL = ROWS_HOPPER && (PARTS == 1 ? !W::SCALED || TOKENS == 16 : !W::SCALED && TOKENS < 16), NARROW = W::SCALED && TOKENS == 8;
  static constexpr bool CLUSTERS = TALL || NARROW || (ROWS_HOPPER && W::SCALED);     // blocks that share rows may be a cluster
  static constexpr int X_REGISTERS = TALL ? 4 * TOKENS : NARROW || TOKENS == 4 ? 64 : 128;  // of a lane, for its part of x: more spill
  static constexpr int C = X_REGISTERS / 2 / NT / W::STEPS;   // packs of a row that a lane multiplies
  static constexpr int STAGES = C / 2;                       // of a tile: two packs a lane and row, a line
  static constexpr int RING = TALL || NARROW ? 4 : 8;        // stages on their way
  static constexpr int AHEAD = RING > STAGES ? RING / STAGES : 1;  // tiles that the requests run ahead
  static constexpr int RING_BYTES = RING * 64;               // of shared memory, a thread
  static constexpr int STRETCH = 4 * W::PACK;                // what the four lanes of a row multiply at once
  static constexpr int LINE = 8 * W::PACK;                   // weights of 128 bytes
  static constexpr int WARP_K = C * STRETCH;                 // K of a warp
  static constexpr int OWN = TOKENS == 16 ? 2 : 1;           // tokens whose x a lane holds
  static constexpr int COLUMN = 20;                          // floats of a column of 16 sums in shared memory; the padding spreads the banks
  static_assert(NT >= 1 && STAGES >= 1 && (RING % STAGES == 0 || STAGES % RING == 0), "slots are fixed");

  uint32_t x[C][W::STEPS][NT][2];
  int k, packs;              // the lane's first k as a multiplier, and how many of its packs lie before the end of the block's K
  int copy_k, copy_lines;    // as a copier: its first k, and how many of its pieces there are
  uint4 *to, *from, *other;  // in the ring: where it copies to, and its packs of rows g and g + 8: the line's first half, the second

  static DEVICE int g() { return int(threadIdx.x) % WARP / 4; }
  static DEVICE int t() { return int(threadIdx.x) % 4; }
  static DEVICE int token(int i) { return (TOKENS == 4 ? g() % 4 : g()) + 8 * i; }

  // The warp's part of the block's K, [begin, end), and of the ring. Eight lanes copy a line of a row; every other row has the halves of its
  // lines exchanged, so that the readers of two rows meet different banks.
  DEVICE void place(float* shared, int begin, int end) {
    const int lane = threadIdx.x % WARP, line = lane / 8, piece = lane % 8;
    uint4* ring = reinterpret_cast<uint4*>(shared) + int(threadIdx.x) / WARP * (RING * 128);
    begin += int(threadIdx.x) / WARP * WARP_K;
    k = begin + t() * W::PACK;
    packs = min(C, max(0, (end - k + STRETCH - 1) / STRETCH));
    copy_k = begin + piece * W::PACK;
    copy_lines = min(STAGES, max(0, (end - copy_k + LINE - 1) / LINE));
    to = ring + line * 8 + (piece ^ line % 2 * 4);
    from = ring + g() * 8 + t() + 4 * (g() % 2);
    other = ring + g() * 8 + t() + 4 * (1 - g() % 2);
  }

  // A tile as a copier meets it: where its pieces of rows lane / 8 + 4i begin, and how many lines of each there are.
  struct Aim {
    const typename W::type* at[4];
    int lines[4];
  };
  template <class Rows>
  DEVICE Aim aim(const Rows& rows, const RowsRange& range, int tile) const {
    Aim a;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = range.first(tile) + int(threadIdx.x) % WARP / 8 + 4 * i;
      const bool there = j < range.end(tile);
      a.at[i] = rows.row(there ? j : 0) + copy_k;
      a.lines[i] = there ? copy_lines : 0;
    }
    return a;
  }
  // One stage of a tile on its way into a slot of the ring; what is not there becomes zero.
  DEVICE void request(int slot, const Aim& a, int stage) {
#pragma unroll
    for (int i = 0; i < 4; i++) cp_async_v4(to + slot * 128 + 32 * i, a.at[i] + stage * LINE, stage < a.lines[i]);
    cp_async_commit();
  }

  // A round of loads may begin when the round before has become operands: what is left to the compiler's order takes more registers than there
  // are. `never` is zero, which the compiler cannot know.
  template <class T>
  static DEVICE void after(const T*& p, uint32_t operands, uint32_t never) { p += operands & never; }

  // x [M, K] bf16 into operands. After griddep_wait.
  DEVICE void input(const bf16* src, int M, int K) {
    const uint32_t never = gridDim.z - 1;
    constexpr int EIGHTS = C * W::PACK / 8, MOST = NARROW || TALL ? 8 : 4, ROUND = W::SCALED ? EIGHTS < MOST ? EIGHTS : MOST : EIGHTS;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const bf16* row = src + int64_t(token(i)) * K + k;
      const int n = token(i) < M ? packs : 0;
#pragma unroll
      for (int e0 = 0; e0 < EIGHTS; e0 += ROUND) {
        uint4 v[ROUND];
#pragma unroll
        for (int e = 0; e < ROUND; e++) {
          const int c = (e0 + e) / (W::PACK / 8);
          v[e] = c < n ? ld_global_v4(row + c * STRETCH + (e0 + e) % (W::PACK / 8) * 8) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int e = 0; e < ROUND; e++) {
          const int c = (e0 + e) / (W::PACK / 8), s = (e0 + e) % (W::PACK / 8) * 2;
          if (W::SCALED) {
            float f[8];
            unpack_bf16(f, v[e]);
#pragma unroll
            for (int q = 0; q < 8; q++) f[q] *= W::PLAIN_SCALE;
            v[e] = pack_f16x8(f);
          }
          x[c][s][i][0] = v[e].x, x[c][s][i][1] = v[e].y, x[c][s + 1][i][0] = v[e].z, x[c][s + 1][i][1] = v[e].w;
        }
        uint32_t all = 0;
#pragma unroll
        for (int e = 0; e < ROUND; e++) all |= v[e].x | v[e].y | v[e].z | v[e].w;
        if (e0 + ROUND < EIGHTS || i + 1 < OWN) after(row, all, never);
      }
    }
  }

  // The two parts of four values as operands of step s of pack c.
  DEVICE void split(int i, int c, int s, const float (&f)[4]) {
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const uint32_t high = W::pair(f[2 * q], f[2 * q + 1]);
      const uint32_t low = W::pair((f[2 * q] - W::first(high)) * (1.f / W::LOW), (f[2 * q + 1] - W::second(high)) * (1.f / W::LOW));
      if (TOKENS == 4)
        x[c][s][0][q] = g() < 4 ? high : low;
      else
        x[c][s][2 * i][q] = high, x[c][s][2 * i + 1][q] = low;
    }
  }
  // h·weight, RMSNorm's result but for its scalar. h [M, K] fp32; weight bf16 in shared memory, from the lane's k on. squares[token]: the
  // lane's share of Σ h².
  DEVICE void normed(float (&squares)[OWN], const float* h, const bf16* weight, int M, int K) {
    const uint32_t never = gridDim.z - 1;
    constexpr int EIGHTS = C * W::PACK / 8;
    constexpr int MOST = NARROW ? 4 : W::SCALED || TOKENS == 4 ? 8 : TOKENS == 8 ? ROWS_ROUND_M8 : ROWS_ROUND_M16;
    constexpr int ROUND = EIGHTS < MOST ? EIGHTS : MOST;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float* row = h + int64_t(token(i)) * K + k;
      const int n = token(i) < M ? packs : 0;
      squares[i] = 0.f;
#pragma unroll
      for (int e0 = 0; e0 < EIGHTS; e0 += ROUND) {
        float4 v[ROUND][2];
#pragma unroll
        for (int e = 0; e < ROUND; e++) {
          const int c = (e0 + e) / (W::PACK / 8), at = c * STRETCH + (e0 + e) % (W::PACK / 8) * 8;
#pragma unroll
          for (int q = 0; q < 2; q++) v[e][q] = c < n ? ld_global_f4(row + at + 4 * q) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int e = 0; e < ROUND; e++) {
          const int c = (e0 + e) / (W::PACK / 8), at = c * STRETCH + (e0 + e) % (W::PACK / 8) * 8;
          float g8[8];
          unpack_bf16(g8, c < packs ? *reinterpret_cast<const uint4*>(weight + at) : make_uint4(0, 0, 0, 0));
#pragma unroll
          for (int q = 0; q < 2; q++) {
            const float4 a = v[e][q];
            const float f[4] = {a.x * g8[4 * q] * W::X_SCALE, a.y * g8[4 * q + 1] * W::X_SCALE, a.z * g8[4 * q + 2] * W::X_SCALE,
                                a.w * g8[4 * q + 3] * W::X_SCALE};
            squares[i] = fmaf(a.x, a.x, fmaf(a.y, a.y, fmaf(a.z, a.z, fmaf(a.w, a.w, squares[i]))));
            split(i, c, (e0 + e) % (W::PACK / 8) * 2 + q, f);
          }
        }
        uint32_t all = 0;
#pragma unroll
        for (int e = 0; e < ROUND; e++)
#pragma unroll
          for (int q = 0; q < 4; q++) all |= x[(e0 + e) / (W::PACK / 8)][(e0 + e) % (W::PACK / 8) * 2 + q / 2][NT - 1][q % 2];
        after(row, all, never);
      }
    }
  }
  // One tile, whose first slot is `base`: the products of `now`, while stages of `next` (or of this one) are requested; the warp's sums into
  // part[token][row].
  DEVICE void tile(int base, const Aim& now, const Aim& next, float* part) {
    constexpr int CHAINS = (TALL || NARROW) && NT == 1 ? 2 : 1;  // an instruction waits for the one before it in its chain
    float c[CHAINS * NT][4];
#pragma unroll
    for (int n = 0; n < CHAINS * NT; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      const int slot = RING > STAGES ? base + i : i % RING;
      cp_async_wait<RING - 1>();
      __syncwarp();  // what the other lanes have copied
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const uint4 r0 = (p ? other : from)[slot * 128], r1 = (p ? other : from)[slot * 128 + 64];
#pragma unroll
        for (int s = 0; s < W::STEPS; s++) {
          uint32_t a[4];
          W::operand(a, r0, r1, s);
#pragma unroll
          for (int n = 0; n < NT; n++) W::mma(c[s % CHAINS * NT + n], a, x[2 * i + p][s][n]);
        }
        __syncwarp();  // all have read this half; and the compiler keeps one half at a time in registers
      }
      if (RING >= STAGES)
        request(slot, next, i);
      else
        request(slot, i + RING < STAGES ? now : next, (i + RING) % STAGES);
    }
    if (CHAINS == 2)
#pragma unroll
      for (int r = 0; r < 4; r++) c[0][r] += c[NT][r];
    const float scale = PARTS == 2 ? 1.f / W::X_SCALE : 1.f / W::PLAIN_SCALE;
#pragma unroll
    for (int j = 0; j < (TOKENS + 7) / 8; j++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        float y = c[PARTS * j % NT][r];
        if (TOKENS == 4) y = fmaf(__shfl_xor_sync(FULL_MASK, y, 2), W::LOW, y);
        if (PARTS == 2 && TOKENS > 4) y = fmaf(c[(2 * j + 1) % NT][r], W::LOW, y);
        if (TOKENS > 4 || t() < 2) part[(8 * j + 2 * t() + r % 2) * COLUMN + g() + r / 2 * 8] = y * scale;
      }
  }
};
