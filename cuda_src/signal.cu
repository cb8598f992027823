// signal.cu - put-with-signal: a payload and a doorbell into a slot of another rank's memory; the other end waits for the doorbell.
//
// A channel has `count` slots (3), used in turn: {header pack, payload[room]}. The header's first word is the doorbell: armed to
// 0x80000000 (-0.0), rung by any value whose magnitude bits are not zero (the hand-over's number, 1 … 0x7fffffff). A stream can wait for it
// too: cuStreamWaitValue32(word, 0x7fffffff, AND) proceeds when a magnitude bit is set.
// Doorbells always lie on the consumer, who waits for them. Payloads lie there too (pushed: only writes cross the link), or on the producer
// (pulled: the consumer loads them over the link, for NVLink only). `slots` and `bells` are the same memory when pushed.
// In a slot a payload is contiguous. At either end it may lie in pieces of equal length, equally far apart: rows of a cache.
//
// signal_put    Waits until the slot is free, stores the payload, then the doorbell. Every block: barrier → system fence → arrival at the
//               counter; the last one: system fence → release store. So the doorbell cannot be seen before the payload. The credit that
//               makes a slot free is a word on the producer that the consumer writes: the number of hand-overs it has finished. Slot k mod 3
//               is free for hand-over k when k - 3 are finished. So a producer may run three ahead, no further, and nothing tears whatever
//               the two ends' speeds.
// signal_take   Waits for the doorbell to be its number, copies the payload out; the last block re-arms the doorbell, and then gives the
//               credit (release), so that the next ring cannot be wiped by the re-arming.
// signal_store  signal_put without the doorbell: a cuStreamWriteValue32 after it rings. That orders itself after the kernel, so there is no
//               system fence here.
// signal_ring   The doorbell alone, where a stream may not write to another GPU: the kernel before it has ended; fence and release store.
// signal_fetch  signal_take after a cuStreamWaitValue32: the doorbell has been rung, with any number.
// The payload may be anything, 0.0, -0.0 and the sentinel included: only the header is a signal.
//
// All read their number from device memory and advance it: graphs replay without arguments. A stream operation's address is fixed when it
// is captured, so the kernels beside one are told its slot, and trap if their number has another.
// grid: any, as blocks stride over packs; blocks that wait poll, so a few. block: up to 512; signal_ring 1 x 1. bytes moved: 16·n read,
// 16·n written, at each end.
// PRECOND  n <= room < 2^30 packs, the same n at both ends of a hand-over; a payload is whole pieces; slots, pieces and strides 16-byte
// aligned; doorbells armed, numbers, credit and counters zero before the first call; one stream an end.
// minimum arch: sm_80
#include "include/peers.cuh"

constexpr uint32_t ARMED = 0x80000000u;
constexpr uint32_t MAGNITUDE = 0x7fffffffu;
constexpr uint32_t ANY_SLOT = 0xffffffffu;

// Doorbell value of hand-over k = 1, 2, …: never zero in its magnitude bits.
DEVICE uint32_t ring_of(uint32_t k) { return (k - 1) % MAGNITUDE + 1; }
DEVICE uint4* slot_of(uint64_t slots, uint32_t k, uint32_t count, int room) {
  return reinterpret_cast<uint4*>(slots) + int64_t(k % count) * (room + 1);
}

// A replay that is not where its stream operations are: said like a poll that has ended, of hand-over `k`, with no peer to blame.
DEVICE void require_slot(uint32_t slot, uint32_t k, uint32_t count, PollLimit limit, int rank) {
  if (slot == ANY_SLOT || slot == k % count) return;
  uint32_t* fault = reinterpret_cast<uint32_t*>(limit.fault);
  st_volatile_u32(fault + 1, 0);
  st_volatile_u32(fault + 2, k);
  st_release_sys_u32(fault, uint32_t(rank) + 1);
  __threadfence_system();
  trap();
}

// Pack i of a payload: pieces of `piece` packs, `stride` packs from one to the next.
DEVICE int64_t pack_at(int i, int piece, int64_t stride) { return int64_t(i / piece) * stride + i % piece; }

// This block's share of n packs, four a thread on their way at a time.
template <class Load, class Store>
DEVICE void copy_packs(int n, Load load, Store store) {
  const int step = int(gridDim.x * blockDim.x);
  for (int first = int(blockIdx.x * blockDim.x + threadIdx.x); first < n; first += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (first + j * step < n) v[j] = load(first + j * step);
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (first + j * step < n) store(first + j * step, v[j]);
  }
}

// True in thread 0 of the last block to arrive, which may say what the whole grid has done.
DEVICE bool last_to_arrive(uint32_t* arrived) {
  __syncthreads();
  if (threadIdx.x) return false;
  return gridDim.x == 1 || atom_inc_acq_rel_gpu(arrived, gridDim.x - 1) == gridDim.x - 1;
}

// Waits for the credit and stores the payload; whole grid. The number of the hand-over.
DEVICE uint32_t fill_slot(const uint4* payload, uint64_t slots, const uint32_t* credit, const uint32_t* number, uint32_t count, uint32_t slot,
                          int rank, int peer, int room, int n, int piece, int64_t stride, PollLimit limit) {
  const uint32_t k = *number + 1;
  Watch watch = watch_start(limit);
  if (threadIdx.x == 0) {
    require_slot(slot, k, count, limit, rank);
    while (int32_t(ld_acquire_sys_u32(credit) + count - k) < 0) watch_poll(watch, rank, peer, k);
  }
  __syncthreads();
  uint4* at = slot_of(slots, k, count, room) + 1;
  copy_packs(n, [&](int i) { return payload[pack_at(i, piece, stride)]; }, [&](int i, uint4 v) { st_volatile_v4(at + i, v); });
  return k;
}

