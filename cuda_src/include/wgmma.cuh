// wgmma.cuh - what every Hopper kernel with warpgroup products shares: operand descriptors, and waiting for a barrier.
#pragma once
#include "ptx.cuh"

constexpr int WARPGROUP = 128;    // threads
constexpr int SWIZZLE_ROW = 128;  // bytes of an operand's row in shared memory: 64 bf16, 128 e4m3

// The descriptor of an operand tile in shared memory: rows of 128 bytes, 1,024-byte aligned, swizzled as the copies swizzle them.
// The next 32 bytes of k are at descriptor + 2; the rows from 8·n on, at descriptor + 64·n.
// Bits 0-13 address / 16, 16-29 leading offset (not used by this layout), 32-45 bytes from 8 rows to the next 8 / 16, 62 swizzle of 128.
DEVICE uint64_t wgmma_tile(const void* tile) {
  return uint64_t((shared_address(tile) & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(8 * SWIZZLE_ROW / 16) << 32 | uint64_t(1) << 62;
}

// The same memory as b of wgmma_bf16_rows: rows are k, 64 bf16 of N each; the next 64 of N lie `apart` bytes on. The next 16 rows of k are at descriptor + 128.
DEVICE uint64_t wgmma_columns(const void* tile, int apart) {
  return (wgmma_tile(tile) & ~(uint64_t(0x3fff) << 16)) | uint64_t(apart / 16) << 16;
}

// Waits for the phase of this parity. Copies and threads of one block cannot be late for long: a wait of two seconds is a mistake, and
// ends the launch with an error instead of hanging the GPU.
DEVICE void mbarrier_wait(uint64_t* bar, uint32_t parity) {
  if (mbarrier_try_wait(bar, parity)) return;
  const uint64_t begin = global_timer_ns();
  while (!mbarrier_try_wait(bar, parity))
    if (global_timer_ns() - begin > 2000000000ull) trap();
}

// A position in a ring of STAGES buffers, and the parity of the phase that it is in.
template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
