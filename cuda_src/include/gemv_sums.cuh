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

// Shared memory of a block: part[rows + 1][WARPS], each warp's sum of a row; the last row for Σ h². A row's sums are neighbours, WARPS of them
// whatever the block has, zeros behind its own: a thread adds them up with a few loads at once. Then `rows` constants.
template <int WARPS>
struct Sums {
  static_assert(WARPS % 4 == 0, "whole float4");
  static constexpr int WIDTH = WARPS;
  float* part;
  int rows;
  DEVICE float* constants() const { return part + (rows + 1) * WARPS; }
  // This warp's sum of a row; zeros where warps would be that the block does not have.
  DEVICE void put(int row, float sum) const {
    const int warps = int(blockDim.x) / WARP, warp = int(threadIdx.x) / WARP;
    part[row * WARPS + warp] = sum;
#pragma unroll 1
    for (int w = warp + warps; w < WARPS; w += warps) part[row * WARPS + w] = 0.f;
  }
  // Row j over all warps, in every thread that asks. Valid after the engine's multiply.
  DEVICE float total(int j) const {
    const float4* p = reinterpret_cast<const float4*>(part + j * WARPS);
    float4 s = p[0];
#pragma unroll
    for (int i = 1; i < WARPS / 4; i++) {
      const float4 v = p[i];
      s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
    }
    return (s.x + s.y) + (s.z + s.w);
  }
  // RMSNorm's scalar, from the last row.
  DEVICE float inverse_rms(int K, float eps) const { return rsqrtf(fmaf(total(rows), rcp_approx(float(K)), eps)); }
};

// A row's scale, 1 for weights that have none. Requested before griddep_wait for a thread's first row.
template <class Engine>
DEVICE float scale_of(const float* scale, int i) { return Engine::W::SCALED ? scale[i] : 1.f; }

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
