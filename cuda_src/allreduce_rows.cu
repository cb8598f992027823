// allreduce_rows.cu - the sum of a chunk of the prompt and the norm behind it, by rows: a rank finishes those it owns and gives them to all.
//
//   h[t] += Σ_r share_r[t]  in fp32, in rank order;  x[t] = h[t] / sqrt(mean(h[t]²) + eps) · g, rounded once, on every rank
//
// Rank r owns rows [r·part, (r + 1)·part) of T, part >= T / world. h of a row is kept by its owner alone, but for h_f32, which spreads h
// itself and norms nothing: the last sum of a chunk, after which every rank has every row. The others differ in what x is:
//   f16, bf16  16 bits;  e4m3  codes with one scale a row, as norm.cu's rmsnorm_e4m3
// Shares are read where the product has left them, over the link, or where the products of all ranks have pushed them, in the owner's memory
// (RowOwners in include/gemm_out_sm90.cuh); x is stored where the next product reads it, on all ranks: nothing is copied.
//
// (1) Barrier. (2) The owner reads its rows' shares, adds them to h, norms the row, which the block holds in registers, and stores it into all
// ranks' x. (3) Barrier. What a block's next row needs is requested before this one is normed.
//
// Memory ordering. The first barrier releases, at system scope, what griddep_wait has made visible to the block (include/flags.cuh): this rank's
// shares, complete, in its own memory or pushed; a peer that has acquired it may read them. It also says that this rank's kernels before it have
// ended, which read x last: a peer may store x from there on. The second releases the rows that a block has stored into the peers' x, and says that it has read their shares: who has passed it may read x, and may
// overwrite its shares, and so may kernels behind it. x and the share may be one buffer: of a row the owner alone reads all shares, and stores
// x when it has. A block waits for the same block of its peers alone; all have done so when the kernel ends. Two epochs of the flags a call, as in
// allreduce_twoshot.cu.
//
// entry points: _r2, _r4, _r8: for up to that many ranks. grid: the same on all ranks; block: whole warps, at least world threads, up to 512,
// 2 packs of 8 elements a thread.
// bytes over the link at most, n = part·D: (world - 1)·2·n in, unless shares were pushed, and (world - 1)·n times 2, 1 (e4m3) or 4 (h_f32) out;
// of local memory 2·n to 2·world·n of shares, and 8·n of h.
// PRECOND  part·world >= T, the same on all ranks; D % 8 == 0 (e4m3: 16), D <= 16·block, grid <= blocks; every rank's shares, x, scales and h
// hold T rows, compact; everything 16-byte aligned; flags and epochs zero before the first call; one stream.
// PRECOND  all blocks of all ranks can be resident at once. minimum arch: sm_80
#include "include/flags.cuh"
#include "include/reduce.cuh"

constexpr int PACKS = 2;  // of a row, that a thread holds

// Eight elements of a row, weighted, times the row's factor, into rank `to`'s memory. i: their place in it, in packs.
struct Bf16Rows {
  static constexpr bool NORMED = true, SCALED = false;
  DEVICE static uint4 pack(const float (&f)[8]) { return pack_bf16x8(f); }
  DEVICE static void store(const Peers& x, int to, int i, uint4 v) { st_volatile_v4(x.packs(to) + i, v); }
};
struct F16Rows {
  static constexpr bool NORMED = true, SCALED = false;
  DEVICE static uint4 pack(const float (&f)[8]) { return pack_f16x8(f); }
  DEVICE static void store(const Peers& x, int to, int i, uint4 v) { st_volatile_v4(x.packs(to) + i, v); }
};
struct E4m3Rows {
  static constexpr bool NORMED = true, SCALED = true;
  DEVICE static uint2 pack(const float (&f)[8]) { return make_uint2(pack_e4m3x4(f[0], f[1], f[2], f[3]), pack_e4m3x4(f[4], f[5], f[6], f[7])); }
  DEVICE static void store(const Peers& x, int to, int i, uint2 v) { st_volatile_v2(reinterpret_cast<uint2*>(x.packs(to)) + i, v); }
};
struct F32Rows {
  static constexpr bool NORMED = false, SCALED = false;
};

// {Σ ss, max top} over the block. `scratch`: a pair a warp; the calls of a block take turns with two of them.
DEVICE float2 block_sum_max(float ss, float top, float2* scratch) {
  ss = warp_sum(ss), top = warp_max(top);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = make_float2(ss, top);
  __syncthreads();
  ss = 0.f, top = 0.f;
  for (int i = 0; i < int(blockDim.x) / WARP; i++) ss += scratch[i].x, top = fmaxf(top, scratch[i].y);
  return make_float2(ss, top);
}

