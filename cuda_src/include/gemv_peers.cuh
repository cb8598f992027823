// gemv_peers.cuh - the all-reduce that is no kernel: a product's last instructions push its rows to all ranks, the next product's first ones
// pick them up, while its weights already stream.
//
// A decode step has two sums over ranks a layer, after O and after down. Sum f = 1, 2, … of a step has a producer P(f), O or down, and a
// consumer C(f), the kernel that follows it in the stream and begins with RMSNorm: gate/up, QKV of the next layer, or the LM head.
//
//   P(f)  each block, as soon as it has its rows' sums, stores them as fp32 into slot [rank] of every rank's receive memory, its own included.
//   C(f)  (1) each block owns a share of the elements: it polls them from all sources, adds them in rank order, adds h of sum f - 1, and stores
//             the new h into this rank's hidden memory;  (2) barrier of the block; the next kernel may start;
//         (3) each thread polls in hidden memory the elements that it multiplies: h comes from all blocks of this launch.
//         Before it stores its results it executes griddep_wait, which by then does not wait.
//
// Data is its own flag throughout, as in include/lamport.cuh: memory is armed with 0x80000000, compared bit by bit, payloads are sanitised. So a
// consumer needs nobody's end: neither its producer's nor a reduction kernel's stands between the last product and the first. Each element
// crosses the link once a peer and is summed once a rank; all ranks add the same numbers in the same order and hold the same bits.
//
// Two halves, no rotation. Receive and hidden memory have two halves, f & 1: O uses one, down the other, for ever. The half is a constant of the
// launch, so there is no state that a graph could have wrong. Hidden half 0 holds h before the first sum of a step, put there by the embedding,
// and again after the last: 2·layers is even. As the embedding's stores are no data that is its own flag, C(1) alone begins with griddep_wait.
// Who re-arms, and when:
//   receive[f & 1]     by the owner of the share in C(f), right after it has read it. Only it reads it.
//   hidden[(f - 1) & 1]  by the owner of the share in C(f), after it has read it: h of f - 1, which the others read in C(f - 1).
//
// Why this is enough. Every kernel executes griddep_wait before it ends, so a kernel that has passed griddep_wait knows that everything before it
// in its stream has ended. P(f) waits before it computes: to see a rank's data of f is to know that C(f - 1) of that rank has ended.
//   (a) P(f + 2) of rank a stores into receive[f & 1] of rank b. It has passed its wait: C(f + 1) of a has ended, so it had b's data of
//       f + 1, so C(f) of b had ended, re-arming included.
//   (b) C(f) stores into hidden[f & 1]: it has this rank's own data of f, so C(f - 1) has ended, which re-armed it.
//   (c) C(f) may start early, while its predecessors run, and polls. Receive: it must not take data of f - 2 for new. It starts when all blocks of P(f)
//       have started, so when all of C(f - 1) have allowed it, which they do after (2) only: they had this rank's data of f - 1, so C(f - 2) has
//       ended, and re-armed it. Hidden: (3) comes after (2), where the block had own data of f, so C(f - 1) has ended, and re-armed it.
//       This is why C allows the next launch late, and why every block must own an element.
//   (d) P(f + 1) does not read h; C(f + 1) re-arms hidden[f & 1] when it has own data of f + 1, so C(f), its readers, has ended.
// Nothing here is ordered by a fence: a value is waited for where it is needed, and what is overwritten is known to have been read because the kernel
// that read it has ended.
//
// PRECOND  a graph or a host that queues consumers after producers without exception: a skipped consumer leaves its half full.
// PRECOND  grid of C <= D, and all of its blocks can be resident at once with those of other ranks on the GPU: (3) waits for other blocks.
// PRECOND  memory armed, before the first step, but for hidden half 0.
#pragma once
#include "gemv_sums.cuh"
#include "lamport.cuh"

// One rank's end; passed by value.
struct Exchange {
  Peers receive;    // each rank's f32 [2, world, D]
  uint64_t hidden;  // this rank's f32 [2, D]
  PollLimit limit;
  int32_t rank, world, D, log_lanes;  // 2^log_lanes: world, rounded up to a power of two
};

// P: row `row` of this rank's partial sums to every rank, its own last.
DEVICE void push_row(const Exchange& end, int half, int row, float v) {
  const uint32_t bits = sanitise(__float_as_uint(v));
  const int at = (half * end.world + end.rank) * end.D + row;
#pragma unroll 1
  for (int d = 1; d <= end.world; d++) {
    const int peer = end.rank + d < end.world ? end.rank + d : end.rank + d - end.world;
    st_volatile_u32(end.receive.words(peer) + at, bits);
  }
}

