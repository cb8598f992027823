// probes_sm90.cu - one entry point for each wrapper of include/ptx.cuh that needs Hopper, as probes.cu for the others. Wrappers that only
// work together share a body: a barrier is initialised, made known, arrived at and waited for. grid: (1) unless said otherwise.
#include "include/vec.cuh"
#include "include/wgmma.cuh"

// The distance in bytes of each of n words from the first.
KERNEL(128) void probe_shared_address(uint32_t* out, int n) {
  DYN_SHARED_TILES(uint32_t, words);
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = shared_address(words + i) - shared_address(words);
}

// ---- mbarriers: in each round a thread puts its number, meets the others, and takes the next thread's. out: [rounds, blockDim.x] --------
#define PROBE_MBARRIER(wrapper)                                                                    \
  KERNEL(256) void probe_##wrapper(uint32_t* out, const uint32_t* in, int rounds) {               \
    DYN_SHARED_TILES(uint64_t, bars);                                                             \
    volatile uint32_t* slots = reinterpret_cast<volatile uint32_t*>(bars + 2);                    \
    const int t = threadIdx.x, n = blockDim.x;                                                    \
    if (t < 2) mbarrier_init(bars + t, n);                                                        \
    mbarrier_init_fence();                                                                        \
    __syncthreads();                                                                              \
    for (int r = 0; r < rounds; r++) {                                                            \
      slots[t] = in[r * n + t];                                                                   \
      mbarrier_arrive(bars);                                                                      \
      while (!mbarrier_try_wait(bars, r % 2)) continue;                                           \
      out[r * n + t] = slots[(t + 1) % n];                                                        \
      mbarrier_arrive(bars + 1);                                                                  \
      mbarrier_wait(bars + 1, r % 2);                                                             \
    }                                                                                             \
  }
PROBE_MBARRIER(mbarrier_init)
PROBE_MBARRIER(mbarrier_init_fence)
PROBE_MBARRIER(mbarrier_arrive)
PROBE_MBARRIER(mbarrier_try_wait)

// ---- copies: box after box through one buffer, each written out as it lies in shared memory. at: [boxes, 5] -------------------------
#define TAKE_BOXES(load)                                                                          \
  DYN_SHARED_TILES(unsigned char, buffer);                                                        \
  uint64_t* bar = reinterpret_cast<uint64_t*>(buffer + bytes);                                    \
  if (threadIdx.x == 0) {                                                                         \
    mbarrier_init(bar, 1);                                                                        \
    mbarrier_init_fence();                                                                        \
  }                                                                                               \
  for (int box = 0; box < boxes; box++) {                                                         \
    __syncthreads();                                                                              \
    if (threadIdx.x == 0) {                                                                       \
      const int* c = at + 5 * box;                                                                \
      mbarrier_arrive_expect_tx(bar, uint32_t(bytes));                                            \
      load;                                                                                       \
    }                                                                                             \
    mbarrier_wait(bar, box % 2);                                                                  \
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x)                                    \
      out[box * (bytes / 16) + i] = reinterpret_cast<const uint4*>(buffer)[i];                    \
  }
#define PROBE_BOXES(wrapper, load)                                                                \
  KERNEL(128) void probe_##wrapper(uint4* out, BY_VALUE TensorMap map, const int* at, int boxes, int bytes) { TAKE_BOXES(load) }
PROBE_BOXES(tma_load_2d, tma_load_2d(buffer, map, bar, c[0], c[1]))
PROBE_BOXES(tma_load_3d, tma_load_3d(buffer, map, bar, c[0], c[1], c[2]))
PROBE_BOXES(mbarrier_arrive_expect_tx, tma_load_2d(buffer, map, bar, c[0], c[1]))

