// draft.cu - the ids to verify in one speculative pass: row 0 is the last chosen id, rows 1 … M - 1 are guesses at what follows it.
//
// draft_row    row i from the draft model's state, which holds its latest choice (row 0: from the target's own state)
// draft_ngram  prompt lookup: the longest run of up to N ids that ends the text and has occurred before, the latest occurrence if there are
//              several; the guesses are the ids that followed it, again from its end on where the text ends. Nothing found: the last id.
//
// ids i32 [M] is what an embedding of M rows reads; rows [M] are decode states, for a step a row. Positions in rows are accept.cu's.
// grid: (1); block: draft_row 1, draft_ngram 1,024. bytes moved: draft_ngram (pos + 1)·4 and more where ids agree.
// PRECOND  history holds the ids of positions 0 … state.pos. minimum arch: sm_80
#include "include/choose.cuh"

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
