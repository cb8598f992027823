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

// One pack of this rank: requested, and pushed as soon as it is there.
template <int RANKS, class Out>
struct Item {
  const bf16* from;
  Route<RANKS> route;
  Out out;
  uint4 own;
  // from: null for a pack that there is not.
  DEVICE Item(Out target, const bf16* in, const Lamport& end, int i, int n) : from(i < n ? in + 8 * int64_t(i) : nullptr), route(end, i), out(target) {
    settle(from);
    out.aim(i);
  }
  DEVICE void push(const Turn& turn) {
    own = sanitise(ld_global_v4(from));
    out.fetch();
    route.push(turn, own);
  }
  DEVICE void finish(const Lamport& end, const Turn& turn, int i, Watch& watch) {
    const Arrival<RANKS> arrival(end, i);
    uint4 v[RANKS];
    float sum[8];
    arrival.look(v, turn, 0, own);
    arrival.wait(v, turn, 0, watch);
    sum_sources(sum, v);
    out.store(sum);
  }
};

template <int RANKS, class Out>
DEVICE void allreduce_lamport(Out out, const bf16* in, const Lamport& end, int n) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  Item<RANKS, Out> item(out, in, end, first, n);
  const uint4* turns = turn_address(end);
  settle(turns);
  Watch watch = watch_start(end.limit);
  griddep_wait_with(number(turns) | number(item.from) | number(item.route.to[0]) | number(item.out.at));
  const Turn turn = read_turn(turns);
  if (item.from) item.push(turn);
  griddep_launch();
  __syncthreads();
  next_turn(end, turn, n);
  rearm(end, turn);
  if (item.from) item.finish(end, turn, first, watch);
  for (int i = first + stride; i < n; i += stride) {
    Item<RANKS, Out> more(out, in, end, i, n);
    more.push(turn);
    more.finish(end, turn, i, watch);
  }
}

#define ALLREDUCE_LAMPORT(RANKS)                                                                                            \
  KERNEL(512) void allreduce_lamport_bf16_r##RANKS(bf16* out,            /* [8n] */                                         \
                                                   const bf16* in,       /* [8n] */                                         \
                                                   BY_VALUE Lamport end, /* this rank's */                                  \
                                                   int n) {                                                                 \
    allreduce_lamport<RANKS>(Replace{reinterpret_cast<uint4*>(out), nullptr}, in, end, n);                                           \
  }                                                                                                                         \
  KERNEL(512) void allreduce_lamport_add_bf16_r##RANKS(float* h,             /* [8n] residual stream, in place */           \
                                                       const bf16* in,       /* [8n] */                                     \
                                                       BY_VALUE Lamport end, /* this rank's */                              \
                                                       int n) {                                                             \
    allreduce_lamport<RANKS>(Accumulate{h, nullptr, {}, {}}, in, end, n);                                 \
  }
ALLREDUCE_LAMPORT(2)
ALLREDUCE_LAMPORT(4)
ALLREDUCE_LAMPORT(8)
