// gemm_operand_sm90.cuh - how an operand's tile gets into shared memory: the copies of include/gemm_sm90.cuh.
//
// A tile's rows as they are: one box (a copy costs the engine about a hundred cycles besides its rows). Pairs that one thread must end with
// (gate and up; the two dimensions that RoPE turns into each other): the tile's first half holds firsts, its second half their seconds, so that
// with the pairs in Q they are ROWS / 2 columns apart, and in P in the two slabs of 64 rows that a warpgroup multiplies. They come in units of
// rows that follow each other in memory.
// row(): which row of the matrix is row r of the tile's half. load() brings a block's own slice of its tile from column k on; share() brings
// the half of a slice that falls to this block of a cluster of two, to both of them.
#pragma once
#include "wgmma.cuh"

constexpr uint16_t BOTH_BLOCKS = 3;

// Tensor map: (K, rows), box (slice, ROWS), or half of ROWS where the tile is shared.
template <int ROWS>
struct PlainOperand {
  const TensorMap& map;
  DEVICE int row(int tile, int half, int r) const { return tile * ROWS + half * (ROWS / 2) + r; }
  DEVICE void load(unsigned char* dst, uint64_t* bar, int tile, int k) const { tma_load_2d(dst, map, bar, k, tile * ROWS); }
  DEVICE void share(unsigned char* dst, uint64_t* bar, int tile, int k, int rank) const {
    const int first = rank * (ROWS / 2);
    tma_multicast_2d(dst + first * SWIZZLE_ROW, map, bar, k, tile * ROWS + first, BOTH_BLOCKS);
  }
};

// Tensor map: (K, rows), box (slice, unit). Firsts come in runs of `unit << shift` rows, one `stride` behind the other; a tile has UNITS units of
// them, ROWS / 2 / unit.
template <int ROWS>
struct PairOperand {
  const TensorMap& map;
  int unit, units, shift, stride;
  int apart;  // rows from a first to its second
  DEVICE PairOperand(const TensorMap& m, int u, int run, int s, int a) : map(m), unit(u), units(ROWS / 2 / u), shift(0), stride(s), apart(a) {
    while (u << shift < run) shift++;
  }
  DEVICE int first(int u) const { return (u >> shift) * stride + (u & ((1 << shift) - 1)) * unit; }
  DEVICE int row(int tile, int half, int r) const { return first(tile * units + r / unit) + r % unit + half * apart; }
  DEVICE void load(unsigned char* dst, uint64_t* bar, int tile, int k) const {
    for (int i = 0; i < units; i++) {
      const int at = first(tile * units + i);
      tma_load_2d(dst + i * unit * SWIZZLE_ROW, map, bar, k, at);
      tma_load_2d(dst + (ROWS / 2 + i * unit) * SWIZZLE_ROW, map, bar, k, at + apart);
    }
  }
  DEVICE void share(unsigned char* dst, uint64_t* bar, int tile, int k, int rank) const {
    for (int i = 0; i < units; i++)
      tma_multicast_2d(dst + (rank * (ROWS / 2) + i * unit) * SWIZZLE_ROW, map, bar, k, first(tile * units + i) + rank * apart, BOTH_BLOCKS);
  }
};

// Heads of 128 dimensions: a tile has one head of its own and `EXTRA` pairs of another, which 64 / EXTRA tiles share; so a half comes in two boxes.
// Tensor maps: (K, rows), boxes (slice, 64) and (slice, EXTRA).
template <int ROWS>
struct HeadOperand {
  static constexpr int HALF = 64, EXTRA = ROWS / 2 - HALF, SHARERS = HALF / EXTRA;
  static_assert(HALF % EXTRA == 0, "a head is shared by whole tiles");
  const TensorMap &map, &extra;
  static DEVICE int own_head(int tile) { return tile / SHARERS * (SHARERS + 1) + tile % SHARERS; }
  static DEVICE int shared_head(int tile) { return tile / SHARERS * (SHARERS + 1) + SHARERS; }
  static DEVICE int shared_pair(int tile) { return tile % SHARERS * EXTRA; }
  DEVICE int own_row(int tile, int half) const { return own_head(tile) * (2 * HALF) + half * HALF; }
  DEVICE int shared_row(int tile, int half) const { return shared_head(tile) * (2 * HALF) + half * HALF + shared_pair(tile); }
  DEVICE int row(int tile, int half, int r) const { return r < HALF ? own_row(tile, half) + r : shared_row(tile, half) + r - HALF; }
  DEVICE void load(unsigned char* dst, uint64_t* bar, int tile, int k) const {
    for (int half = 0; half < 2; half++) {
      tma_load_2d(dst + half * (ROWS / 2) * SWIZZLE_ROW, map, bar, k, own_row(tile, half));
      tma_load_2d(dst + (half * (ROWS / 2) + HALF) * SWIZZLE_ROW, extra, bar, k, shared_row(tile, half));
    }
  }
  DEVICE void share(unsigned char* dst, uint64_t* bar, int tile, int k, int rank) const {
    tma_multicast_2d(dst + rank * (ROWS / 2) * SWIZZLE_ROW, map, bar, k, own_row(tile, rank), BOTH_BLOCKS);
    tma_multicast_2d(dst + (rank * (ROWS / 2) + HALF) * SWIZZLE_ROW, extra, bar, k, shared_row(tile, rank), BOTH_BLOCKS);
  }
};
