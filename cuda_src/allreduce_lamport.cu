// allreduce_lamport.cu - one-shot push all-reduce of small messages: every rank stores its vector into every peer's memory and polls its own.
//
//   out[i] = Σ_r in_r[i]  as bf16,  or  h[i] += Σ_r in_r[i]  in fp32;  summed in rank order in fp32: all ranks hold the same bits
//
// Receive memory of a rank: [3 buffers][world sources][capacity packs], armed with the sentinel (include/lamport.cuh). Call f uses buffer
// f mod 3. A rank's own vector never leaves its registers.
//
// Why three buffers. While this rank is in call f, a peer can be in f or f + 1: it cannot end f + 1 without this rank's data of f + 1. So
// peers may be storing into buffers f and f + 1, and the one buffer that is safe to re-arm is that of f - 1, which this rank has read
// to the end. The next store into it belongs to call f + 2, and a peer starts that only after it has this rank's data of f + 1, pushed
// after this launch has ended, re-arming included. With two buffers the buffer of f - 1 is that of f + 1, and re-arming wipes early data.
//
// The length re-armed is the one the buffer was filled with (control.length), not this call's: sizes may change between calls.
// The rotation lives in device memory and is advanced by the last block to finish, so replays of a graph need no argument from the host.
//
// grid: any, the same or not on the ranks; block: up to 512. bytes moved: out over the link (world - 1)·16·n, in likewise.
// PRECOND  n packs of 16 bytes, n <= capacity; in, out, buffers 16-byte aligned; buffers armed and control zero before the first call on
// any rank. PRECOND  one stream: call f + 1 starts after call f has ended (a dependent launch must griddep_wait, as this kernel does).
// minimum arch: sm_80
#include "include/lamport.cuh"

constexpr int BUFFERS = 3;

struct LamportControl {
  uint32_t rotation;         // buffer of the next call
  uint32_t arrived;          // blocks of this call that are done
  uint32_t length[BUFFERS];  // packs a source that each buffer was last filled with
  uint32_t calls;            // for the fault record
};

template <bool ADD>
DEVICE void allreduce_lamport(void* out, const uint4* in, const Peers& peers, LamportControl* control, int rank,
                              int world, int n, int capacity, const PollLimit& limit) {
  griddep_launch();
  griddep_wait();
  const uint32_t buffer = control->rotation, previous = (buffer + BUFFERS - 1) % BUFFERS, call = control->calls + 1;
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  uint4* mine = peers.packs(rank);
  Watch watch = watch_start(limit);

  for (int i = first; i < n; i += stride) {
    const uint4 v = sanitise(in[i]);
    for (int d = 1; d < world; d++) {  // each rank starts with its right neighbour: no two begin at the same one
      const int peer = (rank + d) % world;
      st_volatile_v4(peers.packs(peer) + (int64_t(buffer) * world + rank) * capacity + i, v);
    }
  }
  const int stale = int(control->length[previous]);
  for (int i = first; i < stale * world; i += stride) {
    const int source = i / stale;
    if (source != rank) st_volatile_v4(mine + (int64_t(previous) * world + source) * capacity + i % stale, armed_pack());
  }
  for (int i = first; i < n; i += stride) {
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    for (int source = 0; source < world; source++) {
      const uint4* slot = mine + (int64_t(buffer) * world + source) * capacity + i;
      add_pack(sum, source == rank ? sanitise(in[i]) : poll_pack(slot, watch, rank, source, call));
    }
    store_sum<ADD>(out, i, sum);
  }

  __syncthreads();
  if (threadIdx.x == 0 && atom_inc_acq_rel_gpu(&control->arrived, gridDim.x - 1) == gridDim.x - 1) {
    control->length[buffer] = n;
    control->rotation = (buffer + 1) % BUFFERS;
    control->calls = call;
  }
}

KERNEL(512) void
allreduce_lamport_bf16(bf16* out,                // [8n]
                       const bf16* in,           // [8n]
                       BY_VALUE Peers peers,     // each rank's receive memory, [3, world, capacity] packs
                       LamportControl* control,  // [1] this rank's
                       int rank, int world, int n, int capacity, BY_VALUE PollLimit limit) {
  allreduce_lamport<false>(out, reinterpret_cast<const uint4*>(in), peers, control, rank, world, n, capacity, limit);
}

KERNEL(512) void
allreduce_lamport_add_bf16(float* h,                 // [8n] residual stream, in place
                           const bf16* in,           // [8n]
                           BY_VALUE Peers peers,     // each rank's receive memory, [3, world, capacity] packs
                           LamportControl* control,  // [1] this rank's
                           int rank, int world, int n, int capacity, BY_VALUE PollLimit limit) {
  allreduce_lamport<true>(h, reinterpret_cast<const uint4*>(in), peers, control, rank, world, n, capacity, limit);
}
