// allreduce_norm.cu - all-reduce, residual add and RMSNorm in one launch, by the push of allreduce_lamport.cu.
//
//   sum[t] = h[t] + Σ_r in_r[t]  in fp32;  out[t] = sum[t] / sqrt(mean(sum[t]²) + eps) · g  as bf16;  T rows of D
//
// RMSNorm needs the whole row's sum of squares. Several blocks share a row, each pushes, polls, sums and stores its share; they are a cluster, and
// each pushes its sum of squares into the shared memory of all of them, counted by a barrier there. All blocks of all
// ranks add the same numbers in the same order, so all get the same bits.
//
// entry points: _r2, _r4, _r8: for up to that many ranks. grid: (blocks a row, T); block: whole warps, up to 512, 2 packs of a row a thread.
// More than one block a row: up to 8, which are the cluster (sm_90+). dynamic shared memory: a Meeting.
// bytes moved: as allreduce_lamport.cu; 4·T·D of h in, 4·T·D of sums and 2·T·D of results out.
// PRECOND  2·block·gridDim.x >= D/8 >= gridDim.x, D % 8 == 0, T·D/8 <= capacity, grid <= blocks; the same grid and block on all ranks.
// PRECOND  sum is h or does not overlap it. Otherwise as allreduce_lamport.cu, with which it may take turns on one workspace. minimum arch: sm_80
#include "include/lamport.cuh"
#include "include/push.cuh"
#include "include/reduce.cuh"

constexpr int MOST_BLOCKS = 8;

// Where the blocks of a row meet.
struct Meeting {
  float4 squares[MOST_BLOCKS / 4];  // of each block, zeros behind them
  float warps[16];                  // of each warp of this one, zeros behind them
  uint64_t arrived;
};

// Σ over the row of a thread's `ss`: over the warp, over the block, then each block pushes to all. What is added is there for all counts, zeros
// where there is nothing: loads that do not wait for each other.
DEVICE float row_sum(Meeting& sh, float ss) {
  ss = warp_sum(ss);
  if (threadIdx.x % WARP == 0) sh.warps[threadIdx.x / WARP] = ss;
  __syncthreads();
  const auto sum = [](float4 a) { return (a.x + a.y) + (a.z + a.w); };
  const auto block = [&] {
    const float4* w = reinterpret_cast<const float4*>(sh.warps);
    return (sum(w[0]) + sum(w[1])) + (sum(w[2]) + sum(w[3]));
  };
  if (gridDim.x == 1) return block();
  if (threadIdx.x < gridDim.x) push_f1(reinterpret_cast<float*>(sh.squares) + blockIdx.x, threadIdx.x, block(), &sh.arrived);
  uint32_t looks = 0;
  while (!push_arrived(&sh.arrived)) look_again(looks);
  return sum(sh.squares[0]) + sum(sh.squares[1]);
}

// Packs [begin, begin + count) of a row, which is pack `base` of the message on; PACKS of them a thread.
template <int RANKS, int PACKS>
DEVICE void reduce_share(Meeting& sh, float* sum, bf16* out, const float* h, const bf16* in, const bf16* g, const Lamport& end, int base, int begin,
                         int count, int D, float eps) {
  const int thread = threadIdx.x, stride = blockDim.x;
  const auto mine = [&](int k) { return thread + k * stride < count; };
  const Arrival<RANKS> arrival(end, base + begin + thread);
  const int64_t at = 8 * int64_t(base + begin + thread);
  const float inverse = 1.f / float(D);
  const uint4* turns = turn_address(end);
  const bf16* from[PACKS];
  const float* old[PACKS];
  uint4 weight[PACKS] = {};
#pragma unroll
  for (int k = 0; k < PACKS; k++) {
    from[k] = mine(k) ? in + at + 8 * k * stride : nullptr, old[k] = h + at + 8 * k * stride;
    settle(from[k]), settle(old[k]);
    if (mine(k)) weight[k] = ld_global_v4(g + 8 * (begin + thread + k * stride));
  }
  const Route<RANKS> first(end, base + begin + thread);
  settle(turns);
  Watch watch = watch_start(end.limit);
  griddep_wait_with(number(turns) | number(from[0]) | number(first.to[0]) | number(old[0]));
  const Turn turn = read_turn(turns);
  uint4 own[PACKS] = {};
  float4 residual[PACKS][2] = {};
#pragma unroll
  for (int k = 0; k < PACKS; k++)
    if (mine(k)) {
      own[k] = sanitise(ld_global_v4(from[k]));
      residual[k][0] = ld_global_f4(old[k]), residual[k][1] = ld_global_f4(old[k] + 4);
    }
  if (mine(0)) first.push(turn, own[0]);
#pragma unroll
  for (int k = 1; k < PACKS; k++)
    if (mine(k)) Route<RANKS>(end, base + begin + thread + k * stride).push(turn, own[k]);
  griddep_launch();
  __syncthreads();
  next_turn(end, turn, D / 8 * int(gridDim.y));
  rearm(end, turn);

  uint4 v[PACKS][RANKS] = {};
  float f[PACKS][8], ss = 0.f;
#pragma unroll
  for (int k = 0; k < PACKS; k++)
    if (mine(k)) arrival.look(v[k], turn, k * stride, own[k]);
#pragma unroll
  for (int k = 0; k < PACKS; k++) {
    arrival.wait(v[k], turn, k * stride, watch);
    sum_sources(f[k], v[k]);
    const float4 a = residual[k][0], b = residual[k][1];
    const float before[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) f[k][i] = before[i] + f[k][i], ss = fmaf(f[k][i], f[k][i], ss);
    if (!mine(k)) continue;
    float4* total = reinterpret_cast<float4*>(sum + at + 8 * k * stride);
    total[0] = make_float4(f[k][0], f[k][1], f[k][2], f[k][3]), total[1] = make_float4(f[k][4], f[k][5], f[k][6], f[k][7]);
  }
  const float row = row_sum(sh, ss), inv = rsqrtf(fmaf(row, inverse, eps));
#pragma unroll
  for (int k = 0; k < PACKS; k++) {
    if (!mine(k)) continue;
    float w[8];
    unpack_bf16(w, weight[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) f[k][i] = f[k][i] * inv * w[i];
    reinterpret_cast<uint4*>(out)[base + begin + thread + k * stride] = pack_bf16x8(f[k]);
  }
}

template <int RANKS>
DEVICE void allreduce_norm(float* sum, bf16* out, const float* h, const bf16* in, const bf16* g, const Lamport& end, int D, float eps) {
  DYN_SHARED(Meeting, sh);
  if (threadIdx.x < 16) sh->warps[threadIdx.x] = 0.f;  // a barrier is passed before they are used
  if (gridDim.x > 1) {
    // Only where no block pushes: the cluster's barrier orders no stores.
    if (threadIdx.x >= gridDim.x && threadIdx.x < 8) reinterpret_cast<float*>(sh->squares)[threadIdx.x] = 0.f;
    if (threadIdx.x == 0) {
      push_init(&sh->arrived);
      push_expect(&sh->arrived, gridDim.x * sizeof(float));
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
  const int packs = D / 8, begin = packs * int(blockIdx.x) / int(gridDim.x), count = packs * int(blockIdx.x + 1) / int(gridDim.x) - begin;
  if (count <= int(blockDim.x))
    reduce_share<RANKS, 1>(*sh, sum, out, h, in, g, end, blockIdx.y * packs, begin, count, D, eps);
  else
    reduce_share<RANKS, 2>(*sh, sum, out, h, in, g, end, blockIdx.y * packs, begin, count, D, eps);
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
