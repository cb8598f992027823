// loop.cu - where a graph repeats a pass by itself: whether there is another one.
//
// loop_begin  before the first pass of a replay: there is one if any id is still to be chosen, state.step < limit
// loop_again  at the end of every pass: there is another one if so, if the replay has had fewer than `most`, if the host has not asked this replay to
//             end, asked[0] < number, and if the host's ring has room for all that a pass may post, state.step + rows <= asked[1]
//
// Replays are numbered from 1 on. The host is told, when one ends, how many passes it had: told[1 + number % LOG], then told[0] = number.
//
// Ranks must agree, or one would wait for another that has ended. Steps and limit are the same on all. What the host asks is not seen by all of them
// at once: rank 0 looks, and tells the others with the number of the call. One word: rank 0 tells call c + 1 after a pass in which all ranks have met
// (accept.cu, sample.cu), so have read c.
//
// grid: (1); block: 32. bytes moved: about 60, eight of them from host memory; over the link 4 bytes a peer. minimum arch: sm_80; CUDA driver 12.4
// PRECOND  the handle is that of a WHILE node; loop_begin comes before the node, loop_again is the last launch of its body. PRECOND  mailboxes [1] word
// and *loop are zero on all ranks before the first launch; all ranks make the same launches.
#include "include/choose.cuh"
#include "include/graph_loop.cuh"

constexpr uint32_t LOG = 8;

struct LoopState {
  uint32_t number, passes;  // of this replay
  uint32_t calls, unused;
};

DEVICE void tell_end(uint64_t* told, uint32_t number, uint32_t passes) {
  st_release_sys_u64(told + 1 + number % LOG, passes);
  st_release_sys_u64(told, number);
}

KERNEL(32) void
loop_begin(BY_VALUE LoopHandle handle,
           const DecodeState* state,  // [1]
           const uint32_t* limit,     // [1] step number from which on there is nothing to do
           LoopState* loop,           // [1]
           uint64_t* told) {          // [1 + LOG] host memory
  griddep_wait();
  if (threadIdx.x) return;
  const uint32_t number = loop->number + 1;
  const bool any = int32_t(*limit - state->step) > 0;
  loop->number = number, loop->passes = 0;
  if (!any) tell_end(told, number, 0);
  set_again(handle, any);
}

KERNEL(32) void
loop_again(BY_VALUE LoopHandle handle,
           const DecodeState* state,  // [1]
           const uint32_t* limit,     // [1]
           LoopState* loop,           // [1]
           const uint4* asked,        // [1] rank 0's host memory: two words of 64 bits, of which the lower halves count
           uint64_t* told,            // [1 + LOG] host memory
           int most, int rows,
           BY_VALUE Peers mailboxes,  // each rank's mailbox, [1] word
           int rank, int world, BY_VALUE PollLimit wait) {
  griddep_wait();
  const int peer = threadIdx.x;
  LoopState now = *loop;
  const uint32_t step = state->step, call = ++now.calls;
  uint32_t said = call << 1;
  if (rank == 0) {
    const uint4 words = ld_volatile_v4(asked);  // one read: they come over the bus
    const int end = int32_t(words.x - now.number) >= 0 || int32_t(words.z - step) < rows;
    said |= uint32_t(__shfl_sync(FULL_MASK, end, 0));  // what one thread saw: all peers are told the same
    if (peer > 0 && peer < world) st_release_sys_u32(mailboxes.words(peer), said);
  }
  __syncthreads();  // all have read *loop
  if (peer) return;
  if (rank != 0) {
    Watch watch = watch_start(wait);
    while (((said = ld_acquire_sys_u32(mailboxes.words(rank))) ^ call << 1) > 1) watch_poll(watch, rank, 0, call);
  }
  const bool again = ++now.passes < uint32_t(most) && int32_t(*limit - step) > 0 && !(said & 1);
  *loop = now;
  if (!again) tell_end(told, now.number, now.passes);
  set_again(handle, again);
}
