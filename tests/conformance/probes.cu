// probes.cu - one entry point for each wrapper of include/ptx.cuh, each conversion of include/vec.cuh and each sum of include/reduce.cuh:
// probe_X does X and as little else as possible, so that its result on a GPU and in the simulator can be compared.
//
// grid: any, threads stride over n; block: up to 256. Where a probe needs another geometry, it says so. Polls give up after limit_ns.
#include "include/reduce.cuh"
#include "include/vec.cuh"

#define EACH(i, n) (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < (n); i += int(gridDim.x * blockDim.x))

// ---- loads and stores: out[i] = in[i] -----------------------------------------------------------------------------
KERNEL(256) void probe_ld_stream_v4(uint4* out, const uint4* in, int n) {
  for EACH(i, n) out[i] = ld_stream_v4(in + i);
}
KERNEL(256) void probe_ld_global_v4(uint4* out, const uint4* in, int n) {
  for EACH(i, n) out[i] = ld_global_v4(in + i);
}
KERNEL(256) void probe_ld_global_f2(float2* out, const float2* in, int n) {
  for EACH(i, n) out[i] = ld_global_f2(in + i);
}
KERNEL(256) void probe_ld_global_f4(float4* out, const float4* in, int n) {
  for EACH(i, n) out[i] = ld_global_f4(in + i);
}
KERNEL(256) void probe_ld_once_v4(uint4* out, const uint4* in, int n) {
  for EACH(i, n) out[i] = ld_once_v4(in + i);
}
KERNEL(256) void probe_ld_once_v2(uint2* out, const uint2* in, int n) {
  for EACH(i, n) out[i] = ld_once_v2(in + i);
}
KERNEL(256) void probe_ld_once_u32(uint32_t* out, const uint32_t* in, int n) {
  for EACH(i, n) out[i] = ld_once_u32(in + i);
}
// The hint names all of the input and, once more, its last pack; the copy that follows must not notice.
KERNEL(256) void probe_prefetch_l2(uint4* out, const uint4* in, int n) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    prefetch_l2(in, uint32_t(n) * 16);
    prefetch_l2(in + n - 1, 16);
  }
  for EACH(i, n) out[i] = in[i];
}
// Two groups of copies on their way at once, the second of every third thread of nothing: the first is there after one wait, zeros after two.
#define PROBE_ASYNC(name)                                                                                       \
  KERNEL(256) void probe_##name(uint4* out, const uint4* in, int n) {                                           \
    SHARED(uint4[2][256], ring);                                                                                \
    for EACH(i, n) {                                                                                            \
      for (int k = 0; k < 2; k++) {                                                                             \
        cp_async_v4(&ring[k][threadIdx.x], in + i, k == 0 || i % 3);                                            \
        cp_async_commit();                                                                                      \
      }                                                                                                         \
      cp_async_wait<1>();                                                                                       \
      const uint4 first = ring[0][threadIdx.x];                                                                 \
      cp_async_wait<0>();                                                                                       \
      const uint4 second = ring[1][threadIdx.x], want = i % 3 ? first : make_uint4(0, 0, 0, 0);                 \
      const bool same = second.x == want.x && second.y == want.y && second.z == want.z && second.w == want.w;   \
      out[i] = same ? first : make_uint4(~first.x, ~first.y, ~first.z, ~first.w);                               \
    }                                                                                                           \
  }
