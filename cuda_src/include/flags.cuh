// flags.cuh - a barrier between equal blocks of all ranks: one word for each (parity, block, source rank), written by the source, polled by
// the owner.
//
// Epoch e is signalled in the words of parity e & 1, as the value e. While a rank is in epoch e, a peer is in e - 1, e or e + 1 (it cannot
// end e + 1 before this rank has signalled e + 1), so the word that this rank polls holds an older epoch until it holds e: equality is
// exact. One word in place of two parities breaks: a fast peer overwrites e with e + 1 before it was seen. One summed counter with "<"
// breaks too, when each thread signals one peer: a fast peer's e + 1 stands in for a late peer's e.
//
// The epoch lives in device memory, a copy for every block number, as the rotation of include/lamport.cuh does and for the same reasons.
#pragma once
#include "peers.cuh"

// One rank's end of a communicator; passed by value.
struct Flags {
  Peers data;       // each rank's payload, [2, capacity] packs
  Peers results;    // each rank's sums, [2, capacity] packs; twoshot only
  Peers flags;      // each rank's flags, [2, blocks, 8] words, zero before the first call
  uint64_t epochs;  // u32 [blocks], this rank's: barriers passed, zero before the first call
  PollLimit limit;
  int32_t rank, world, capacity, blocks;  // capacity: packs a message; blocks: most of a launch
  DEVICE uint32_t* word(int owner, uint32_t epoch, int source) const {
    return flags.words(owner) + ((epoch & 1) * blocks + blockIdx.x) * MAX_RANKS + source;
  }
};

// Not before griddep_wait: the previous call writes it.
DEVICE uint32_t read_epoch(const Flags& end) { return reinterpret_cast<const uint32_t*>(end.epochs)[blockIdx.x]; }
// After a barrier: every thread of the block has read it.
DEVICE void write_epoch(const Flags& end, uint32_t epoch) {
  for (int i = int(blockIdx.x) + int(threadIdx.x * gridDim.x); i < end.blocks; i += int(blockDim.x * gridDim.x))
    reinterpret_cast<uint32_t*>(end.epochs)[i] = epoch;
}

// Block-wide barrier with the same block of every rank. Everything the block's threads stored before it is visible to the peers' blocks
// after it: __syncthreads orders the stores before the signalling threads' fence and release.
DEVICE void block_barrier(const Flags& end, uint32_t epoch, Watch& watch) {
  __syncthreads();
  const int peer = threadIdx.x;
  if (peer < end.world && peer != end.rank) {
    __threadfence_system();
    st_release_sys_u32(end.word(peer, epoch, end.rank), epoch);
    const uint32_t* mine = end.word(end.rank, epoch, peer);
    while (ld_acquire_sys_u32(mine) != epoch) watch_poll(watch, end.limit, end.rank, peer, epoch);
  }
  __syncthreads();
}

// Pack i of every source: this rank's own from its registers, the others' read over the link, all at once. Beyond the world: zero.
template <int RANKS>
DEVICE void read_sources(uint4 (&v)[RANKS], uint4 own, const Flags& end, int64_t i) {
#pragma unroll
  for (int s = 0; s < RANKS; s++)
    v[s] = s == end.rank ? own : s < end.world ? ld_volatile_v4(end.data.packs(s) + i) : make_uint4(0, 0, 0, 0);
}
