// allreduce_norm.cu - all-reduce, residual add and RMSNorm in one launch, by the push of allreduce_lamport.cu.
//
//   sum[t] = h[t] + Σ_r in_r[t]  in fp32;  out[t] = sum[t] / sqrt(mean(sum[t]²) + eps) · g  as bf16;  T rows of D
//
// RMSNorm needs the whole row's sum of squares. Several blocks share a row, so that several multiprocessors push, but each pushes its share
// only: it then reads, polls and sums the whole row for itself, and stores its share of the results. Reading more is free while the
// data is on its way; exchanging parts of the sum of squares between blocks through memory was slower (docs/collectives.md). All
// blocks of all ranks add the same numbers in the same order, so all get the same bits.
//
// entry points: _r2, _r4, _r8: for up to that many ranks. grid: (blocks a row, T); block: whole warps, up to 512, 2 packs of a row a thread.
// PRECOND  2·block >= D/8 >= gridDim.x, D % 8 == 0, T·D/8 <= capacity, grid <= blocks; the same block on all ranks.
// PRECOND  several blocks a row: sum is not h, which other blocks may still read. Otherwise as allreduce_lamport.cu, with which it may take
// turns on one workspace. minimum arch: sm_80
#include "include/lamport.cuh"
#include "include/reduce.cuh"

constexpr int PACKS = 2;  // of a row, a thread

template <int RANKS>
DEVICE void allreduce_norm(float* sum, bf16* out, const float* h, const bf16* in, const bf16* g, const Lamport& end, int D, float eps) {
  SHARED(float[16], scratch);
  const int packs = D / 8, row = blockIdx.y, base = row * packs, thread = threadIdx.x;
  // This block's share of the row: what it pushes and stores.
  const int begin = int(int64_t(packs) * blockIdx.x / gridDim.x), stop = int(int64_t(packs) * (blockIdx.x + 1) / gridDim.x);
  const int first = begin + thread;
  const Route<RANKS> route(end, base + first);
  const bf16 *own_share = in + 8 * int64_t(base + first), *own_row = in + 8 * int64_t(base + thread);
  const float* old = h + 8 * int64_t(base + thread);
  const uint4* turns = turn_address(end);
  settle(own_share), settle(own_row), settle(old), settle(turns);
  uint4 weight[PACKS] = {};
#pragma unroll
  for (int k = 0; k < PACKS; k++)
    if (thread + k * int(blockDim.x) < packs) weight[k] = ld_global_v4(g + 8 * (thread + k * int(blockDim.x)));
  Watch watch = watch_start(end.limit);
  griddep_wait();
  const Turn turn = read_turn(turns);
  if (first < stop) route.push(turn, sanitise(ld_global_v4(own_share)));
  for (int i = first + int(blockDim.x); i < stop; i += blockDim.x)
    Route<RANKS>(end, base + i).push(turn, sanitise(ld_global_v4(in + 8 * int64_t(base + i))));
  griddep_launch();

  uint4 own[PACKS] = {};
  float4 residual[PACKS][2] = {};
#pragma unroll
  for (int k = 0; k < PACKS; k++) {
    const int64_t at = 8 * int64_t(k) * blockDim.x;
    if (thread + k * int(blockDim.x) >= packs) continue;
    own[k] = sanitise(ld_global_v4(own_row + at));
    residual[k][0] = ld_global_f4(old + at), residual[k][1] = ld_global_f4(old + at + 4);
  }
  __syncthreads();
  next_turn(end, turn, packs * int(gridDim.y));
  rearm(end, turn);

  const Arrival<RANKS> arrival(end, base + thread);
  uint4 v[PACKS][RANKS] = {};
  float f[PACKS][8], ss = 0.f;
#pragma unroll
  for (int k = 0; k < PACKS; k++)
    if (thread + k * int(blockDim.x) < packs) arrival.look(v[k], turn, k * int(blockDim.x), own[k]);
#pragma unroll
  for (int k = 0; k < PACKS; k++) {
    arrival.wait(v[k], turn, k * int(blockDim.x), watch);
    sum_sources(f[k], v[k]);
    const float4 a = residual[k][0], b = residual[k][1];
    const float before[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) f[k][i] = before[i] + f[k][i], ss = fmaf(f[k][i], f[k][i], ss);
  }
  const float inv = rsqrtf(block_sum(ss, scratch) / float(D) + eps);
#pragma unroll
  for (int k = 0; k < PACKS; k++) {
    const int j = thread + k * int(blockDim.x);
    if (j < begin || j >= stop) continue;
    float4* total = reinterpret_cast<float4*>(sum + 8 * int64_t(base + j));
    total[0] = make_float4(f[k][0], f[k][1], f[k][2], f[k][3]), total[1] = make_float4(f[k][4], f[k][5], f[k][6], f[k][7]);
    float w[8];
    unpack_bf16(w, weight[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) f[k][i] = f[k][i] * inv * w[i];
    reinterpret_cast<uint4*>(out)[base + j] = pack_bf16x8(f[k]);
  }
}

#define ALLREDUCE_NORM(RANKS)                                                                         \
  KERNEL_OCC(512, 1) void allreduce_norm_bf16_r##RANKS(float* sum,           /* [T, D] */             \
                                                       bf16* out,            /* [T, D] */             \
                                                       const float* h,       /* [T, D] */             \
                                                       const bf16* in,       /* [T, D] */             \
                                                       const bf16* g,        /* [D] RMSNorm weight */ \
                                                       BY_VALUE Lamport end, /* this rank's */        \
                                                       int D, float eps) {                            \
    allreduce_norm<RANKS>(sum, out, h, in, g, end, D, eps);                                           \
  }
ALLREDUCE_NORM(2)
ALLREDUCE_NORM(4)
ALLREDUCE_NORM(8)
