// lamport.cuh - what every kernel that talks to a peer shares: peer pointers, the sentinel protocol, polls with a deadline.
//
// The sentinel protocol (after Lamport: data that is its own flag). A receive buffer is armed with the 32-bit word 0x80000000, which is
// -0.0f. A sender stores its payload straight into the receiver's memory; the receiver polls until no word is the sentinel.
//   - A payload word that equals the sentinel is rewritten to +0.0 before it is pushed (sanitise): nothing else ever changes.
//   - Bits are compared, never floats: with flush-to-zero a negative subnormal compares equal to -0.0 and a poll would never end.
//   - Every 32-bit word is checked: the memory model promises no more than that a 16-byte store arrives word by word.
// No fence is needed: there is no second word whose order relative to the payload could matter.
#pragma once
#include "vec.cuh"

constexpr int MAX_RANKS = 8;
constexpr uint32_t SENTINEL = 0x80000000u;

// Every rank's buffer of one kind, by rank, as this rank addresses it; passed by value.
struct Peers {
  uint64_t base[MAX_RANKS];
  DEVICE uint4* packs(int rank) const { return reinterpret_cast<uint4*>(base[rank]); }
  DEVICE uint32_t* words(int rank) const { return reinterpret_cast<uint32_t*>(base[rank]); }
};

// How long a poll may last, and where to say which peer did not answer; passed by value. ns = 0: no limit.
struct PollLimit {
  uint64_t ns;
  uint64_t fault;  // address of 4 words that the host can read: {1 + rank that waits, 1 + peer waited for, call (twoshot: barrier), unused}
};

// One thread's watch over its polls. The clock is read every 1,024th poll only: it is far slower than a poll.
struct Watch {
  PollLimit limit;
  uint64_t until;
  uint32_t polls;
};
DEVICE Watch watch_start(PollLimit limit) { return {limit, 0, 0}; }
// One more unsuccessful poll: traps, having written the fault record, when the time is up. The fence: a trap completes no stores.
DEVICE void watch_poll(Watch& w, int rank, int peer, uint32_t call) {
  if (w.limit.ns == 0 || ++w.polls % 1024 != 1) return;
  const uint64_t now = global_timer_ns();
  if (w.until == 0) w.until = now + w.limit.ns;
  if (now < w.until) return;
  uint32_t* fault = reinterpret_cast<uint32_t*>(w.limit.fault);
  st_volatile_u32(fault + 1, uint32_t(peer) + 1);
  st_volatile_u32(fault + 2, call);
  st_release_sys_u32(fault, uint32_t(rank) + 1);
  __threadfence_system();
  trap();
}

DEVICE uint32_t sanitise(uint32_t w) { return w == SENTINEL ? 0u : w; }
DEVICE uint4 sanitise(uint4 v) { return make_uint4(sanitise(v.x), sanitise(v.y), sanitise(v.z), sanitise(v.w)); }
DEVICE bool has_hole(uint4 v) { return v.x == SENTINEL || v.y == SENTINEL || v.z == SENTINEL || v.w == SENTINEL; }
DEVICE uint4 armed_pack() { return make_uint4(SENTINEL, SENTINEL, SENTINEL, SENTINEL); }

// Poll one pack of this rank's own memory until a peer's store has arrived whole.
DEVICE uint4 poll_pack(const uint4* p, Watch& watch, int rank, int peer, uint32_t call) {
  uint4 v = ld_volatile_v4(p);
  while (has_hole(v)) {
    watch_poll(watch, rank, peer, call);
    v = ld_volatile_v4(p);
  }
  return v;
}

// Eight bf16 added to eight fp32 sums; callers add in rank order, so that every rank holds the same bits.
DEVICE void add_pack(float (&sum)[8], uint4 v) {
  float f[8];
  unpack_bf16(f, v);
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] += f[i];
}

// Where a sum goes: replaced by it, as bf16, or added to the fp32 residual stream.
template <bool ADD>
DEVICE void store_sum(void* out, int pack, const float (&sum)[8]) {
  if (!ADD) {
    reinterpret_cast<uint4*>(out)[pack] = pack_bf16x8(sum);
    return;
  }
  float4* h = reinterpret_cast<float4*>(out) + 2 * int64_t(pack);
  const float4 a = h[0], b = h[1];
  h[0] = make_float4(a.x + sum[0], a.y + sum[1], a.z + sum[2], a.w + sum[3]);
  h[1] = make_float4(b.x + sum[4], b.y + sum[5], b.z + sum[6], b.w + sum[7]);
}

// ---- flags: one word for each (parity, block, source rank), written by the source, polled by the owner -----------------------------
//
// Epoch e is signalled in the words of parity e & 1, as the value e. While a rank is in epoch e, a peer can be in e or e + 1 only (it
// cannot end e + 1 before this rank has signalled e + 1), so the word this rank polls holds e - 2 until it holds e: equality is exact.
// One word in place of two parities breaks: a fast peer overwrites e with e + 1 before it was seen. One summed counter with "<" breaks
// too, when each thread signals one peer: a fast peer's e + 1 stands in for a late peer's e.
DEVICE uint32_t* flag_word(const Peers& flags, int owner, uint32_t epoch, int block, int source, int blocks) {
  return flags.words(owner) + ((epoch & 1) * blocks + block) * MAX_RANKS + source;
}

// Block-wide barrier with the same block of every rank. Everything the block's threads stored before it is visible to the peers' blocks
// after it: __syncthreads orders the stores before the signalling threads' fence and release.
DEVICE void block_barrier(const Peers& flags, uint32_t epoch, int rank, int world, int blocks, Watch& watch) {
  __syncthreads();
  const int peer = threadIdx.x, block = blockIdx.x;
  if (peer < world && peer != rank) {
    __threadfence_system();
    st_release_sys_u32(flag_word(flags, peer, epoch, block, rank, blocks), epoch);
    const uint32_t* mine = flag_word(flags, rank, epoch, block, peer, blocks);
    while (ld_acquire_sys_u32(mine) != epoch) watch_poll(watch, rank, peer, epoch);
  }
  __syncthreads();
}
