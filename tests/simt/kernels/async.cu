// async.cu - a ring of two buffers between a copying warp and a multiplying warpgroup, a hand-over, an operand in registers: right and with one mistake each; and what cannot be
// launched at all. tests/simt/test_async.py. x [64, 64·slices] and w [16, 64·slices] in bf16; out [64, 16] = x·wᵀ. block: 160.
#include "include/vec.cuh"
#include "include/wgmma.cuh"

enum Mistake { NONE, READS_EARLY, GIVES_BACK_EARLY, COPIES_EARLY, SUMS_EARLY };
constexpr int STAGE = (64 + 16) * 128;

template <Mistake MISTAKE>
DEVICE void ring(float* out, const TensorMap& x, const TensorMap& w, int slices) {
  DYN_SHARED_TILES(unsigned char, buffer);
  uint64_t *full = reinterpret_cast<uint64_t*>(buffer + 2 * STAGE), *empty = full + 2;
  if (threadIdx.x < 2) {
    mbarrier_init(full + threadIdx.x, 1);
    mbarrier_init(empty + threadIdx.x, 4);
    mbarrier_init_fence();
  }
  __syncthreads();
  RingPosition<2> r;
  if (threadIdx.x >= 128) {
    if (threadIdx.x > 128) return;
    for (int k = 0; k < slices; k++, r.next()) {
      if (MISTAKE != COPIES_EARLY && k >= 2) mbarrier_wait(empty + r.stage, r.parity ^ 1);
      mbarrier_arrive_expect_tx(full + r.stage, STAGE);
      tma_load_2d(buffer + r.stage * STAGE, x, full + r.stage, 64 * k, 0);
      tma_load_2d(buffer + r.stage * STAGE + 64 * 128, w, full + r.stage, 64 * k, 0);
    }
    return;
  }
  float d[8];
  for (int k = 0; k < slices; k++, r.next()) {
    if (MISTAKE != READS_EARLY) mbarrier_wait(full + r.stage, r.parity);
    const uint64_t a = wgmma_tile(buffer + r.stage * STAGE), b = wgmma_tile(buffer + r.stage * STAGE + 64 * 128);
    wgmma_fence();
    for (int i = 0; i < 4; i++) wgmma_bf16(d, a + 2 * i, b + 2 * i, k > 0 || i > 0);
    wgmma_commit();
    if (MISTAKE != GIVES_BACK_EARLY && MISTAKE != SUMS_EARLY) wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + r.stage);
    if (MISTAKE == GIVES_BACK_EARLY) wgmma_wait<0>();
    if (MISTAKE == READS_EARLY) mbarrier_wait(full + r.stage, r.parity);
  }
  const int row = int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4, col = int(threadIdx.x) % 4 * 2;
  for (int i = 0; i < 8; i++) out[(row + i / 2 % 2 * 8) * 16 + col + i / 4 * 8 + i % 2] = d[i];
  if (MISTAKE == SUMS_EARLY) wgmma_wait<0>();
}
#define RING(name, MISTAKE) \
  KERNEL(160) void name(float* out, BY_VALUE TensorMap x, BY_VALUE TensorMap w, int slices) { ring<MISTAKE>(out, x, w, slices); }
RING(ring_ok, NONE)
RING(ring_reads_early, READS_EARLY)
RING(ring_gives_back_early, GIVES_BACK_EARLY)
RING(ring_copies_early, COPIES_EARLY)
RING(ring_sums_early, SUMS_EARLY)

// Two warps hand words over to two others that wait for them; out [64]. LATE: some are put after the hand-over. TAKES: the first read the others'.
template <bool LATE, bool TAKES>
DEVICE void hand_over(uint32_t* out) {
  DYN_SHARED_TILES(uint32_t, slots);
  const uint32_t t = threadIdx.x;
  if (t < 64) {
    if (!LATE) slots[t] = t;
    named_barrier_arrive(1, 128);
    if (LATE) slots[t] = t;
    if (TAKES) out[t] = slots[64 + t];
  } else {
    if (TAKES) slots[t] = t;
    named_barrier(1, 128);
    if (!TAKES) out[t - 64] = slots[t - 64];
  }
}
KERNEL(128) void hand_over_ok(uint32_t* out) { hand_over<false, false>(out); }
KERNEL(128) void hand_over_late(uint32_t* out) { hand_over<true, false>(out); }
KERNEL(128) void hand_over_takes(uint32_t* out) { hand_over<false, true>(out); }

// d += a·b by a warpgroup, a (16×16 ones a warp) in registers and b [16, 64] in shared memory. EARLY: a is overwritten while the product is in flight.
template <bool EARLY>
DEVICE void registers(float* out) {
  DYN_SHARED_TILES(uint16_t, b);
  for (int i = threadIdx.x; i < 16 * 64; i += 128) b[i] = 0x3f80;
  __syncthreads();
  float d[32] = {};
  uint32_t a[4];
  for (int i = 0; i < 4; i++) a[i] = 0x3f803f80u;
  wgmma_fence();
  wgmma_bf16_rows(d, a, wgmma_columns(b, 0));
  wgmma_commit();
  if (EARLY) a[threadIdx.x % 4] = 0;
  wgmma_wait<0>();
  float sum = 0;
  for (int i = 0; i < 32; i++) sum += d[i];
  out[threadIdx.x] = sum;
}
KERNEL(128) void registers_ok(float* out) { registers<false>(out); }
KERNEL(128) void registers_early(float* out) { registers<true>(out); }

// ---- misuse that the hardware would answer with a hang or nonsense. mode: which -----------------------------------------------------
KERNEL(160) void misuse(BY_VALUE TensorMap x, int mode) {
  DYN_SHARED_TILES(unsigned char, buffer);
  uint64_t* bar = reinterpret_cast<uint64_t*>(buffer + 64 * 128);
  if (mode == 0) mbarrier_arrive(bar);  // before it was initialised
  if (threadIdx.x == 0) mbarrier_init(bar, 1);
  __syncthreads();
  if (mode == 1 && threadIdx.x == 0) tma_load_2d(buffer, x, bar, 0, 0);            // and ends without waiting
  if (mode == 2 && threadIdx.x == 0) tma_load_2d(buffer + 128, x, bar, 0, 0);      // not aligned for its swizzle
  if (mode == 3 && threadIdx.x == 0) tma_load_3d(buffer, x, bar, 0, 0, 0);  // of a matrix
  if (mode == 4) named_barrier(1, threadIdx.x < 32 ? 64 : 96);
  if (mode == 5 && threadIdx.x < 64) named_barrier(1, 96);  // 32 never come
  if (mode == 6) mbarrier_wait(bar, 0);                     // nobody arrives
  if (mode == 7 && threadIdx.x >= 128) {                    // the fifth warp is no warpgroup
    float d[8];
    wgmma_bf16(d, wgmma_tile(buffer), wgmma_tile(buffer), 0);
  }
  if (mode == 8 && threadIdx.x < 128) {
    float d[8];
    wgmma_bf16(d, wgmma_tile(buffer), wgmma_tile(buffer), 0);
    wgmma_commit();  // and ends without waiting
  }
  if (mode == 9 && threadIdx.x < 64) named_barrier_arrive(1, 128);  // and nobody waits
  if (mode == 10 && threadIdx.x == 0) tma_store_2d(x, buffer, 0, -3);  // begins above the matrix
}
