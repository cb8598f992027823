// gemv_ahead.cuh - the engine of include/gemv_fma.cuh with more rows on their way before x is here: in shared memory.
//
// Registers hold R rows, and while the previous kernel ends and x arrives there is time to fetch more: the rows after those are copied in bulk
// into the shared memory that the launcher gave beyond the sums, before griddep_wait too (rows ahead). They are multiplied once x is here, right
// after the first R rows, whose registers by then wait for the rows that follow.
// dynamic shared memory: the sums; for P rows ahead 16 + P·(bytes of a row) more, from the next multiple of 16 on. minimum arch: sm_90
#pragma once
#include "gemv_fma.cuh"
#include "wgmma.cuh"

// Rows first … first + count - 1 of the block in shared memory, and the barrier that counts their bytes.
struct Ahead {
  unsigned char* rows;
  uint64_t* bar;
  int first, count;
};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
DEVICE Ahead rows_ahead(const Sums&, int, int) { return {nullptr, nullptr, 0, 0}; }
#else
DEVICE Ahead rows_ahead(const Sums& sums, int first, int row_bytes) {
  const int used = (sums.bytes() + 15) / 16 * 16, room = int(dynamic_shared_bytes()) - used - 16;
  unsigned char* bar = reinterpret_cast<unsigned char*>(sums.part) + used;
  return {bar + 16, reinterpret_cast<uint64_t*>(bar), first, max(0, min(room / row_bytes, sums.rows - first))};
}
#endif

// Warp 0 asks for the rows ahead. Ends with a barrier of the block, so that all may wait on theirs.
template <class Rows>
DEVICE void request_ahead(const Ahead& ahead, const Rows& rows, int row_bytes) {
  if (ahead.count == 0) return;
  if (threadIdx.x < WARP) {
    if (threadIdx.x == 0) {
      mbarrier_init(ahead.bar, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect_tx(ahead.bar, uint32_t(ahead.count * row_bytes));
    }
    __syncwarp();
    for (int i = threadIdx.x; i < ahead.count; i += WARP) bulk_load(ahead.rows + i * row_bytes, rows.row(ahead.first + i), uint32_t(row_bytes), ahead.bar);
  }
  __syncthreads();
}

// A warp's R sums of rows j0 … into its row of the block's sums.
template <int R>
DEVICE void store_sums(float* mine, float (&s)[R], int j0, int count) {
  const int lane = threadIdx.x % WARP;
  const float sum = reduce_rows<R>(s);
  const int j = j0 + lane / (WARP / R);
  if (lane % (WARP / R) == 0 && j < count) mine[j] = sum;
}

// The rows in shared memory.
template <class W, int C, int R, class X>
DEVICE void multiply_ahead(float* mine, const Ahead& ahead, const X& x, int K) {
  const int row_bytes = K * int(sizeof(typename W::type)), end = ahead.first + ahead.count;
  mbarrier_wait(ahead.bar, 0);
  for (int j0 = ahead.first; j0 < end; j0 += R) {
    float s[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
      const unsigned char* row = ahead.rows + min(j0 + r - ahead.first, ahead.count - 1) * row_bytes;
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int c = 0; c < C; c++) {
        const int k = (c * int(blockDim.x) + int(threadIdx.x)) * W::PACK;
        if (k < K) dot_pack<W>(sum, *reinterpret_cast<const uint4*>(row + k * int(sizeof(typename W::type))), x, c);
      }
      s[r] = sum[0] + sum[1];
    }
    store_sums<R>(mine, s, j0, end);
  }
}

// All rows of the block, as multiply_rows.
template <class W, int C, int R, class X, class Rows>
DEVICE void multiply_rows_ahead(const Sums& sums, Flight<W, C, R>& f, const Ahead& ahead, const X& x, const Rows& rows, int K, float square_sum) {
  const int count = sums.rows;
  float* mine = sums.warp(int(threadIdx.x) / WARP);
  int next = R + ahead.count;
  for (int j0 = 0; j0 < count; j0 = next, next += R) {
    float s[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
      float sum[2] = {0.f, 0.f};
      const typename W::type* row = next + r < count ? rows.row(next + r) : nullptr;
#pragma unroll
      for (int c = 0; c < C; c++) {
        dot_pack<W>(sum, f.v[r][c], x, c);
        f.v[r][c] = request_pack<W>(row, c, K);
      }
      s[r] = sum[0] + sum[1];
    }
    store_sums<R>(mine, s, j0, j0 == 0 ? min(R, count) : count);
    if (j0 == 0 && ahead.count) multiply_ahead<W, C, R>(mine, ahead, x, K);
  }
  square_sum = warp_sum(square_sum);
  if (threadIdx.x % WARP == 0) mine[count] = square_sum;
  __syncthreads();
}

template <class W_, int C, int R, bool NORMED>
struct FmaAhead : Fma<W_, C, R, NORMED> {
  using W = W_;
  Ahead ahead;
  template <class Rows>
  DEVICE void request(const Sums& sums, const Rows& rows, int K) {
    request_first(this->flight, rows, sums.rows, K);
    const int row_bytes = K * int(sizeof(typename W::type));
    ahead = rows_ahead(sums, R, row_bytes);
    request_ahead(ahead, rows, row_bytes);
  }
  template <class Rows>
  DEVICE void multiply(const Sums& sums, const Rows& rows, int K, float square_sum) {
    if (NORMED)
      multiply_rows_ahead(sums, this->flight, ahead, this->weighted, rows, K, square_sum);
    else
      multiply_rows_ahead(sums, this->flight, ahead, this->plain, rows, K, square_sum);
  }
};