PROBE_ASYNC(cp_async_v4)
PROBE_ASYNC(cp_async_commit)
PROBE_ASYNC(cp_async_wait)
KERNEL(256) void probe_settle(uint32_t* out, const uint32_t* in, int n) {
  for EACH(i, n) {
    const uint32_t* from = in + i;
    settle(from);
    out[i] = *from;
  }
}
KERNEL(256) void probe_ld_volatile_u32(uint32_t* out, const uint32_t* in, int n) {
  for EACH(i, n) out[i] = ld_volatile_u32(in + i);
}
KERNEL(256) void probe_ld_volatile_v4(uint4* out, const uint4* in, int n) {
  for EACH(i, n) out[i] = ld_volatile_v4(in + i);
}
KERNEL(256) void probe_ld_volatile_v2(uint2* out, const uint2* in, int n) {
  for EACH(i, n) out[i] = ld_volatile_v2(in + i);
}
KERNEL(256) void probe_st_volatile_v2(uint2* out, const uint2* in, int n) {
  for EACH(i, n) st_volatile_v2(out + i, in[i]);
}
KERNEL(256) void probe_st_volatile_u64(uint64_t* out, const uint64_t* in, int n) {
  for EACH(i, n) st_volatile_u64(out + i, in[i]);
}
KERNEL(256) void probe_ld_acquire_sys_u32(uint32_t* out, const uint32_t* in, int n) {
  for EACH(i, n) out[i] = ld_acquire_sys_u32(in + i);
}
KERNEL(256) void probe_st_volatile_u32(uint32_t* out, const uint32_t* in, int n) {
  for EACH(i, n) st_volatile_u32(out + i, in[i]);
}
KERNEL(256) void probe_st_volatile_v4(uint4* out, const uint4* in, int n) {
  for EACH(i, n) st_volatile_v4(out + i, in[i]);
}
KERNEL(256) void probe_st_release_sys_u32(uint32_t* out, const uint32_t* in, int n) {
  for EACH(i, n) st_release_sys_u32(out + i, in[i]);
}
KERNEL(256) void probe_st_release_sys_u64(uint64_t* out, const uint64_t* in, int n) {
  for EACH(i, n) st_release_sys_u64(out + i, in[i]);
}

// ---- read-modify-write: element i works on cell i % cells -----------------------------------------------------------
KERNEL(256) void probe_red_release_sys_add_u32(uint32_t* sums, const uint32_t* in, int n, int cells) {
  for EACH(i, n) red_release_sys_add_u32(sums + i % cells, in[i]);
}
KERNEL(256) void probe_atom_inc_acq_rel_gpu(uint32_t* old, uint32_t* counters, const uint32_t* wrap, int n, int cells) {
  for EACH(i, n) old[i] = atom_inc_acq_rel_gpu(counters + i % cells, wrap[i % cells]);
}

// ---- messages: block 0 takes what the other blocks put into `payload`, n words -------------------------------------------------------
// Thread 0's release covers what its whole block wrote before the barrier. grid: (2).
KERNEL(256) void probe_st_release_sys_u32_message(uint32_t* out, uint32_t* payload, uint32_t* flag, const uint32_t* in, int n, uint64_t limit_ns) {
  if (blockIdx.x) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) payload[i] = in[i];
    __syncthreads();
    if (threadIdx.x == 0) st_release_sys_u32(flag, 1);
    return;
  }
  const uint64_t begin = global_timer_ns();
  if (threadIdx.x == 0)
    while (ld_acquire_sys_u32(flag) != 1 && global_timer_ns() - begin < limit_ns) continue;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = payload[i];
}
// Every thread releases what it wrote itself; block 0 has it all when the count is complete.
KERNEL(256) void probe_red_release_sys_add_u32_message(uint32_t* out, uint32_t* payload, uint32_t* count, const uint32_t* in, int n, uint64_t limit_ns) {
  const uint32_t writers = (gridDim.x - 1) * blockDim.x;
  if (blockIdx.x) {
    const int first = int((blockIdx.x - 1) * blockDim.x + threadIdx.x);
    for (int i = first; i < n; i += int(writers)) payload[i] = in[i];
    red_release_sys_add_u32(count, 1);
    return;
  }
  const uint64_t begin = global_timer_ns();
  if (threadIdx.x == 0)
    while (ld_acquire_sys_u32(count) != writers && global_timer_ns() - begin < limit_ns) continue;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = payload[i];
}
// Nobody waits: the last block to arrive takes what all have put.
KERNEL(256) void probe_atom_inc_acq_rel_gpu_message(uint32_t* out, uint32_t* payload, uint32_t* count, const uint32_t* in, int n) {
  SHARED(uint32_t, arrived);
  for EACH(i, n) payload[i] = in[i];
  __syncthreads();
  if (threadIdx.x == 0) arrived = atom_inc_acq_rel_gpu(count, gridDim.x - 1);
  __syncthreads();
  if (arrived != gridDim.x - 1) return;
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = payload[i];
}