// ---- clusters of two blocks ----------------------------------------------------------------------------------------------------------
DEVICE void cluster_meet() {
  cluster_arrive();
  cluster_wait();
}
// Rounds in which each block waits for all threads of the other: out[block, round] is 1 if it was not over before. block: 64.
KERNEL(64) void probe_mbarrier_arrive_at(uint32_t* out, int rounds) {
  DYN_SHARED_TILES(uint64_t, bar);
  if (threadIdx.x == 0) mbarrier_init(bar, blockDim.x);
  mbarrier_init_fence();
  cluster_meet();
  for (int r = 0; r < rounds; r++) {
    const bool over = mbarrier_try_wait(bar, r % 2);  // before this block has told the other to go on
    cluster_meet();
    mbarrier_arrive_at(bar, cluster_rank() ^ 1);
    mbarrier_wait(bar, r % 2);
    if (threadIdx.x == 0) out[blockIdx.x * rounds + r] = !over;
  }
  cluster_meet();
}
// Each block copies one half of the box to both: 16 rows, then 32. out: [2, bytes].
#define PROBE_MULTICAST(wrapper)                                                                                                         \
  KERNEL(128) void probe_##wrapper(uint4* out, BY_VALUE TensorMap map, int bytes) {                                                      \
    DYN_SHARED_TILES(unsigned char, buffer);                                                                                             \
    uint64_t* bar = reinterpret_cast<uint64_t*>(buffer + bytes);                                                                         \
    const int rank = int(cluster_rank());                                                                                                \
    if (threadIdx.x == 0) {                                                                                                              \
      mbarrier_init(bar, 1);                                                                                                             \
      mbarrier_init_fence();                                                                                                             \
    }                                                                                                                                    \
    __syncthreads();                                                                                                                     \
    cluster_meet();                                                                                                                      \
    if (threadIdx.x == 0) {                                                                                                              \
      mbarrier_arrive_expect_tx(bar, uint32_t(bytes));                                                                                   \
      wrapper(buffer + rank * (bytes / 2), map, bar, 8, 16 * rank, uint16_t(3));                                                         \
    }                                                                                                                                    \
    mbarrier_wait(bar, 0);                                                                                                               \
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) out[rank * (bytes / 16) + i] = reinterpret_cast<const uint4*>(buffer)[i]; \
    cluster_meet();                                                                                                                      \
  }
PROBE_MULTICAST(tma_multicast_2d)

// ---- copies out: box after box through two buffers, each filled with in's [boxes, bytes] as it is to lie in shared memory. at: [boxes, 2] -----
#define PROBE_BOXES_OUT(wrapper, send)                                                            \
  KERNEL(128) void probe_##wrapper(BY_VALUE TensorMap map, const uint4* in, const int* at, int boxes, int bytes) { \
    DYN_SHARED_TILES(unsigned char, buffers);                                                     \
    for (int b = 0; b < boxes; b++) {                                                             \
      unsigned char* buffer = buffers + b % 2 * bytes;                                            \
      if (threadIdx.x == 0) bulk_wait_read<1>();                                                  \
      __syncthreads();                                                                            \
      for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x)                                  \
        reinterpret_cast<uint4*>(buffer)[i] = in[b * (bytes / 16) + i];                           \
      async_fence();                                                                              \
      __syncthreads();                                                                            \
      if (threadIdx.x == 0) {                                                                     \
        tma_prefetch(map);                                                                        \
        send(map, buffer, at[2 * b], at[2 * b + 1]);                                              \
        bulk_commit();                                                                            \
      }                                                                                           \
    }                                                                                             \
    if (threadIdx.x == 0) bulk_wait_read<0>();                                                    \
  }
PROBE_BOXES_OUT(tma_store_2d, tma_store_2d)
PROBE_BOXES_OUT(tma_add_2d, tma_add_2d)
PROBE_BOXES_OUT(tma_prefetch, tma_store_2d)
PROBE_BOXES_OUT(bulk_commit, tma_store_2d)
PROBE_BOXES_OUT(bulk_wait_read, tma_store_2d)
PROBE_BOXES_OUT(async_fence, tma_store_2d)

// Four matrices [4, 8, 8] of 16 bits, each lane's words as a product's sums lie, written rows reversed. block: 32.
KERNEL(32) void probe_stmatrix_x4(uint32_t* out, const uint32_t* in) {
  DYN_SHARED_TILES(uint32_t, words);
  const int lane = int(threadIdx.x);
  uint32_t w[4];
  for (int i = 0; i < 4; i++) w[i] = in[32 * i + lane];
  stmatrix_x4(words + 4 * (31 - lane), w);
  __syncwarp();
  for (int i = 0; i < 4; i++) out[32 * i + lane] = words[32 * i + lane];
}

