// bandwidth.cu - the read ceiling: streams a buffer through every multiprocessor and does nothing with it. The yardstick of all benches.
//
// grid: any (blocks stride over the buffer); block: 512. bytes moved: 16·n, read once.
// PRECOND  data 16-byte aligned; larger than the L2, or it measures the L2. minimum arch: sm_80
#include "include/ptx.cuh"

constexpr int UNROLL = 8;

KERNEL(512) void
read_v4(const uint4* data,  // [n]
        uint32_t* sink,     // [1] written only if all words read xor to a value that random data does not give: keeps the loads alive
        int64_t n) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  uint32_t x = 0;
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (UNROLL - 1) * stride < n; i += UNROLL * stride) {
    uint4 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) v[u] = ld_stream_v4(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) x ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < n; i += stride) {
    const uint4 v = ld_stream_v4(data + i);
    x ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (x == 0x5eed5eedu) *sink = x;
}