// ---- programmatic dependent launch -----------------------------------------------------------------------------------
// Lets its successor start at once, and writes only after delay_ns: a successor that does not wait reads what was there before.
KERNEL(256) void probe_griddep_launch(uint32_t* out, const uint32_t* in, int n, uint64_t delay_ns) {
  griddep_launch();
  const uint64_t begin = global_timer_ns();
  while (global_timer_ns() - begin < delay_ns) __nanosleep(100);
  for EACH(i, n) out[i] = in[i] + 1;
}
// A link of the chain, to be launched as a dependent one.
KERNEL(256) void probe_griddep_wait(uint32_t* out, const uint32_t* in, int n) {
  griddep_wait();
  for EACH(i, n) out[i] = in[i] + 1;
}
// The same, waiting once it has its address.
KERNEL(256) void probe_griddep_wait_with(uint32_t* out, const uint32_t* in, int n) {
  griddep_wait_with(reinterpret_cast<uint64_t>(in));
  for EACH(i, n) out[i] = in[i] + 1;
}
// Runs until its successor, launched as a dependent one, has rung: the two must overlap. grid: (1); block: 32.
KERNEL(32) void probe_griddep_launch_early(uint32_t* heard, const uint32_t* bell, uint64_t limit_ns) {
  griddep_launch();
  const uint64_t begin = global_timer_ns();
  while (ld_volatile_u32(bell) == 0 && global_timer_ns() - begin < limit_ns) continue;
  heard[threadIdx.x] = ld_volatile_u32(bell);
}
KERNEL(32) void probe_griddep_wait_early(uint32_t* bell) {
  st_volatile_u32(bell, 1);
  griddep_wait();
}

// ---- clusters, of four blocks of 64 ----------------------------------------------------------------------------------------------
KERNEL(64) void probe_cluster_rank(uint32_t* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = cluster_rank(); }
// When each thread passed the barrier, and in the first block of a cluster when it arrived, delay_ns late.
#define PROBE_CLUSTER(wrapper)                                                           \
  KERNEL(64) void probe_##wrapper(uint64_t* arrived, uint64_t* left, uint64_t delay_ns) { \
    const int i = blockIdx.x * blockDim.x + threadIdx.x;                                  \
    const uint64_t begin = global_timer_ns();                                             \
    while (cluster_rank() == 0 && global_timer_ns() - begin < delay_ns) __nanosleep(100); \
    arrived[i] = global_timer_ns();                                                       \
    cluster_arrive();                                                                     \
    cluster_wait();                                                                       \
    left[i] = global_timer_ns();                                                          \
  }
PROBE_CLUSTER(cluster_arrive)
PROBE_CLUSTER(cluster_wait)
// Every thread pushes its element to all four blocks; out: [block][source][thread]. Dynamic shared memory: 4·64 elements and a barrier.
#define PROBE_PUSH(wrapper, push, T)                                                                  \
  KERNEL(64) void probe_##wrapper(T* out, const T* in, uint64_t limit_ns) {                           \
    DYN_SHARED(T, shared);                                                                            \
    uint64_t* barrier = reinterpret_cast<uint64_t*>(shared + 4 * 64);                                 \
    const int t = threadIdx.x, mine = 64 * cluster_rank() + t;                                        \
    if (t == 0) push_init(barrier);                                                                   \
    __syncwarp();                                                                                     \
    cluster_arrive();                                                                                 \
    cluster_wait();                                                                                   \
    for (int rank = 0; rank < 4; rank++) push(shared + mine, rank, in[blockIdx.x * 64 + t], barrier); \
    if (t == 0) push_expect(barrier, 4 * 64 * sizeof(T));                                             \
    const uint64_t begin = global_timer_ns();                                                         \
    while (!push_arrived(barrier) && global_timer_ns() - begin < limit_ns) continue;                  \
    for (int s = 0; s < 4; s++) out[(blockIdx.x * 4 + s) * 64 + t] = shared[64 * s + t];              \
  }
