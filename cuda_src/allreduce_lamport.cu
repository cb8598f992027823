// allreduce_lamport.cu - one-shot push all-reduce of small messages: every rank stores its vector into every peer's memory and polls its own.
//
//   out[i] = Σ_r in_r[i]  as bf16,  or  h[i] += Σ_r in_r[i]  in fp32;  summed in rank order in fp32: all ranks hold the same bits
//
// Protocol, buffers, rotation, and why no fence is needed: include/lamport.cuh. What is left between the end of the previous kernel and the
// end of this one is one load, one push, the link, one poll and one store:
//   - where things go is computed before griddep_wait;
//   - the turn, this rank's vector and the residual are requested together right after it;
//   - re-arming, and telling the next call its turn, happen while the pushed data travels;
//   - after the poll nothing is done but to sum and store: no atomic, no fence, no barrier.
// A rank's own vector stays in registers. A thread has one pack at a time; messages longer than the grid go in rounds.
//
// entry points: _r2, _r4, _r8: for up to that many ranks. grid: any, on each rank its own; block: up to 512.
// bytes moved: out over the link (world - 1)·16·n, in likewise.
// PRECOND  n packs of 16 bytes, n <= capacity, grid <= blocks; in, out 16-byte aligned and not overlapping; receive buffers armed, turns
// zero before the first call on any rank. PRECOND  all blocks of all ranks can be resident at once: each waits for others.
// PRECOND  one stream: call f + 1 starts after call f has ended (a dependent launch must griddep_wait, as this kernel does).
// minimum arch: sm_80
#include "include/lamport.cuh"

template <int RANKS, class Out>
DEVICE void allreduce_lamport(Out out, const bf16* in, const Lamport& end, int n) {
  griddep_launch();
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  const Route<RANKS> route(end, first);
  Watch watch = watch_start(end.limit);
  griddep_wait();
  const Turn turn = read_turn(end);
  uint4 own = make_uint4(0, 0, 0, 0);
  if (first < n) {
    own = sanitise(ld_global_v4(in + 8 * int64_t(first)));
    out.fetch(first);
    route.push(end, turn, own);
  }
  __syncthreads();
  next_turn(end, turn, n, 0);
  rearm(end, turn);
  for (int i = first; i < n; i += stride) {
    if (i != first) {
      own = sanitise(ld_global_v4(in + 8 * int64_t(i)));
      out.fetch(i);
      Route<RANKS>(end, i).push(end, turn, own);
    }
    uint4 v[RANKS];
    float sum[8];
    poll_sources(v, own, end, turn, i, watch);
    sum_sources(sum, v);
    out.store(i, sum);
  }
}

#define ALLREDUCE_LAMPORT(RANKS)                                                                                            \
  KERNEL(512) void allreduce_lamport_bf16_r##RANKS(bf16* out,            /* [8n] */                                         \
                                                   const bf16* in,       /* [8n] */                                         \
                                                   BY_VALUE Lamport end, /* this rank's */                                  \
                                                   int n) {                                                                 \
    allreduce_lamport<RANKS>(Replace{reinterpret_cast<uint4*>(out)}, in, end, n);                                           \
  }                                                                                                                         \
  KERNEL(512) void allreduce_lamport_add_bf16_r##RANKS(float* h,             /* [8n] residual stream, in place */           \
                                                       const bf16* in,       /* [8n] */                                     \
                                                       BY_VALUE Lamport end, /* this rank's */                              \
                                                       int n) {                                                             \
    allreduce_lamport<RANKS>(Accumulate{reinterpret_cast<float4*>(h), {}, {}}, in, end, n);                                 \
  }
ALLREDUCE_LAMPORT(2)
ALLREDUCE_LAMPORT(4)
ALLREDUCE_LAMPORT(8)
