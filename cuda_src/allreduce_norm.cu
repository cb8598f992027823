// allreduce_norm.cu - all-reduce, residual add and RMSNorm in one launch, by the push of allreduce_lamport.cu.
//
//   h[t] += Σ_r in_r[t]  in fp32;  out[t] = h[t] / sqrt(mean(h[t]²) + eps) · g  as bf16;  T rows of D
//
// A row is shared by gridDim.x blocks, one pack a thread, so that many multiprocessors push and poll at once. RMSNorm needs the whole row's
// sum of squares: each block leaves its part in a word that is armed like a receive buffer and lies in the same rotation, and every warp
// polls the row's words, one a lane. A sum of squares is never -0.0, so it may be its own flag. The parts are added by one shuffle pattern,
// so all blocks of all ranks get the same bits. With one block a row nothing is exchanged.
//
// A dependent launch that waits inside this kernel for another block must find it running: all blocks are resident (PRECOND).
// entry points: _r2, _r4, _r8: for up to that many ranks. grid: (1 … 32, T), block: whole warps, up to 512 (_r2: 1024).
// PRECOND  gridDim.x·block >= D/8, D % 8 == 0, T·D/8 <= capacity, gridDim.x·T <= blocks; the same grid and block on all ranks.
// Otherwise as allreduce_lamport.cu, with which it may take turns on one workspace. minimum arch: sm_80
#include "include/lamport.cuh"
#include "include/reduce.cuh"

// The row's sum of squares from the blocks' parts, in every thread. `part`: this block's, in every thread.
DEVICE float exchange(float part, const Lamport& end, const Turn& turn) {
  if (gridDim.x == 1) return part;
  const int lane = threadIdx.x % WARP, blocks = gridDim.x;
  uint32_t* parts = reinterpret_cast<uint32_t*>(end.parts) + turn.buffer * end.blocks + blockIdx.y * blocks;
  if (threadIdx.x == 0) st_volatile_u32(parts + blockIdx.x, sanitise(__float_as_uint(part)));
  // A neighbour that waits for a peer must give up first: its fault record names the one to blame.
  Watch watch = watch_start({2 * end.limit.ns, end.limit.fault});
  uint32_t word = 0;
  if (lane < blocks)
    while ((word = ld_volatile_u32(parts + lane)) == SENTINEL) watch_poll(watch, end.rank, end.rank, turn.calls + 1);
  return warp_sum(__uint_as_float(word));
}

template <int RANKS>
DEVICE void allreduce_norm(float* h, bf16* out, const bf16* in, const bf16* g, const Lamport& end, int D, float eps) {
  SHARED(float[32], scratch);
  griddep_launch();
  const int j = blockIdx.x * blockDim.x + threadIdx.x, packs = D / 8, i = int(blockIdx.y) * packs + j;
  const bool mine = j < packs;
  const Route<RANKS> route(end, i);
  Watch watch = watch_start(end.limit);
  Accumulate residual{reinterpret_cast<float4*>(h), {}, {}};
  uint4 own = make_uint4(0, 0, 0, 0), weight = own;
  if (mine) weight = ld_global_v4(g + 8 * j);
  griddep_wait();
  const Turn turn = read_turn(end);
  if (mine) {
    own = sanitise(ld_global_v4(in + 8 * int64_t(i)));
    residual.fetch(i);
    route.push(end, turn, own);
  }
  __syncthreads();
  next_turn(end, turn, packs * int(gridDim.y), gridDim.x == 1 ? 0 : block_count());
  rearm(end, turn);

  float f[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, ss = 0.f;
  if (mine) {
    uint4 v[RANKS];
    poll_sources(v, own, end, turn, i, watch);
    sum_sources(f, v);
    residual.add(f);
    residual.put(i, f);
#pragma unroll
    for (int k = 0; k < 8; k++) ss = fmaf(f[k], f[k], ss);
  }
  const float inv = rsqrtf(exchange(block_sum(ss, scratch), end, turn) / float(D) + eps);
  if (mine) {
    float w[8];
    unpack_bf16(w, weight);
#pragma unroll
    for (int k = 0; k < 8; k++) f[k] = f[k] * inv * w[k];
    reinterpret_cast<uint4*>(out)[i] = pack_bf16x8(f);
  }
}

#define ALLREDUCE_NORM(RANKS, THREADS)                                                                      \
  KERNEL(THREADS) void allreduce_norm_bf16_r##RANKS(float* h,             /* [T, D] residual stream, in place */ \
                                                    bf16* out,            /* [T, D] */                      \
                                                    const bf16* in,       /* [T, D] */                      \
                                                    const bf16* g,        /* [D] RMSNorm weight */          \
                                                    BY_VALUE Lamport end, /* this rank's */                 \
                                                    int D, float eps) {                                     \
    allreduce_norm<RANKS>(h, out, in, g, end, D, eps);                                                      \
  }
ALLREDUCE_NORM(2, 1024)
ALLREDUCE_NORM(4, 512)
ALLREDUCE_NORM(8, 512)
