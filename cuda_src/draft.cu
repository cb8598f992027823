// draft.cu - the ids to verify in one speculative pass: row 0 is the last chosen id, rows 1 … M - 1 are guesses at what follows it.
//
// draft_row    row i from the draft model's state, which holds its latest choice (row 0: from the target's own state)
// draft_rows   row 0 from the target's state, the others from ids that a draft model on another device has handed over: for all rows at once
// draft_ngram  prompt lookup: the longest run of up to N ids that ends the text and has occurred before, the latest occurrence if there are
//              several; the guesses are the ids that followed it, again from its end on where the text ends. Nothing found: the last id.
//
// draft_share  rank 0's ids to the other ranks, whose draft model is on rank 0 alone: 24 bits of a word are an id, 8 the call's number
//              (include/candidates.cuh). One slot: rank 0 stores call c + 1 after a pass in which all ranks have met (accept.cu), so have read c.
// draft_catch  after passes without guesses: the ids whose keys the draft model lacks, as a chunk for its prefill
//
// ids i32 [M] is what an embedding of M rows reads; rows [M] are decode states, for a step a row. Positions in rows are accept.cu's.
// grid: (1); block: draft_row 1, draft_rows 32, draft_ngram 1,024, draft_share 32, draft_catch any. bytes moved: draft_ngram (pos + 1)·4 and more where ids agree.
// PRECOND  history holds the ids of positions 0 … state.pos. PRECOND  draft_rows: M <= 32. PRECOND  draft_share: M <= 16; ids below 2^24; mailboxes [4] packs, zero, and calls 0 before
// the first launch; all ranks make the same launches, and meet between two. minimum arch: sm_80
#include "include/candidates.cuh"

constexpr int THREADS = 1024;

KERNEL(32) void
draft_row(const DecodeState* from,  // [1] its token is the row's id
          int32_t* ids,             // [M]
          DecodeState* rows,        // [M]
          int i) {
  griddep_wait();
  if (threadIdx.x) return;
  ids[i] = from->token;
  rows[i].token = from->token;
}

KERNEL(32) void
draft_rows(const DecodeState* state,  // [1]
           const int32_t* guesses,    // [M] the first is not read
           int32_t* ids,              // [M]
           DecodeState* rows,         // [M]
           int M) {
  griddep_wait();
  const int i = threadIdx.x;
  if (i >= M) return;
  ids[i] = rows[i].token = i ? guesses[i] : state->token;
}

// Ids up to `most` that agree, backwards from `a` and `b`; a < b.
DEVICE int agreement(const int32_t* history, int a, int b, int most) {
  int n = 0;
  while (n < most && n <= a && history[a - n] == history[b - n]) n++;
  return n;
}

KERNEL(THREADS) void
draft_ngram(const DecodeState* state,  // [1]
            const int32_t* history,    // [state.pos + 1]
            int32_t* ids,              // [M]
            DecodeState* rows,         // [M]
            int M, int N) {
  SHARED(uint64_t[WARP], found);
  griddep_wait();
  const int pos = state->pos;
  uint64_t best = 0;  // length << 32 | position of the end: the longest, then the latest
  for (int end = threadIdx.x; end < pos; end += THREADS) {
    const int n = agreement(history, end, pos, N);
    if (n) best = rank_max(best, uint64_t(n) << 32 | uint32_t(end));
  }
#pragma unroll
  for (int m = WARP / 2; m; m >>= 1) best = rank_max(best, __shfl_xor_sync(FULL_MASK, (unsigned long long)best, m));
  if (threadIdx.x % WARP == 0) found[threadIdx.x / WARP] = best;
  __syncthreads();
  for (int i = 0; i < THREADS / WARP; i++) best = rank_max(best, found[i]);
  const int i = threadIdx.x;
  if (i >= M) return;
  const int end = int(uint32_t(best)), id = i && best ? history[end + 1 + (i - 1) % (pos - end)] : history[pos];
  ids[i] = id;
  rows[i].token = id;
}

KERNEL(32) void
draft_share(int32_t* ids,       // [M] rank 0's are read, the others' written
            DecodeState* rows,  // [M]
            uint32_t* calls,    // [1]
            int M,
            BY_VALUE Peers mailboxes,  // each rank's mailbox, [4] packs
            int rank, int world, BY_VALUE PollLimit limit) {
  griddep_wait();
  const uint32_t call = *calls + 1, tag = call & 0xffu;
  const int peer = threadIdx.x / 4, pack = threadIdx.x % 4;
  if (rank == 0 && peer > 0 && peer < world) {
    uint32_t word[4];
    for (int i = 0; i < 4; i++) word[i] = tag << 24 | (4 * pack + i < M ? uint32_t(ids[4 * pack + i]) & 0xffffffu : 0u);
    st_volatile_v4(mailboxes.packs(peer) + pack, make_uint4(word[0], word[1], word[2], word[3]));
  }
  if (rank != 0 && peer == 0) {
    Watch watch = watch_start(limit);
    uint4 got;
    while (!carries(got = ld_volatile_v4(mailboxes.packs(rank) + pack), tag)) watch_poll(watch, rank, 0, call);
    const uint32_t word[4] = {got.x, got.y, got.z, got.w};
    for (int i = 0; i < 4; i++) {
      if (4 * pack + i >= M) break;
      ids[4 * pack + i] = rows[4 * pack + i].token = int32_t(word[i] & 0xffffffu);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *calls = call;
}

KERNEL(THREADS) void
draft_catch(const DecodeState* state,  // [1] the target's
            int32_t* filled,           // [1] position up to which there are keys; moved on
            const int32_t* history,    // [state.pos + 1]
            int32_t* request,          // [4 + most] as PrefillBuffers has it: position, T, two unused words, ids
            int most, int vocab) {
  griddep_wait();
  const int from = *filled, T = min(most, max(1, state->pos - from));
  __syncthreads();  // all have read filled
  if (threadIdx.x == 0) request[0] = from, request[1] = T, *filled = min(from + T, state->pos);
  for (int i = threadIdx.x; i < T; i += blockDim.x) request[4 + i] = history[from + i] < vocab ? history[from + i] : 0;
}