PROBE_PUSH(push_init, push_f4, float4)
PROBE_PUSH(push_expect, push_f2, float2)
PROBE_PUSH(push_f4, push_f4, float4)
PROBE_PUSH(push_f2, push_f2, float2)
PROBE_PUSH(push_f1, push_f1, float)
PROBE_PUSH(push_arrived, push_f4, float4)

// ---- arithmetic -----------------------------------------------------------------------------------------------------------
KERNEL(256) void probe_ex2_approx(float* out, const float* in, int n) {
  for EACH(i, n) out[i] = ex2_approx(in[i]);
}

// An 8×8 matrix a warp, row-major, two neighbours a word.
KERNEL(256) void probe_movmatrix_trans(uint32_t* out, const uint32_t* in) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = movmatrix_trans(in[i]);
}
KERNEL(256) void probe_rcp_approx(float* out, const float* in, int n) {
  for EACH(i, n) out[i] = rcp_approx(in[i]);
}

// One warp's fragments of tile blockIdx.x, as include/ptx.cuh lays them out: a [16, 16], b [16, 8], c and out [16, 8], row-major.
// grid: (tiles); block: 32.
#define PROBE_MMA(mma)                                                                                    \
  KERNEL(32) void probe_##mma(float* out, const uint16_t* a, const uint16_t* b, const float* c) {         \
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;                                                   \
    a += 256 * blockIdx.x, b += 128 * blockIdx.x, c += 128 * blockIdx.x, out += 128 * blockIdx.x;         \
    uint32_t x[4], y[2];                                                                                  \
    float z[4];                                                                                           \
    for (int i = 0; i < 4; i++) {                                                                         \
      const uint16_t* p = a + 16 * (g + 8 * (i % 2)) + 2 * t + 8 * (i / 2);                               \
      x[i] = uint32_t(p[0]) | uint32_t(p[1]) << 16;                                                       \
      z[i] = c[8 * (g + 8 * (i / 2)) + 2 * t + i % 2];                                                    \
    }                                                                                                     \
    for (int i = 0; i < 2; i++) {                                                                         \
      const uint16_t* p = b + 8 * (2 * t + 8 * i) + g;                                                    \
      y[i] = uint32_t(p[0]) | uint32_t(p[8]) << 16;                                                       \
    }                                                                                                     \
    mma(z, x, y);                                                                                         \
    for (int i = 0; i < 4; i++) out[8 * (g + 8 * (i / 2)) + 2 * t + i % 2] = z[i];                        \
  }
PROBE_MMA(mma_bf16_16816)
PROBE_MMA(mma_f16_16816)

// ---- time and failure -------------------------------------------------------------------------------------------------------
// out[i] = {1 if the clock never went back in this thread, 1 if it moved within `tries` readings}.
KERNEL(256) void probe_global_timer_ns(uint32_t* out, int n, int tries) {
  for EACH(i, n) {
    const uint64_t first = global_timer_ns();
    uint64_t last = first;
    bool monotone = true;
    for (int k = 0; k < tries && last == first; k++) {
      __nanosleep(100);
      const uint64_t now = global_timer_ns();
      monotone = monotone && now >= last;
      last = now;
    }
    out[2 * i] = monotone;
    out[2 * i + 1] = last > first;
  }
}
// Traps in one thread if told to, else writes.
KERNEL(256) void probe_trap(uint32_t* out, int fail) {
  if (fail && threadIdx.x == 7) trap();
  out[threadIdx.x] = threadIdx.x;
}