// Two groups of two warps, each with its own barrier: out[t] is what the thread's neighbour in its group has put. block: 128.
KERNEL(128) void probe_named_barrier(uint32_t* out, const uint32_t* in) {
  DYN_SHARED_TILES(uint32_t, slots);
  const int t = threadIdx.x, group = t / 64;
  slots[t] = in[t];
  named_barrier(1 + group, 64);
  out[t] = slots[group * 64 + (t + 33) % 64];
}

// The first two warps put and go on; the others wait for them, and take. out: [64]. block: 128.
KERNEL(128) void probe_named_barrier_arrive(uint32_t* out, const uint32_t* in) {
  DYN_SHARED_TILES(uint32_t, slots);
  const int t = threadIdx.x;
  if (t < 64) {
    slots[t] = in[t];
    named_barrier_arrive(1, 128);
  } else {
    named_barrier(1, 128);
    out[t - 64] = slots[127 - t];
  }
}

// One warpgroup gives registers away, two take them. block: 384.
#define PROBE_REGISTERS(wrapper)                                             \
  KERNEL_OCC(384, 1) void probe_##wrapper(uint32_t* out, const uint32_t* in) { \
    if (threadIdx.x < WARPGROUP) {                                           \
      register_decrease<40>();                                               \
      out[threadIdx.x] = in[threadIdx.x];                                    \
    } else {                                                                 \
      register_increase<232>();                                              \
      out[threadIdx.x] = ~in[threadIdx.x];                                   \
    }                                                                        \
  }
PROBE_REGISTERS(register_increase)
PROBE_REGISTERS(register_decrease)

// Pair i is added to sums' pair i % cells. grid: any.
KERNEL(256) void probe_red_add_f32x2(float* sums, const float* in, int n, int cells) {
  for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += int(gridDim.x * blockDim.x))
    red_add_f32x2(sums + 2 * (i % cells), in[2 * i], in[2 * i + 1]);
}

// ---- products: out [64, N] = c + a·bᵀ over K = 128 bytes in four steps, a [64, 128 bytes], b [N, 128 bytes] --------------------------------
// `groups`: each step is a group of its own, and only the last is waited for with 0. block: 128.
template <int REGS, class Multiply>
DEVICE void product(float* out, const TensorMap& a, const TensorMap& b, const float* c, int groups, const Multiply& multiply) {
  DYN_SHARED_TILES(unsigned char, buffer);
  constexpr int N = 2 * REGS, A = 64 * SWIZZLE_ROW, B = N * SWIZZLE_ROW;
  uint64_t* bar = reinterpret_cast<uint64_t*>(buffer + A + B);
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(bar, A + B);
    tma_load_2d(buffer, a, bar, 0, 0);
    tma_load_2d(buffer + A, b, bar, 0, 0);
  }
  __syncthreads();
  const int row = int(threadIdx.x) / WARP * 16 + int(threadIdx.x) % WARP / 4, col = int(threadIdx.x) % 4 * 2;
  float d[REGS];
#pragma unroll
  for (int i = 0; i < REGS; i++) d[i] = c[(row + i / 2 % 2 * 8) * N + col + i / 4 * 8 + i % 2];
  mbarrier_wait(bar, 0);
  const uint64_t desc_a = wgmma_tile(buffer), desc_b = wgmma_tile(buffer + A);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    multiply(d, desc_a + 2 * i, desc_b + 2 * i, groups >= 0 || i > 0);
    if (groups > 0) wgmma_commit();
  }
  wgmma_commit();
  wgmma_wait<1>();
  wgmma_wait<0>();
  wgmma_results(d);
#pragma unroll
  for (int i = 0; i < REGS; i++) out[(row + i / 2 % 2 * 8) * N + col + i / 4 * 8 + i % 2] = d[i];
}
#define PRODUCT(name, multiply, REGS)                                                                                             \
  KERNEL(128) void probe_##name(float* out, BY_VALUE TensorMap a, BY_VALUE TensorMap b, const float* c, int groups) {           \
    product<REGS>(out, a, b, c, groups, [](float(&d)[REGS], uint64_t x, uint64_t y, int add) { multiply(d, x, y, add); });      \
  }
