// gemv_each_flight.cuh - what the engines of include/gemv_each.cuh share: the rows of a pass, x and sums of each, and how weights make room.
#pragma once
#include "gemv_flight.cuh"

// This block's rows of the pass.
struct PassRows {
  int first, count;
};
DEVICE PassRows pass_rows(int M, int group) {
  const int first = int(blockIdx.y) * group;
  return {first, min(group, M - first)};
}

// Sums of each of them, one behind the other; of `chunk` rows of W.
template <class Sum>
struct PassSums {
  float* part;
  int chunk;
  DEVICE Sum of(int m) const { return Sum{part + m * (chunk + 1) * Sum::WIDTH, chunk}; }
};

// Where a block's threads keep x: PACKS of 16 bytes a row, a thread's own next to its neighbours'.
template <int PACKS>
struct PassInput {
  uint4* first;  // this thread's
  DEVICE uint4* at(int m, int q) const { return first + (m * PACKS + q) * int(blockDim.x); }
  static DEVICE PassInput in(unsigned char* memory) { return {reinterpret_cast<uint4*>(memory) + threadIdx.x}; }
  static DEVICE float* behind(unsigned char* memory, int group) {
    return reinterpret_cast<float*>(memory + 16 * group * PACKS * int(blockDim.x));
  }
};

// What takes the place of Q rows in flight, P at once, pack by pack as the last rows of the pass consume them.
template <int P, int Q, class InFlight>
struct Refill {
  decltype(InFlight::pairs) pairs[Q / P];
  bool more[Q / P];
  DEVICE Refill(InFlight& flight, bool last) {
#pragma unroll
    for (int q = 0; q < Q / P; q++) {
      more[q] = last && flight.pairs.more();
      if (more[q]) flight.pairs.advance();
      pairs[q] = flight.pairs;
    }
  }
  DEVICE void load(InFlight& flight, int r, int c) const {
#pragma unroll
    for (int q = 0; q < Q / P; q++) {
      if (!more[q]) continue;
      flight.packs[r + P * q][c] = ld_once_v4(pairs[q].a + flight.at[c]);
      if (P == 2) flight.packs[r + P * q + P - 1][c] = ld_once_v4(pairs[q].b() + flight.at[c]);
    }
  }
};
