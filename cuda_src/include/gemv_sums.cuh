// gemv_sums.cuh - what include/gemv.cuh and its engine share: a block's rows, its shared memory, the rows' addresses.
#pragma once
#include "reduce.cuh"
#include "vec.cuh"

// A block's share of `units`, of which there are as many as blocks at least: [begin, begin + count). One division, as all of it precedes the
// first request.
struct Share {
  int begin, count;
};
DEVICE Share share_of(int units, unsigned b, unsigned blocks) {
  const unsigned each = unsigned(units) / blocks, rest = unsigned(units) - each * blocks;
  return {int(b * each + min(b, rest)), int(each + (b < rest))};
}
DEVICE Share block_share(int units) { return share_of(units, blockIdx.x, gridDim.x); }

// Shared memory of a block: part[warp][rows + 1] sums, the last column for Σ h²; then two arrays of `rows` constants.
struct Sums {
  float* part;
  int rows;
  DEVICE float* warp(int w) const { return part + w * (rows + 1); }
  DEVICE float* constants(int i) const { return part + int(blockDim.x) / WARP * (rows + 1) + i * rows; }
  // Column j over all warps, in every thread that asks. Valid after the engine's multiply.
  DEVICE float total(int j) const {
    float s = 0.f;
#pragma unroll 8
    for (int w = 0; w < int(blockDim.x) / WARP; w++) s += warp(w)[j];
    return s;
  }
  // RMSNorm's scalar, from the last column.
  DEVICE float inverse_rms(int K, float eps) const { return rsqrtf(total(rows) / float(K) + eps); }
};

// n constants of the block into shared memory: they arrive while the rows do, and are read after multiply's barrier.
DEVICE void stage(float* dst, const float* src, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) dst[i] = src[i];
}

template <class T>
struct RowsPlain {
  const T* w;  // the block's first row
  int K;
  DEVICE const T* row(int j) const { return w + int64_t(j) * K; }
};
// Row 2i is the gate of the block's unit i, row 2i + 1 its up.
template <class T>
struct RowsGateUp {
  const T *gate, *up;
  int K;
  DEVICE const T* row(int j) const { return (j % 2 ? up : gate) + int64_t(j / 2) * K; }
};
// Rows 2i and 2i + 1 are dimensions d and d + HD/2 of a head, which RoPE rotates into each other; unit p is dimension p % (HD/2) of head
// p / (HD/2).
template <class T>
struct RowsRotary {
  const T* w;
  int K, first, log_half;
  DEVICE int index(int j) const {
    const int p = first + j / 2, head = p >> log_half;
    return (head << log_half) + p + (j % 2 << log_half);  // head·HD + p % (HD/2), the second HD/2 further
  }
  DEVICE const T* row(int j) const { return w + int64_t(index(j)) * K; }
};
