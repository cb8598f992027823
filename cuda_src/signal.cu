// signal.cu - put-with-signal: a payload and a doorbell into a slot of another rank's memory; the other end waits for the doorbell.
//
// A channel has SLOTS slots on the consumer, used in turn: {header pack, payload[n]}. The header's first word is the doorbell: armed to
// 0x80000000 (-0.0), rung by any value whose magnitude bits are not zero (the hand-over's number, 1 … 0x7fffffff). A stream can wait for it
// too: cuStreamWaitValue32(word, 0x7fffffff, AND) proceeds when a magnitude bit is set.
//
// put   Waits until the slot is free, stores the payload, then the doorbell. Block barrier → system fence → release store: the doorbell
//       cannot be seen before the payload. The credit that makes a slot free is a word on the producer that the consumer writes: the number
//       of hand-overs it has finished. Slot k mod 3 is free for hand-over k when k - 3 are finished. So a producer may run three ahead, no
//       further, and nothing tears whatever the two ends' speeds.
// take  Waits for the doorbell to be its number, copies the payload out, re-arms the doorbell, and then gives the credit (release), so
//       that the next ring cannot be wiped by the re-arming.
// The payload may be anything, 0.0, -0.0 and the sentinel included: only the header is a signal.
//
// Both read their number from device memory and advance it: graphs replay without arguments. grid: (1); block: up to 512.
// PRECOND  n packs; slots and payloads 16-byte aligned; doorbells armed, numbers and credit zero before the first call; one stream an end.
// minimum arch: sm_80
#include "include/peers.cuh"

constexpr int SLOTS = 3;
constexpr uint32_t ARMED = 0x80000000u;
constexpr uint32_t MAGNITUDE = 0x7fffffffu;

// Doorbell value of hand-over k = 1, 2, …: never zero in its magnitude bits.
DEVICE uint32_t ring_of(uint32_t k) { return (k - 1) % MAGNITUDE + 1; }
DEVICE uint4* slot_of(uint64_t slots, uint32_t k, int n) { return reinterpret_cast<uint4*>(slots) + int64_t(k % SLOTS) * (n + 1); }

KERNEL(512) void
signal_put(const uint4* payload,    // [n]
           uint64_t slots,          // consumer's memory, [3, 1 + n] packs
           const uint32_t* credit,  // [1] this rank's: hand-overs the consumer has finished
           uint32_t* number,        // [1] this rank's: hand-overs put so far
           int rank, int peer, int n, BY_VALUE PollLimit limit) {
  griddep_launch();
  griddep_wait();
  const uint32_t k = *number + 1;
  Watch watch = watch_start(limit);
  if (threadIdx.x == 0)
    while (int32_t(ld_acquire_sys_u32(credit) + SLOTS - k) < 0) watch_poll(watch, rank, peer, k);
  __syncthreads();
  uint4* slot = slot_of(slots, k, n);
  for (int i = threadIdx.x; i < n; i += blockDim.x) st_volatile_v4(slot + 1 + i, payload[i]);
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence_system();
  st_release_sys_u32(reinterpret_cast<uint32_t*>(slot), ring_of(k));
  *number = k;
}

KERNEL(512) void
signal_take(uint4* payload,    // [n]
            uint64_t slots,    // this rank's memory, [3, 1 + n] packs
            uint32_t* credit,  // [1] the producer's
            uint32_t* number,  // [1] this rank's: hand-overs taken so far
            int rank, int peer, int n, BY_VALUE PollLimit limit) {
  griddep_launch();
  griddep_wait();
  const uint32_t k = *number + 1;
  uint4* slot = slot_of(slots, k, n);
  uint32_t* doorbell = reinterpret_cast<uint32_t*>(slot);
  Watch watch = watch_start(limit);
  if (threadIdx.x == 0)
    while (ld_acquire_sys_u32(doorbell) != ring_of(k)) watch_poll(watch, rank, peer, k);
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) payload[i] = ld_volatile_v4(slot + 1 + i);
  __syncthreads();
  if (threadIdx.x) return;
  st_volatile_u32(doorbell, ARMED);
  __threadfence_system();
  st_release_sys_u32(credit, k);
  *number = k;
}