// Copies the payload of hand-over k out, re-arms the doorbell, gives the credit; whole grid, after it has seen the doorbell.
DEVICE void empty_slot(uint4* payload, uint64_t slots, uint32_t* doorbell, uint32_t* credit, uint32_t* number, uint32_t* arrived, uint32_t k,
                       uint32_t count, int room, int n, int piece, int64_t stride) {
  const uint4* at = slot_of(slots, k, count, room) + 1;
  copy_packs(n, [&](int i) { return ld_volatile_v4(at + i); }, [&](int i, uint4 v) { payload[pack_at(i, piece, stride)] = v; });
  if (!last_to_arrive(arrived)) return;
  st_volatile_u32(doorbell, ARMED);
  __threadfence_system();
  st_release_sys_u32(credit, k);
  *number = k;
}

KERNEL(512) void
signal_put(const uint4* payload,    // [n], in pieces
           uint64_t slots,          // payloads' memory, [count, 1 + room] packs
           uint64_t bells,          // consumer's memory, [count, 1 + room] packs: the first of each row is used
           const uint32_t* credit,  // [1] this rank's: hand-overs the consumer has finished
           uint32_t* number,        // [1] this rank's: hand-overs put so far
           uint32_t* arrived,       // [1] this rank's: blocks of this launch that have stored their share
           uint32_t count, int rank, int peer, int room, int n, int piece, int64_t stride, BY_VALUE PollLimit limit) {
  griddep_launch();
  griddep_wait();
  const uint32_t k = fill_slot(payload, slots, credit, number, count, ANY_SLOT, rank, peer, room, n, piece, stride, limit);
  __syncthreads();
  if (gridDim.x > 1 && threadIdx.x == 0) __threadfence_system();
  if (!last_to_arrive(arrived)) return;
  __threadfence_system();
  st_release_sys_u32(reinterpret_cast<uint32_t*>(slot_of(bells, k, count, room)), ring_of(k));
  *number = k;
}

KERNEL(512) void
signal_store(const uint4* payload,    // [n], in pieces
             uint64_t slots,          // payloads' memory, [count, 1 + room] packs
             const uint32_t* credit,  // [1] as signal_put
             uint32_t* number,        // [1] as signal_put
             uint32_t* arrived,       // [1] as signal_put
             uint32_t count,
             uint32_t slot,  // the one whose doorbell is rung next
             int rank, int peer, int room, int n, int piece, int64_t stride, BY_VALUE PollLimit limit) {
  griddep_wait();
  const uint32_t k = fill_slot(payload, slots, credit, number, count, slot, rank, peer, room, n, piece, stride, limit);
  if (last_to_arrive(arrived)) *number = k;
}

KERNEL(32) void
signal_ring(uint64_t doorbell) {  // address of a word of the consumer's memory
  griddep_wait();
  if (threadIdx.x) return;
  __threadfence_system();
  st_release_sys_u32(reinterpret_cast<uint32_t*>(doorbell), 1);
}

KERNEL(512) void
signal_take(uint4* payload,     // [n], in pieces
            uint64_t slots,     // payloads' memory, [count, 1 + room] packs
            uint64_t bells,     // this rank's memory, [count, 1 + room] packs
            uint32_t* credit,   // [1] the producer's
            uint32_t* number,   // [1] this rank's: hand-overs taken so far
            uint32_t* arrived,  // [1] this rank's: blocks of this launch that have copied their share
            uint32_t count, int rank, int peer, int room, int n, int piece, int64_t stride, BY_VALUE PollLimit limit) {
  griddep_launch();
  griddep_wait();
  const uint32_t k = *number + 1;
  uint32_t* doorbell = reinterpret_cast<uint32_t*>(slot_of(bells, k, count, room));
  Watch watch = watch_start(limit);
  if (threadIdx.x == 0)
    while (ld_acquire_sys_u32(doorbell) != ring_of(k)) watch_poll(watch, rank, peer, k);
  __syncthreads();
  empty_slot(payload, slots, doorbell, credit, number, arrived, k, count, room, n, piece, stride);
}

KERNEL(512) void
signal_fetch(uint4* payload,     // [n], in pieces
             uint64_t slots,     // payloads' memory, [count, 1 + room] packs
             uint64_t bells,     // this rank's memory, [count, 1 + room] packs
             uint32_t* credit,   // [1] the producer's
             uint32_t* number,   // [1] as signal_take
             uint32_t* arrived,  // [1] as signal_take
             uint32_t count,
             uint32_t slot,  // the one whose doorbell the stream has waited for
             int rank, int peer, int room, int n, int piece, int64_t stride, BY_VALUE PollLimit limit) {
  griddep_wait();
  const uint32_t k = *number + 1;
  uint32_t* doorbell = reinterpret_cast<uint32_t*>(slot_of(bells, k, count, room));
  Watch watch = watch_start(limit);
  if (threadIdx.x == 0) {
    require_slot(slot, k, count, limit, rank);
    while ((ld_acquire_sys_u32(doorbell) & MAGNITUDE) == 0) watch_poll(watch, rank, peer, k);
  }
  __syncthreads();
  empty_slot(payload, slots, doorbell, credit, number, arrived, k, count, room, n, piece, stride);
}
