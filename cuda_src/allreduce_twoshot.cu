// allreduce_twoshot.cu - reduce-scatter and all-gather in one kernel, for messages where bandwidth counts (prefill).
//
//   out[i] = Σ_r in_r[i]  as bf16,  or  h[i] += bf16(Σ_r in_r[i])  in fp32;  summed in rank order in fp32, rounded once, then spread
//
// Each rank owns 1/world of the packs of every block. (1) The vector goes into this rank's own memory. (2) Barrier. (3) The owner reads its
// share from every peer, sums it and stores the sum into every rank's result memory, its own included. (4) Barrier. (5) The result is
// read from local memory. Over the link: (world - 1)/world·16·n in for (3) and as much out, instead of (world - 1)·16·n.
//
// The kernel runs two epochs of the flag protocol (include/lamport.cuh), 2c - 1 and 2c of call c. Payload and result have two buffers each,
// by the parity of c: the buffer of call c is written again in c + 2, after this rank has passed a barrier of c + 1, which a peer signals
// only after it has ended call c.
//
// grid: any, the same on all ranks, at most `blocks`; block: up to 512, at least world threads.
// PRECOND  n packs of 16 bytes, n <= capacity; everything 16-byte aligned; flags and control zero before the first call; one stream.
// minimum arch: sm_80
#include "include/lamport.cuh"

struct TwoShotControl {
  uint32_t call;     // calls made so far
  uint32_t arrived;  // blocks of this call that are done
};

template <bool ADD>
DEVICE void allreduce_twoshot(void* out, const uint4* in, const Peers& data, const Peers& results,
                              const Peers& flags, TwoShotControl* control, int rank, int world, int n, int capacity, int blocks,
                              const PollLimit& limit) {
  griddep_launch();
  griddep_wait();
  const uint32_t call = control->call + 1;
  const int64_t half = int64_t(call & 1) * capacity;
  // This block's packs are those of its rank range; rank r owns the r-th part of them.
  const int share = (n + int(gridDim.x) - 1) / int(gridDim.x), begin = int(blockIdx.x) * share, end = min(n, begin + share);
  const int part = (max(end - begin, 0) + world - 1) / world, mine = begin + rank * part, mine_end = min(end, mine + part);
  Watch watch = watch_start(limit);

  for (int i = begin + int(threadIdx.x); i < end; i += blockDim.x) st_volatile_v4(data.packs(rank) + half + i, in[i]);
  block_barrier(flags, 2 * call - 1, rank, world, blocks, watch);
  for (int i = mine + int(threadIdx.x); i < mine_end; i += blockDim.x) {
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    for (int source = 0; source < world; source++) add_pack(sum, source == rank ? in[i] : ld_volatile_v4(data.packs(source) + half + i));
    const uint4 v = pack_bf16x8(sum);
    for (int d = 0; d < world; d++) st_volatile_v4(results.packs((rank + d) % world) + half + i, v);
  }
  block_barrier(flags, 2 * call, rank, world, blocks, watch);
  for (int i = begin + int(threadIdx.x); i < end; i += blockDim.x) {
    float sum[8];
    unpack_bf16(sum, ld_volatile_v4(results.packs(rank) + half + i));
    store_sum<ADD>(out, i, sum);
  }

  __syncthreads();
  if (threadIdx.x == 0 && atom_inc_acq_rel_gpu(&control->arrived, gridDim.x - 1) == gridDim.x - 1) control->call = call;
}

KERNEL(512) void
allreduce_twoshot_bf16(bf16* out,                // [8n]
                       const bf16* in,           // [8n]
                       BY_VALUE Peers data,      // each rank's payload, [2, capacity] packs
                       BY_VALUE Peers results,   // each rank's results, [2, capacity] packs
                       BY_VALUE Peers flags,     // each rank's flags, [2, blocks, 8] words
                       TwoShotControl* control,  // [1] this rank's
                       int rank, int world, int n, int capacity, int blocks, BY_VALUE PollLimit limit) {
  allreduce_twoshot<false>(out, reinterpret_cast<const uint4*>(in), data, results, flags, control, rank, world, n, capacity, blocks, limit);
}

KERNEL(512) void
allreduce_twoshot_add_bf16(float* h,                 // [8n] residual stream, in place
                           const bf16* in,           // [8n]
                           BY_VALUE Peers data,      // each rank's payload, [2, capacity] packs
                           BY_VALUE Peers results,   // each rank's results, [2, capacity] packs
                           BY_VALUE Peers flags,     // each rank's flags, [2, blocks, 8] words
                           TwoShotControl* control,  // [1] this rank's
                           int rank, int world, int n, int capacity, int blocks, BY_VALUE PollLimit limit) {
  allreduce_twoshot<true>(h, reinterpret_cast<const uint4*>(in), data, results, flags, control, rank, world, n, capacity, blocks, limit);
}
