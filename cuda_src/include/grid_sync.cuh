// grid_sync.cuh - a barrier of all blocks of one launch, in two halves: a block arrives when its results are written, and waits when it needs
// the others'. Between the two it may do whatever needs neither.
//
// One counter in global memory, zero before a launch and after it: arrivals count up, the last arrival of the launch's last barrier wraps it to
// zero (atom.inc), and nobody waits for that one. A poll passes once the count has reached (number of the barrier)·(blocks).
// Order: the block's barrier puts every thread's stores before thread 0's arrival, which releases at GPU scope; the poll acquires, and a second
// barrier of the block puts every thread's loads after it. The acquire also drops what L1 held.
// PRECOND  all blocks of the launch are resident at once.
#pragma once
#include "lamport.cuh"

struct GridSync {
  uint32_t* counter;
  uint32_t barrier;  // arrivals of this block so far
  uint32_t last;     // barriers of the launch
  PollLimit limit;
  int threads;  // of a block, that take part: the first ones

  DEVICE void block() { named_barrier(1, threads); }
  DEVICE void arrive() {
    block();
    barrier++;
    if (threadIdx.x == 0) atom_inc_acq_rel_gpu(counter, last * gridDim.x - 1);
  }
  DEVICE void wait() {
    if (threadIdx.x == 0) {
      const uint32_t target = barrier * gridDim.x;
      Watch watch = watch_start(limit);
      while (ld_acquire_gpu_u32(counter) < target) watch_poll(watch, 0, 0, barrier);
    }
    block();
  }
};