#define PROBE_WGMMA(wrapper, n, REGS) PRODUCT(wrapper##_n##n, wrapper, REGS)
PROBE_WGMMA(wgmma_bf16, 8, 4)
PROBE_WGMMA(wgmma_bf16, 16, 8)
PROBE_WGMMA(wgmma_bf16, 32, 16)
PROBE_WGMMA(wgmma_bf16, 64, 32)
PROBE_WGMMA(wgmma_bf16, 128, 64)
PROBE_WGMMA(wgmma_bf16, 144, 72)
PROBE_WGMMA(wgmma_bf16, 160, 80)
PROBE_WGMMA(wgmma_bf16, 192, 96)
PROBE_WGMMA(wgmma_bf16, 224, 112)
PROBE_WGMMA(wgmma_bf16, 256, 128)
PROBE_WGMMA(wgmma_f16, 64, 32)
PROBE_WGMMA(wgmma_f16, 256, 128)
PROBE_WGMMA(wgmma_e4m3, 8, 4)
PROBE_WGMMA(wgmma_e4m3, 16, 8)
PROBE_WGMMA(wgmma_e4m3, 32, 16)
PROBE_WGMMA(wgmma_e4m3, 128, 64)
PROBE_WGMMA(wgmma_e4m3, 256, 128)
// The same of what belongs to every product.
#define PROBE_OF_PRODUCT(wrapper) PRODUCT(wrapper, wgmma_bf16, 8)
PROBE_OF_PRODUCT(wgmma_fence)
PROBE_OF_PRODUCT(wgmma_commit)
PROBE_OF_PRODUCT(wgmma_wait)
PROBE_OF_PRODUCT(wgmma_results)

// ---- out [64, N] = c + a·b over k = 64 in four steps: a [64, 64] in registers, b [64, N] as it lies in memory. block: 128 -----------------
template <int REGS>
DEVICE void product_of_rows(float* out, const bf16* a, const TensorMap& b, const float* c) {
  DYN_SHARED_TILES(unsigned char, buffer);
  constexpr int N = 2 * REGS, SLAB = 64 * SWIZZLE_ROW;
  uint64_t* bar = reinterpret_cast<uint64_t*>(buffer + N / 64 * SLAB);
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(bar, N / 64 * SLAB);
    for (int i = 0; i < N / 64; i++) tma_load_2d(buffer + i * SLAB, b, bar, 64 * i, 0);
  }
  __syncthreads();
  const int row = int(threadIdx.x) / WARP * 16 + int(threadIdx.x) % WARP / 4, col = int(threadIdx.x) % 4 * 2;
  float d[REGS];
  uint32_t x[4][4];
#pragma unroll
  for (int i = 0; i < REGS; i++) d[i] = c[(row + i / 2 % 2 * 8) * N + col + i / 4 * 8 + i % 2];
#pragma unroll
  for (int i = 0; i < 16; i++) x[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(a + (row + i % 2 * 8) * 64 + i / 4 * 16 + i / 2 % 2 * 8 + col);
#pragma unroll
  for (int i = 0; i < 4; i++) wgmma_operand(x[i]);
  mbarrier_wait(bar, 0);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; i++) wgmma_bf16_rows(d, x[i], wgmma_columns(buffer, SLAB) + 128 * i);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_results(d);
#pragma unroll
  for (int i = 0; i < REGS; i++) out[(row + i / 2 % 2 * 8) * N + col + i / 4 * 8 + i % 2] = d[i];
}
#define PRODUCT_OF_ROWS(name, REGS)                                                                                 \
  KERNEL(128) void probe_##name(float* out, const bf16* a, BY_VALUE TensorMap b, const float* c) {                   \
    product_of_rows<REGS>(out, a, b, c);                                                                            \
  }
#define PROBE_ROWS(wrapper, n, REGS) PRODUCT_OF_ROWS(wrapper##_n##n, REGS)
PROBE_ROWS(wgmma_bf16_rows, 64, 32)
PROBE_ROWS(wgmma_bf16_rows, 128, 64)
#define PROBE_OPERAND(wrapper) PRODUCT_OF_ROWS(wrapper, 32)
PROBE_OPERAND(wgmma_operand)