// ---- include/vec.cuh ----------------------------------------------------------------------------------------------------------
KERNEL(256) void probe_bf16_lo(float* out, const uint32_t* in, int n) {
  for EACH(i, n) out[i] = bf16_lo(in[i]);
}
KERNEL(256) void probe_bf16_hi(float* out, const uint32_t* in, int n) {
  for EACH(i, n) out[i] = bf16_hi(in[i]);
}
KERNEL(256) void probe_pack_bf16(uint32_t* out, const float* in, int n) {
  for EACH(i, n) out[i] = pack_bf16(in[2 * i], in[2 * i + 1]);
}
KERNEL(256) void probe_pack_f16(uint32_t* out, const float* in, int n) {
  for EACH(i, n) out[i] = pack_f16(in[2 * i], in[2 * i + 1]);
}
KERNEL(256) void probe_pack_e4m3x4(uint32_t* out, const float* in, int n) {
  for EACH(i, n) out[i] = pack_e4m3x4(in[4 * i], in[4 * i + 1], in[4 * i + 2], in[4 * i + 3]);
}
#define PROBE_PACK(pack)                                                    \
  KERNEL(256) void probe_##pack(uint4* out, const float* in, int n) {       \
    for EACH(i, n) {                                                        \
      float f[8];                                                           \
      for (int j = 0; j < 8; j++) f[j] = in[8 * i + j];                     \
      out[i] = pack(f);                                                     \
    }                                                                       \
  }
PROBE_PACK(pack_bf16x8)
PROBE_PACK(pack_f16x8)
#define PROBE_UNPACK(unpack, T, COUNT)                                      \
  KERNEL(256) void probe_##unpack(float* out, const T* in, int n) {         \
    for EACH(i, n) {                                                        \
      float f[COUNT];                                                       \
      unpack(f, in[i]);                                                     \
      for (int j = 0; j < COUNT; j++) out[COUNT * i + j] = f[j];            \
    }                                                                       \
  }
PROBE_UNPACK(unpack_bf16, uint4, 8)
PROBE_UNPACK(unpack_f16, uint4, 8)
PROBE_UNPACK(unpack_e4m3, uint32_t, 4)
KERNEL(256) void probe_widen_e4m3(uint32_t* out, const uint32_t* in, int n) {
  for EACH(i, n) out[2 * i] = widen_e4m3(uint16_t(in[i])), out[2 * i + 1] = widen_e4m3(uint16_t(in[i] >> 16));
}
KERNEL(256) void probe_widen_e4m3x4(uint32_t* out, const uint32_t* in, int n) {
  for EACH(i, n) widen_e4m3x4(out[2 * i], out[2 * i + 1], in[i]);
}
KERNEL(256) void probe_split_halves(uint32_t* out, const uint32_t* in, int n) {
  for EACH(i, n) {
    uint16_t lo, hi;
    split_halves(lo, hi, in[i]);
    out[i] = lo | uint32_t(hi) << 16;
  }
}
KERNEL(256) void probe_cvt_f16x2_sat(uint32_t* out, const float* in, int n) {
  for EACH(i, n) out[i] = cvt_f16x2_sat(in[2 * i], in[2 * i + 1]);
}

// ---- include/reduce.cuh: every thread writes what it got. Blocks of whole warps, a thread an element. ---------------------------
KERNEL(256) void probe_warp_sum(float* out, const float* in) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = warp_sum(in[i]);
}
KERNEL(256) void probe_warp_max(float* out, const float* in) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = warp_max(in[i]);
}
KERNEL(256) void probe_block_sum(float* out, const float* in) {
  SHARED(float[WARP], scratch);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = block_sum(in[i], scratch);
}
