// sample.cu - logits → the next id, on the device: greedy, or temperature by the Gumbel-max trick; then the decode state moves on.
//
// sample_f32         one rank holds all rows of the LM head
// sample_ranks_f32   each rank holds some of the rows (tensor parallelism); all choose the same id
//
//   id = argmax over v < text_vocab of  logits[v] / temperature + noise(v),   noise = 0 when greedy, else -log(-log(u)), u ∈ (0, 1)
//
// u comes from Philox4x32-10 (Salmon et al., SC'11): counter (v, position of the id being chosen, 0, 0), key = seed; so a draw depends on
// nothing but seed, position and row, and the host's reference draws the same, as do any number of ranks. Ties go to the lowest id. Rows from text_vocab on are padding.
// Every block reduces a slice; the last to arrive reduces the blocks, writes the id where the next step's embedding reads it, advances the
// position, and posts {id, hash of the logits' bits} and then the step number to the host's ring. A logit that is not finite posts
// BAD_ID instead. Definition in Python: qwen_raw/generation/sampling.py; of the hash: qwen_raw/generation/runner.py.
//
// Between ranks. The last block stores its rank's best and hash into every peer's mailbox (include/candidates.cuh), in two slots, by the parity of
// the choice's number: while this rank is in choice s a peer is in s or s + 1, because it cannot end s + 1 without this rank's pack of s + 1, which is
// pushed after this rank has read all of s. So the slot that is polled holds the pack of s - 2 until it holds that of s: equality of tags is exact,
// however often 8 bits wrap. Choices are counted by `calls`, not by steps: a speculative pass takes several steps without this kernel (accept.cu).
// Every rank takes the maximum of the same candidates, and hashes add up in any order: all ranks hold the same state without a word from the host.
//
// grid: any (blocks stride over the rows); block: whole warps, up to 256. bytes moved: 4·rows; over the link 16 bytes a peer.
// PRECOND  text_vocab <= V. PRECOND  best holds gridDim.x × 2 words of 64 bits; counter zero before the first launch; ring holds 2·slots words.
// PRECOND  sample_ranks: mailboxes [2, 8] packs, zero, and calls 0 on all ranks before the first launch; all ranks make the same launches. minimum arch: sm_80
#include "include/candidates.cuh"

constexpr int THREADS = 256;

// Best rank and hash of this GPU's rows, global ids first … first + rows - 1. True in the last block to arrive, whose thread 0 has them.
DEVICE bool best_of_rows(uint64_t& rank, uint32_t& hash, const float* logits, const SampleParams& p, uint32_t position, int first, int rows,
                         uint64_t* best, uint32_t* counter, ChoiceShared& sh) {
  rank = 0, hash = 0;
  const int end = min(rows, p.text_vocab - first);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < end; i += gridDim.x * blockDim.x)
    consider(rank, hash, logits[i], uint32_t(first + i), p, position);
  return best_of_grid(rank, hash, best, counter, sh);
}

KERNEL(THREADS) void
sample_f32(DecodeState* state,          // [1]
           const float* logits,         // [V]
           const SampleParams* params,  // [1]
           uint64_t* best,              // [grid, 2] scratch: rank, hash
           uint32_t* counter,           // [1]
           uint64_t* ring,              // [slots, 2] host memory: {hash << 32 | id, step}
           int slots) {
  SHARED(ChoiceShared, sh);
  griddep_launch();
  griddep_wait();
  const SampleParams p = *params;
  uint64_t rank;
  uint32_t hash;
  if (best_of_rows(rank, hash, logits, p, uint32_t(state->pos) + 1, 0, p.text_vocab, best, counter, sh) && threadIdx.x == 0)
    commit(state, ring, slots, rank, hash);
}

KERNEL(THREADS) void
sample_ranks_f32(DecodeState* state,          // [1] the same on all ranks
                 const float* logits,         // [rows] of ids first … first + rows - 1
                 const SampleParams* params,  // [1] the same on all ranks
                 uint64_t* best,              // [grid, 2] scratch: rank, hash
                 uint32_t* counter,           // [1]
                 uint64_t* ring,              // [slots, 2] host memory: {hash << 32 | id, step}
                 int slots, int first, int rows,
                 BY_VALUE Peers mailboxes,  // each rank's mailbox, [2 parities, 8 sources] packs
                 int rank, int world, BY_VALUE PollLimit limit) {
  SHARED(ChoiceShared, sh);
  griddep_launch();
  griddep_wait();
  const SampleParams p = *params;
  uint64_t mine;
  uint32_t hash;
  if (!best_of_rows(mine, hash, logits, p, uint32_t(state->pos) + 1, first, rows, best, counter, sh)) return;
  if (threadIdx.x == 0) sh.ranks[0] = mine, sh.hashes[0] = hash;
  __syncthreads();
  const uint32_t calls = state->calls, tag = (calls + 1) & 0xffu;
  const int peer = threadIdx.x, slots_at = int(calls & 1) * MAX_RANKS;
  uint4 got = tagged(sh.ranks[0], sh.hashes[0], tag);
  if (peer < world && peer != rank) {
    st_volatile_v4(mailboxes.packs(peer) + slots_at + rank, got);
    Watch watch = watch_start(limit);
    const uint4* slot = mailboxes.packs(rank) + slots_at + peer;
    while (!carries(got = ld_volatile_v4(slot), tag)) watch_poll(watch, rank, peer, calls + 1);
  }
  __syncthreads();  // all have read sh, which is written again now
  if (peer < world) sh.ranks[peer] = rank_in(got), sh.hashes[peer] = hash_in(got);
  __syncthreads();
  if (threadIdx.x) return;
  mine = 0, hash = 0;
  for (int i = 0; i < world; i++) mine = rank_max(mine, sh.ranks[i]), hash += sh.hashes[i];
  state->calls = calls + 1;
  commit(state, ring, slots, mine, hash);
}
