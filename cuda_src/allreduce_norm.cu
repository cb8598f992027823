// allreduce_norm.cu - all-reduce, residual add and RMSNorm in one launch, by the push of allreduce_lamport.cu.
//
//   h[t] += Σ_r in_r[t]  in fp32;  out[t] = h[t] / sqrt(mean(h[t]²) + eps) · g  as bf16;  T rows of D
//
// A row is shared by gridDim.x blocks, one pack a thread, so that several multiprocessors push and poll. RMSNorm needs the whole row's sum of
// squares: each warp leaves its part in a word that is armed like a receive buffer and lies in the same rotation, and every warp polls all of
// the row's words, one a lane. One way through the L2, and no barrier: neither of a block nor of the grid. A sum of squares is never -0.0, so
// it is its own flag. All warps of all ranks add the same parts by the same shuffles: the same bits everywhere.
//
// entry points: _r2, _r4, _r8: for up to that many ranks. grid: (blocks a row, T), block: whole warps, up to 256.
// PRECOND  gridDim.x·block >= D/8, D % 8 == 0, D <= 8192 (32 warps), T·D/8 <= capacity, grid <= blocks; the same block on all ranks.
// Otherwise as allreduce_lamport.cu, with which it may take turns on one workspace. minimum arch: sm_80
#include "include/lamport.cuh"
#include "include/reduce.cuh"

template <int RANKS>
DEVICE void allreduce_norm(float* h, bf16* out, const bf16* in, const bf16* g, const Lamport& end, int D, float eps) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x, packs = D / 8, i = int(blockIdx.y) * packs + j;
  const int warps = (packs + WARP - 1) / WARP, warp = j / WARP, lane = j % WARP;  // of the row
  const bool mine = j < packs;
  const Route<RANKS> route(end, i);
  const bf16* from = in + 8 * int64_t(i);
  const uint4* turns = turn_address(end);
  Accumulate residual{h, nullptr, {}, {}};
  residual.aim(i);
  settle(from), settle(turns);
  uint4 own = make_uint4(0, 0, 0, 0), weight = own;
  if (mine) weight = ld_global_v4(g + 8 * j);
  Watch watch;
  griddep_wait();
  const Turn turn = read_turn(turns);
  if (mine) {
    own = sanitise(ld_global_v4(from));
    residual.fetch();
    route.push(turn, own);
  }
  griddep_launch();
  __syncthreads();
  next_turn(end, turn, packs * int(gridDim.y), warps * int(gridDim.y));
  rearm(end, turn);

  float f[8] = {}, ss = 0.f;
  if (mine) {
    const Arrival<RANKS> arrival(end, i);
    uint4 v[RANKS];
    arrival.look(v, turn, own);
    arrival.wait(v, turn, watch);
    sum_sources(f, v);
    residual.add(f);
#pragma unroll
    for (int k = 0; k < 8; k++) ss = fmaf(f[k], f[k], ss);
  }
  ss = warp_sum(ss);
  uint32_t* parts = end.parts_of(turn.start) + int(blockIdx.y) * warps;
  if (lane == 0 && warp < warps) st_volatile_u32(parts + warp, sanitise(__float_as_uint(ss)));
  if (mine) residual.put(f);
  // The warps that this one waits for give up on their peers by the clock. The count is for the case that one never ran.
  uint32_t word = 0, polls = 0;
  if (lane < warps)
    while ((word = ld_volatile_u32(parts + lane)) == SENTINEL)
      if (++polls == LOCAL_POLLS && end.limit.ns) give_up(end.limit, end.rank, end.rank, turn.calls + 1);
  const float inv = rsqrtf(warp_sum(__uint_as_float(word)) / float(D) + eps);
  if (mine) {
    float w[8];
    unpack_bf16(w, weight);
#pragma unroll
    for (int k = 0; k < 8; k++) f[k] = f[k] * inv * w[k];
    reinterpret_cast<uint4*>(out)[i] = pack_bf16x8(f);
  }
}

#define ALLREDUCE_NORM(RANKS)                                                                                        \
  KERNEL_OCC(256, 1) void allreduce_norm_bf16_r##RANKS(float* h,             /* [T, D] residual stream, in place */  \
                                                       bf16* out,            /* [T, D] */                            \
                                                       const bf16* in,       /* [T, D] */                            \
                                                       const bf16* g,        /* [D] RMSNorm weight */                \
                                                       BY_VALUE Lamport end, /* this rank's */                       \
                                                       int D, float eps) {                                           \
    allreduce_norm<RANKS>(h, out, in, g, end, D, eps);                                                               \
  }
ALLREDUCE_NORM(2)
ALLREDUCE_NORM(4)
ALLREDUCE_NORM(8)
