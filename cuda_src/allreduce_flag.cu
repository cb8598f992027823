// allreduce_flag.cu - all-reduce by a flag barrier and peer reads: each rank leaves its vector in its own memory, signals, reads the others'.
//
//   out[i] = Σ_r in_r[i]  as bf16,  or  h[i] += Σ_r in_r[i]  in fp32;  summed in rank order in fp32
//
// Block b of every rank handles the same packs, so block b only waits for the blocks b of its peers. Payload and flag travel separately:
// the payload is stored, the block's barrier and a system fence order it before the flag's release, the reader acquires the flag and then
// reads the payload over the link: a flag one way, a request back, the data one way. Compare allreduce_lamport.cu, where the payload is the
// flag: one way, and nothing needs ordering.
//
// Two payload buffers and two flag words, used in turn by the epoch's parity (include/flags.cuh has the argument). A rank overwrites
// the buffer of epoch e in e + 2, after a peer has signalled e + 1, which that peer does after it has ended e, reads included: so no
// barrier is needed at the end.
//
// entry points: _r2, _r4, _r8: for up to that many ranks. grid: the same on all ranks; block: at least world threads, up to 512.
// bytes over the link: (world - 1)·16·n in.
// PRECOND  n packs of 16 bytes, n <= capacity, grid <= blocks; everything 16-byte aligned, in and out not overlapping; flags and epochs zero
// before the first call on any rank; one stream. PRECOND  all blocks of all ranks can be resident at once. minimum arch: sm_80
#include "include/flags.cuh"

template <int RANKS, class Out>
DEVICE void allreduce_flag(Out out, const bf16* in, const Flags& end, int n) {
  griddep_launch();
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  Watch watch;
  out.aim(first);
  griddep_wait();
  const uint32_t epoch = read_epoch(end) + 1;
  const int64_t half = int64_t(epoch & 1) * end.capacity;

  for (int i = first; i < n; i += stride) st_volatile_v4(end.data.packs(end.rank) + half + i, ld_global_v4(in + 8 * int64_t(i)));
  if (first < n) out.fetch();
  block_barrier(end, epoch, watch);
  write_epoch(end, epoch);
  for (int i = first; i < n; i += stride) {
    uint4 v[RANKS];
    float sum[8];
    if (i != first) out.aim(i), out.fetch();
    read_sources(v, ld_global_v4(in + 8 * int64_t(i)), end, half + i);
    sum_sources(sum, v);
    out.store(sum);
  }
}

#define ALLREDUCE_FLAG(RANKS)                                                                                        \
  KERNEL(512) void allreduce_flag_bf16_r##RANKS(bf16* out,          /* [8n] */                                       \
                                                const bf16* in,     /* [8n] */                                       \
                                                BY_VALUE Flags end, /* this rank's */                                \
                                                int n) {                                                             \
    allreduce_flag<RANKS>(Replace{reinterpret_cast<uint4*>(out), nullptr}, in, end, n);                                       \
  }                                                                                                                  \
  KERNEL(512) void allreduce_flag_add_bf16_r##RANKS(float* h,           /* [8n] residual stream, in place */         \
                                                    const bf16* in,     /* [8n] */                                   \
                                                    BY_VALUE Flags end, /* this rank's */                            \
                                                    int n) {                                                         \
    allreduce_flag<RANKS>(Accumulate{h, nullptr, {}, {}}, in, end, n);                             \
  }
ALLREDUCE_FLAG(2)
ALLREDUCE_FLAG(4)
ALLREDUCE_FLAG(8)