// UNROLL: of the sum over ranks; makes no difference but to where the compilers spill.
template <int UNROLL>
struct PeerHidden {
  const Exchange& end;
  int half;    // of this sum
  bool first;  // of the step
  uint32_t polls = 0;
  DEVICE PeerHidden(const Exchange& end, int sum) : end(end), half(sum & 1), first(sum & 2) {}

  DEVICE uint32_t* now() const { return reinterpret_cast<uint32_t*>(end.hidden) + half * end.D; }
  DEVICE uint32_t* before() const { return reinterpret_cast<uint32_t*>(end.hidden) + (1 - half) * end.D; }

  // (1): a lane for each element and source, the sources of an element in one warp.
  DEVICE void sum_share() const {
    const Share share = block_share(end.D);
    const int lane = threadIdx.x % WARP, elements = WARP >> end.log_lanes, element = lane & (elements - 1), source = lane >> (5 - end.log_lanes);
    uint32_t* slots = end.receive.words(end.rank) + (half * end.world + source) * end.D + share.begin;
    Watch peers;
#pragma unroll 1
    for (int first = int(threadIdx.x) / WARP * elements; first < share.count; first += int(blockDim.x) / WARP * elements) {
      const int i = first + element;
      const bool mine = i < share.count && source < end.world, leads = mine && source == end.rank;
      uint32_t old = 0, word = 0;
      bool waits = mine;
      while (__any_sync(FULL_MASK, waits)) {
        if (!waits) continue;
        word = ld_volatile_u32(slots + i);
        waits = word == SENTINEL;
        if (waits)
          watch_poll(peers, end.limit, end.rank, source, 1 + half);
        else if (leads)
          old = ld_volatile_u32(before() + share.begin + i);  // not before own data was there; the peers' may still be on its way
      }
      if (mine) st_volatile_u32(slots + i, SENTINEL);
      float sum = 0.f;
#pragma unroll UNROLL
      for (int s = 0; s < end.world; s++) sum += __uint_as_float(__shfl_sync(FULL_MASK, word, s * elements + element));
      if (!leads) continue;
      st_volatile_u32(now() + share.begin + i, sanitise(__float_as_uint(__uint_as_float(old) + sum)));
      st_volatile_u32(before() + share.begin + i, SENTINEL);
    }
  }

  DEVICE void start() const {}
  DEVICE void wait() const {
    if (first) griddep_wait();
    sum_share();
    __syncthreads();
    griddep_launch();
  }
  DEVICE float4 load(int k) const {
    const uint4 v = ld_volatile_v4(now() + k);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
  }
  DEVICE bool missing(float v) const { return __float_as_uint(v) == SENTINEL; }
  // What is missing here comes from a block of this launch, which gives up on its peers by the clock. The count is for the case that it never ran.
  // A warp looks again together: with a loop for each lane the compilers spill.
  DEVICE bool again(bool missing) {
    if (missing && ++polls == LOCAL_POLLS && end.limit.ns) give_up(end.limit, end.rank, end.rank, 1 + half);
    return __any_sync(FULL_MASK, missing);
  }
  DEVICE void join() const { griddep_wait(); }
};

// One rank's share of a row-parallel product: its rows' sums go to all ranks. O-projection and down-projection.
template <class Engine>
DEVICE void gemv_push(const Exchange& end, int half, const bf16* x, const typename Engine::W::type* w, const float* scale, int N, int K,
                      float* shared) {
  griddep_launch();
  const Share rows = block_share(N);
  const RowsPlain<typename Engine::W::type> at{w + int64_t(rows.begin) * K, K};
  const Sums sums{shared, rows.count};
  Engine engine;
  engine.request(at, rows.count, K);
  const float* scales = sums.constants(0);
  if (Engine::W::SCALED) stage(sums.constants(0), scale + rows.begin, rows.count);
  griddep_wait();
  engine.input(x, K);
  engine.multiply(sums, at, K, 0.f);
  for (int j = threadIdx.x; j < rows.count; j += blockDim.x)
    push_row(end, half, rows.begin + j, Engine::W::SCALED ? sums.total(j) * scales[j] : sums.total(j));
}
