// allreduce_twoshot.cu - reduce-scatter and all-gather in one kernel, for messages where bandwidth counts (prefill).
//
//   out[i] = Σ_r in_r[i]  as bf16,  or  h[i] += bf16(Σ_r in_r[i])  in fp32;  summed in rank order in fp32, rounded once, then spread
//
// Each rank owns 1/world of the packs of every block. (1) The vector goes into this rank's own memory. (2) Barrier. (3) The owner reads its
// share from every peer, sums it and stores the sum into every rank's result memory, its own included. (4) Barrier. (5) The result is
// read from local memory. Over the link: (world - 1)/world·16·n in for (3) and as much out, instead of (world - 1)·16·n.
//
// The kernel runs two epochs of the flag protocol (include/flags.cuh), 2c - 1 and 2c of call c. Payload and result have two buffers each,
// by the parity of c: the buffer of call c is written again in c + 2, after this rank has passed a barrier of c + 1, which a peer signals
// only after it has ended call c. Every step requests several packs a thread before it uses the first: a link's round trip is about 2 µs,
// and 450 GB/s want most of a megabyte under way.
//
// entry points: _r2, _r4, _r8: for up to that many ranks. grid: the same on all ranks; block: at least world threads, up to 512.
// PRECOND  n packs of 16 bytes, n <= capacity, grid <= blocks; everything 16-byte aligned, in and out not overlapping; flags and epochs zero
// before the first call; one stream. PRECOND  all blocks of all ranks can be resident at once. minimum arch: sm_80
#include "include/flags.cuh"

constexpr int BATCH = 4;  // packs that a thread has under way

template <int RANKS, class Out>
DEVICE void allreduce_twoshot(Out out, const bf16* in, const Flags& end, int n) {
  griddep_launch();
  Watch watch;
  // This block's packs; rank r owns the r-th part of them.
  const int share = (n + int(gridDim.x) - 1) / int(gridDim.x), begin = min(n, int(blockIdx.x) * share), stop = min(n, begin + share);
  const int part = (stop - begin + end.world - 1) / end.world, mine = min(stop, begin + end.rank * part), mine_stop = min(stop, mine + part);
  const int step = blockDim.x;
  griddep_wait();
  const uint32_t epoch = read_epoch(end) + 2;
  const int64_t half = int64_t(epoch / 2 & 1) * end.capacity;

  for (int i = begin + int(threadIdx.x); i < stop; i += BATCH * step) {
    uint4 v[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      if (i + k * step < stop) v[k] = ld_global_v4(in + 8 * int64_t(i + k * step));
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      if (i + k * step < stop) st_volatile_v4(end.data.packs(end.rank) + half + i + k * step, v[k]);
  }
  block_barrier(end, epoch - 1, watch);
  constexpr int READS = RANKS == 8 ? 1 : BATCH / (RANKS / 2);
  for (int i = mine + int(threadIdx.x); i < mine_stop; i += READS * step) {
    uint4 v[READS][RANKS];
#pragma unroll
    for (int k = 0; k < READS; k++)
      if (i + k * step < mine_stop) read_sources(v[k], ld_global_v4(in + 8 * int64_t(i + k * step)), end, half + i + k * step);
#pragma unroll
    for (int k = 0; k < READS; k++) {
      if (i + k * step >= mine_stop) break;
      float sum[8];
      sum_sources(sum, v[k]);
      const uint4 packed = pack_bf16x8(sum);
      for (int d = 0; d < end.world; d++) st_volatile_v4(end.results.packs((end.rank + d) % end.world) + half + i + k * step, packed);
    }
  }
  block_barrier(end, epoch, watch);
  write_epoch(end, epoch);
  for (int i = begin + int(threadIdx.x); i < stop; i += BATCH * step) {
    uint4 v[BATCH];
    Out outs[BATCH] = {out, out, out, out};
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      if (i + k * step < stop) v[k] = ld_volatile_v4(end.results.packs(end.rank) + half + i + k * step), outs[k].aim(i + k * step), outs[k].fetch();
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      if (i + k * step >= stop) break;
      float sum[8];
      unpack_bf16(sum, v[k]);
      outs[k].store(sum);
    }
  }
}

#define ALLREDUCE_TWOSHOT(RANKS)                                                                                                  \
  KERNEL_OCC(512, 1) void allreduce_twoshot_bf16_r##RANKS(bf16* out,          /* [8n] */                                          \
                                                          const bf16* in,     /* [8n] */                                          \
                                                          BY_VALUE Flags end, /* this rank's */                                   \
                                                          int n) {                                                                       \
    allreduce_twoshot<RANKS>(Replace{reinterpret_cast<uint4*>(out), nullptr}, in, end, n);                                          \
  }                                                                                                                                      \
  KERNEL_OCC(512, 1) void allreduce_twoshot_add_bf16_r##RANKS(float* h,           /* [8n] residual stream, in place */            \
                                                              const bf16* in,     /* [8n] */                                      \
                                                              BY_VALUE Flags end, /* this rank's */                               \
                                                              int n) {                                                                   \
    allreduce_twoshot<RANKS>(Accumulate{h, nullptr, {}, {}}, in, end, n);                                \
  }
ALLREDUCE_TWOSHOT(2)
ALLREDUCE_TWOSHOT(4)
ALLREDUCE_TWOSHOT(8)