template <int RANKS, class Rows>
DEVICE void allreduce_rows(float* h, const bf16* g, const Flags& end, const Peers& scales, int T, int part, int D, float eps) {
  SHARED(float2[2 * WARP], scratch);
  griddep_launch();
  const int packs = D / 8, step = blockDim.x, thread = threadIdx.x;
  const int first = min(T, end.rank * part), stop = min(T, first + part);
  const auto mine = [&](int k) { return thread + k * step < packs; };
  const auto peer = [&](int d) { return end.rank + d < end.world ? end.rank + d : end.rank + d - end.world; };
  const auto meet = [&](uint32_t number) {  // a watch each: none is kept in registers between them
    Watch watch = watch_start(end.limit);
    block_barrier(end, number, watch);
  };
  griddep_wait();
  const uint32_t epoch = read_epoch(end) + 2;
  meet(epoch - 1);
  uint4 v[PACKS][RANKS];
  float4 old[PACKS][2];
  const auto request = [&](int row) {
    const int at = row * packs + thread;
#pragma unroll
    for (int k = 0; k < PACKS; k++)
      if (mine(k)) {
#pragma unroll
        for (int s = 0; s < RANKS; s++) v[k][s] = s < end.world ? ld_volatile_v4(end.data.packs(s) + at + k * step) : make_uint4(0, 0, 0, 0);
        old[k][0] = ld_global_f4(h + 8 * int64_t(at + k * step)), old[k][1] = ld_global_f4(h + 8 * int64_t(at + k * step) + 4);
      }
  };
  int turn = 0, row = first + int(blockIdx.x);
  if (row < stop) request(row);
  for (; row < stop; row += gridDim.x, turn ^= WARP) {
    const int at = row * packs + thread;
    float f[PACKS][8], ss = 0.f, top = 0.f;
#pragma unroll
    for (int k = 0; k < PACKS; k++)
      if (mine(k)) {
        sum_sources(f[k], v[k]);
        const float was[8] = {old[k][0].x, old[k][0].y, old[k][0].z, old[k][0].w, old[k][1].x, old[k][1].y, old[k][1].z, old[k][1].w};
#pragma unroll
        for (int j = 0; j < 8; j++) f[k][j] = was[j] + f[k][j], ss = fmaf(f[k][j], f[k][j], ss);
      }
    if (row + int(gridDim.x) < stop) request(row + int(gridDim.x));  // ahead of this row's stores
#pragma unroll
    for (int k = 0; k < PACKS; k++)
      if (mine(k)) {
        float4* to = reinterpret_cast<float4*>(h) + 2 * int64_t(at + k * step);
        to[0] = make_float4(f[k][0], f[k][1], f[k][2], f[k][3]), to[1] = make_float4(f[k][4], f[k][5], f[k][6], f[k][7]);
        if constexpr (Rows::NORMED) {
          float by[8];
          unpack_bf16(by, ld_global_v4(g + 8 * (thread + k * step)));
#pragma unroll
          for (int j = 0; j < 8; j++) f[k][j] *= by[j], top = fmaxf(top, fabsf(f[k][j]));
        } else {
          const auto bits = [&](int j) {
            return make_uint4(__float_as_uint(f[k][j]), __float_as_uint(f[k][j + 1]), __float_as_uint(f[k][j + 2]), __float_as_uint(f[k][j + 3]));
          };
          for (int d = 1; d < end.world; d++) {
            uint4* there = end.results.packs(peer(d)) + 2 * int64_t(at + k * step);
            st_volatile_v4(there, bits(0)), st_volatile_v4(there + 1, bits(4));
          }
        }
      }
    if constexpr (Rows::NORMED) {
      const float2 sums = block_sum_max(ss, top, scratch + turn);
      const float inverse = rsqrtf(sums.x / float(D) + eps);
      const RowScale scale(sums.y);
      const float factor = Rows::SCALED ? scale.factor : inverse;
      if (Rows::SCALED && thread < end.world)
        st_volatile_u32(scales.words(thread) + row, __float_as_uint(scale.scale(inverse)));
#pragma unroll
      for (int k = 0; k < PACKS; k++)
        if (mine(k)) {
#pragma unroll
          for (int j = 0; j < 8; j++) f[k][j] *= factor;
          const auto packed = Rows::pack(f[k]);
          for (int d = 0; d < end.world; d++) Rows::store(end.results, peer(d), at + k * step, packed);
        }
    }
  }
  meet(epoch);
  write_epoch(end, epoch);
}

// end: this rank's; data are the shares [T, D] of each source, from where row 0 is or would be, results every rank's x (h_f32: h).
#define ALLREDUCE_ROWS(NAME, ROWS, RANKS)                                                                          \
  KERNEL_OCC(512, 1) void allreduce_rows_##NAME##_r##RANKS(float* h,              /* [T, D] */                      \
                                                           const bf16* g,         /* [D]; h_f32: not looked at */   \
                                                           BY_VALUE Flags end,                                      \
                                                           BY_VALUE Peers scales, /* every rank's f32 [T]; e4m3 */  \
                                                           int T, int part, int D, float eps) {                     \
    allreduce_rows<RANKS, ROWS>(h, g, end, scales, T, part, D, eps);                                                 \
  }
#define EVERY_NUMBER(NAME, ROWS) ALLREDUCE_ROWS(NAME, ROWS, 2) ALLREDUCE_ROWS(NAME, ROWS, 4) ALLREDUCE_ROWS(NAME, ROWS, 8)
EVERY_NUMBER(f16, F16Rows)
EVERY_NUMBER(bf16, Bf16Rows)
EVERY_NUMBER(e4m3, E4m3Rows)
EVERY_NUMBER(h_f32, F32Rows)
