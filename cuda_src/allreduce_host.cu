// allreduce_host.cu - the naive all-reduce, whose ranks meet on the host: every rank reads every rank's vector over the link and sums it.
//
//   h[i] += Σ_r in_r[i]  in fp32;  summed in rank order in fp32
//
// The kernel waits for nobody. The host makes sure of both ends (qwen_raw/comm/host.py): before the launch it has waited until every rank
// has written its vector, and before anything overwrites a vector it waits until every rank has read it. Two waits of the host and as many
// launches as ranks for each message: the baseline that explains why the other paths meet on the device. No ordering argument is needed;
// a finished kernel's stores are visible to every kernel that the host launches afterwards.
//
// entry points: _r2, _r4, _r8: for up to that many ranks. grid: any; block: up to 512. bytes over the link: (world - 1)·16·n in.
// PRECOND  n packs of 16 bytes, everything 16-byte aligned. minimum arch: sm_80
#include "include/peers.cuh"

template <int RANKS>
DEVICE void allreduce_host(Accumulate out, const Peers& in, int world, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    uint4 v[RANKS];
    float sum[8];
    out.aim(i), out.fetch();
#pragma unroll
    for (int s = 0; s < RANKS; s++) v[s] = s < world ? ld_volatile_v4(in.packs(s) + i) : make_uint4(0, 0, 0, 0);
    sum_sources(sum, v);
    out.store(sum);
  }
}

#define ALLREDUCE_HOST(RANKS)                                                                                      \
  KERNEL(512) void allreduce_host_add_bf16_r##RANKS(float* h,          /* [8n] residual stream, in place */        \
                                                    BY_VALUE Peers in, /* each rank's vector, [8n] */              \
                                                    int world, int n) {                                            \
    allreduce_host<RANKS>(Accumulate{h, nullptr, {}, {}}, in, world, n);                         \
  }
ALLREDUCE_HOST(2)
ALLREDUCE_HOST(4)
ALLREDUCE_HOST(8)
