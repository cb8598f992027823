// lamport.cuh - the sentinel protocol: data that is its own flag (after Lamport). Pushes, polls, three buffers in rotation.
//
// A receive buffer is armed with the 32-bit word 0x80000000, which is -0.0f. A sender stores its payload straight into the receiver's
// memory; the receiver polls until no word is the sentinel.
//   - A payload word that equals the sentinel is rewritten to +0.0 before it is pushed (sanitise): nothing else ever changes.
//   - Bits are compared, never floats: with flush-to-zero a negative subnormal compares equal to -0.0 and a poll would never end.
//   - Every 32-bit word is checked: the memory model promises no more than that a 16-byte store arrives word by word.
// No fence is needed: there is no second word whose order relative to the payload could matter.
//
// Receive memory of a rank: [3 buffers][world sources][capacity packs]. Call f uses buffer f mod 3.
//
// Why three. While this rank is in call f, a peer is in f - 1, f or f + 1: it may still read what this rank sent in f - 1, and it cannot
// end f + 1 without this rank's data of f + 1. So peers may be storing into buffers f and f + 1 of this rank, and the one buffer that is
// safe to re-arm is that of f - 1, which this rank has read to the end. The next store into it belongs to call f + 2, and a peer starts
// that only after it has this rank's data of f + 1, pushed after this launch has ended, re-arming included. With two buffers the buffer
// of f - 1 is that of f + 1, and re-arming wipes early data. The length that is re-armed is the one that the buffer was filled with, which
// the previous call recorded, not this call's: sizes may change between calls.
//
// The rotation lives in device memory, so that replays of a graph need no argument from the host, and it costs no atomic: every block
// has a copy (Turn), which that block alone reads. A launch advances the copies of all block numbers, also those that it does not have,
// so grids may change from call to call. A block may do so as soon as all of its threads have read theirs.
#pragma once
#include "peers.cuh"

constexpr uint32_t SENTINEL = 0x80000000u;
constexpr int BUFFERS = 3;

// What a block knows of the calls before this one.
struct Turn {
  uint32_t start;  // of this call's buffer, in packs
  uint32_t packs;  // a source, that the buffer before this one was filled with
  uint32_t calls;  // so far; for the fault record
};

// One rank's end of a communicator; passed by value.
struct Lamport {
  Peers receive;   // each rank's receive memory
  uint64_t turns;  // Turn [blocks], 16 bytes apart, this rank's, zero before the first call
  PollLimit limit;
  int32_t rank, world, capacity, blocks;  // capacity: packs a message; blocks: most of a launch
  DEVICE uint32_t buffer() const { return uint32_t(world) * uint32_t(capacity); }  // packs
};

DEVICE uint32_t sanitise(uint32_t w) { return w == SENTINEL ? 0u : w; }
DEVICE uint4 sanitise(uint4 v) { return make_uint4(sanitise(v.x), sanitise(v.y), sanitise(v.z), sanitise(v.w)); }
DEVICE bool has_hole(uint4 v) { return v.x == SENTINEL || v.y == SENTINEL || v.z == SENTINEL || v.w == SENTINEL; }
DEVICE uint4 armed_pack() { return make_uint4(SENTINEL, SENTINEL, SENTINEL, SENTINEL); }

DEVICE uint64_t number(const void* address) { return reinterpret_cast<uint64_t>(address); }
DEVICE int block_number() { return blockIdx.y * gridDim.x + blockIdx.x; }
DEVICE int block_count() { return gridDim.x * gridDim.y; }

// Where this block's turn is. Only that is known before griddep_wait: the previous call writes the turn itself.
DEVICE const uint4* turn_address(const Lamport& end) { return reinterpret_cast<const uint4*>(end.turns) + block_number(); }
DEVICE Turn read_turn(const uint4* address) {
  const uint4 v = ld_global_v4(address);
  return {v.x, v.y, v.z};
}
// After a barrier: every thread of the block has read its turn.
DEVICE void next_turn(const Lamport& end, const Turn& turn, int packs) {
  const uint32_t start = turn.start + end.buffer();
  const uint4 next = make_uint4(start == BUFFERS * end.buffer() ? 0 : start, packs, turn.calls + 1, 0);
#pragma unroll 1
  for (int i = block_number() + int(threadIdx.x) * block_count(); i < end.blocks; i += int(blockDim.x) * block_count())
    reinterpret_cast<uint4*>(end.turns)[i] = next;
}
// The previous call's buffer, for the call after the next; this thread's share of the launch's threads.
DEVICE void rearm(const Lamport& end, const Turn& turn) {
  const uint32_t previous = turn.start ? turn.start - end.buffer() : (BUFFERS - 1) * end.buffer();
  const int first = block_number() * int(blockDim.x) + int(threadIdx.x), stride = block_count() * int(blockDim.x);
  uint4* mine = end.receive.packs(end.rank) + previous;
#pragma unroll 1
  for (int source = 0; source < end.world; source++, mine += end.capacity)
#pragma unroll 1
    for (int i = first; source != end.rank && i < int(turn.packs); i += stride) st_volatile_v4(mine + i, armed_pack());
}

// Where pack i of this rank goes in each peer's memory; to[0] is the right neighbour's, so that no two ranks begin with the same peer.
// Made before griddep_wait, where the time is free, and settled there: the compiler would put it off until it is needed.
template <int RANKS>
struct Route {
  uint4* to[RANKS - 1];
  DEVICE Route(const Lamport& end, int i) {
#pragma unroll
    for (int d = 1; d < RANKS; d++) {
      const int peer = end.rank + d < end.world ? end.rank + d : end.rank + d - end.world;
      to[d - 1] = d < end.world ? end.receive.packs(peer) + int64_t(end.rank) * end.capacity + i : nullptr;
      settle(to[d - 1]);
    }
  }
  DEVICE void push(const Turn& turn, uint4 v) const {
#pragma unroll
    for (int d = 1; d < RANKS; d++)
      if (to[d - 1]) st_volatile_v4(to[d - 1] + turn.start, v);
  }
};

// Where pack i of every source arrives in this rank's memory.
template <int RANKS>
struct Arrival {
  const uint4* mine;  // of source 0
  uint32_t capacity;
  int rank, world;
  DEVICE Arrival(const Lamport& end, int i) : mine(end.receive.packs(end.rank) + i), capacity(end.capacity), rank(end.rank), world(end.world) {}
  DEVICE uint4 load(const Turn& turn, int further, int s) const { return ld_volatile_v4(mine + (turn.start + uint32_t(s) * capacity + further)); }
  // A first look at pack i + further of all sources at once; this rank's own comes from its registers, and beyond the world is zero.
  DEVICE void look(uint4 (&v)[RANKS], const Turn& turn, int further, uint4 own) const {
#pragma unroll
    for (int s = 0; s < RANKS; s++) v[s] = s == rank ? own : s < world ? load(turn, further, s) : make_uint4(0, 0, 0, 0);
  }
  // More looks, until every source's pack has arrived whole.
  DEVICE void wait(uint4 (&v)[RANKS], const Turn& turn, int further, Watch& watch) const {
    for (;;) {
      int missing = -1;
#pragma unroll
      for (int s = 0; s < RANKS; s++)
        if (has_hole(v[s])) {
          missing = s;
          v[s] = load(turn, further, s);
        }
      if (missing < 0) return;
      watch_poll(watch, rank, missing, turn.calls + 1);
    }
  }
};
