// allreduce_flag.cu - all-reduce by a flag barrier and peer reads: each rank leaves its vector in its own memory, signals, reads the others'.
//
//   out[i] = Σ_r in_r[i]  as bf16,  or  h[i] += Σ_r in_r[i]  in fp32;  summed in rank order in fp32
//
// Block b of every rank handles the same packs, so block b only waits for the blocks b of its peers. Payload and flag travel separately:
// the payload is stored, the block's barrier and a system fence order it before the flag's release, the reader acquires the flag and then
// reads the payload over the link. Compare allreduce_lamport.cu, where the payload is the flag and nothing needs ordering.
//
// Two payload buffers and two flag words, used in turn by the epoch's parity (include/lamport.cuh has the argument). A rank overwrites
// the buffer of epoch e in e + 2, after a peer has signalled e + 1, which that peer does after it has ended e, reads included: so no
// barrier is needed at the end.
//
// grid: any, the same on all ranks, at most `blocks`; block: up to 512, at least world threads. bytes over the link: (world - 1)·16·n in.
// PRECOND  n packs of 16 bytes, n <= capacity; everything 16-byte aligned; flags, epoch and arrived zero before the first call on any
// rank; one stream. minimum arch: sm_80
#include "include/lamport.cuh"

struct FlagControl {
  uint32_t epoch;    // of the last call; the first call is epoch 1
  uint32_t arrived;  // blocks of this call that are done
};

template <bool ADD>
DEVICE void allreduce_flag(void* out, const uint4* in, const Peers& data, const Peers& flags, FlagControl* control,
                           int rank, int world, int n, int capacity, int blocks, const PollLimit& limit) {
  griddep_launch();
  griddep_wait();
  const uint32_t epoch = control->epoch + 1;
  const int64_t half = int64_t(epoch & 1) * capacity;
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  Watch watch = watch_start(limit);

  for (int i = first; i < n; i += stride) st_volatile_v4(data.packs(rank) + half + i, in[i]);
  block_barrier(flags, epoch, rank, world, blocks, watch);
  for (int i = first; i < n; i += stride) {
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    for (int source = 0; source < world; source++) add_pack(sum, source == rank ? in[i] : ld_volatile_v4(data.packs(source) + half + i));
    store_sum<ADD>(out, i, sum);
  }

  __syncthreads();
  if (threadIdx.x == 0 && atom_inc_acq_rel_gpu(&control->arrived, gridDim.x - 1) == gridDim.x - 1) control->epoch = epoch;
}

KERNEL(512) void
allreduce_flag_bf16(bf16* out,             // [8n]
                    const bf16* in,        // [8n]
                    BY_VALUE Peers data,   // each rank's payload, [2, capacity] packs
                    BY_VALUE Peers flags,  // each rank's flags, [2, blocks, 8] words
                    FlagControl* control,  // [1] this rank's
                    int rank, int world, int n, int capacity, int blocks, BY_VALUE PollLimit limit) {
  allreduce_flag<false>(out, reinterpret_cast<const uint4*>(in), data, flags, control, rank, world, n, capacity, blocks, limit);
}

KERNEL(512) void
allreduce_flag_add_bf16(float* h,              // [8n] residual stream, in place
                        const bf16* in,        // [8n]
                        BY_VALUE Peers data,   // each rank's payload, [2, capacity] packs
                        BY_VALUE Peers flags,  // each rank's flags, [2, blocks, 8] words
                        FlagControl* control,  // [1] this rank's
                        int rank, int world, int n, int capacity, int blocks, BY_VALUE PollLimit limit) {
  allreduce_flag<true>(h, reinterpret_cast<const uint4*>(in), data, flags, control, rank, world, n, capacity, blocks, limit);
}
