// accept.cu - the end of a speculative pass: choose an id after every row, keep those whose row was guessed right, move the state on.
//
//   choice[i] = what sample.cu would choose at position pos + 1 + i from the logits of row i
//   rows 0 … n - 1 stand: row 0 always does, row i > 0 if all before it do and ids[i] == choice[i - 1].   choice[0 … n - 1] are posted
//
// So what is posted is what single steps would have posted, greedy or sampled: a draw depends on nothing but seed, position and logits
// (sample.cu), hence a guess is right or wrong, and nothing has to be corrected when it is wrong. Keys and values of rows that do not
// stand lie beyond the new position, where the next pass overwrites them: rolling back is the position alone.
//
// accept_f32    the above. Nothing is posted from step `limit` on, whatever is still queued: such a pass changes nothing.
// accept_begin  before a request's first pass: what accept_f32 leaves behind for the next one.
//
// Both leave: history, the id at every position; rows[i].pos = pos + i for the R rows of the next pass, and the same as span = {pos, R}; the draft model's state at the
// target's id and position.
// The host is told {passes, steps, guesses right, guesses} before the ids themselves, so who sees an id sees the counts of its pass.
// grid: (any, M) (blocks of a row stride over its logits); block: 256; accept_begin (1), 32. bytes moved: 4·M·rows.
// A pass of one row, with nothing guessed, is a step: M may be less than R.
// PRECOND  M <= R <= 16; text_vocab <= V; counters [M + 1] zero before the first launch; best holds M·gridDim.x pairs; the ring has more
// slots than there are ids that the host has not read. minimum arch: sm_80
#include "include/choose.cuh"

constexpr int THREADS = 256;

struct Counts {
  uint32_t passes, right, guesses, pad;
};

DEVICE uint32_t id_of(uint64_t rank) { return uint32_t(rank >> 32) == 0xffffffffu ? BAD_ID : ~uint32_t(rank); }

DEVICE void next_pass(const DecodeState* state, DecodeState* draft, DecodeState* rows, int32_t* span, int R) {
  draft->token = state->token, draft->pos = state->pos;
  span[0] = state->pos, span[1] = R;
  for (int i = 0; i < R; i++) rows[i].pos = state->pos + i;
}

KERNEL(32) void
accept_begin(const DecodeState* state,  // [1]
             DecodeState* draft,        // [1]
             DecodeState* rows,         // [R]
             int32_t* span,             // [2]
             int32_t* history,          // [pos + 1] …
             int R) {
  griddep_wait();
  if (threadIdx.x) return;
  history[state->pos] = state->token;
  next_pass(state, draft, rows, span, R);
}

KERNEL(THREADS) void
accept_f32(DecodeState* state,          // [1]
           DecodeState* draft,          // [1]
           DecodeState* rows,           // [R]
           int32_t* span,               // [2]
           const int32_t* ids,          // [M]
           int32_t* history,            // [pos + M + 1] …
           const float* logits,         // [M, V]
           const SampleParams* params,  // [1]
           uint64_t* best,              // [M, grid.x, 2] scratch
           uint64_t* chosen,            // [M, 2] scratch: rank, hash
           uint32_t* counters,          // [M + 1]
           const uint32_t* limit,       // [1]
           Counts* counts,              // [1]
           uint64_t* ring,              // [slots, 2] host memory, as sample.cu's
           uint64_t* told,              // [4] host memory
           int slots, int R, int V) {
  SHARED(ChoiceShared, sh);
  griddep_wait();
  const SampleParams p = *params;
  const int row = blockIdx.y, M = gridDim.y;
  const uint32_t position = uint32_t(state->pos) + 1 + row;
  uint64_t rank = 0;
  uint32_t hash = 0;
  for (int v = blockIdx.x * THREADS + threadIdx.x; v < p.text_vocab; v += gridDim.x * THREADS)
    consider(rank, hash, logits[int64_t(row) * V + v], uint32_t(v), p, position);
  if (!best_of_grid(rank, hash, best + int64_t(row) * gridDim.x * 2, counters + row, sh) || threadIdx.x) return;
  chosen[2 * row] = rank, chosen[2 * row + 1] = hash;
  if (atom_inc_acq_rel_gpu(counters + M, M - 1) != uint32_t(M) - 1) return;

  const uint32_t step = state->step;
  const int room = min(M, int32_t(*limit - step));
  uint32_t last = 0;
  int n = 0;
  while (n < room) {
    last = id_of(chosen[2 * n++]);
    if (last == BAD_ID || n == M || uint32_t(ids[n]) != last) break;
  }
  Counts c = *counts;
  c.passes++;
  if (n > 0) {
    if (last == BAD_ID) last = 0;  // passes already queued must still read a real row
    for (int i = 1; i < n; i++) history[state->pos + i] = ids[i];
    history[state->pos + n] = int32_t(last);
    state->token = int32_t(last), state->pos += n, state->step = step + n;
    c.right += n - 1, c.guesses += M - 1;
    next_pass(state, draft, rows, span, R);
  }
  *counts = c;
  st_release_sys_u64(told + 0, c.passes);
  st_release_sys_u64(told + 1, step + n);
  st_release_sys_u64(told + 2, c.right);
  st_release_sys_u64(told + 3, c.guesses);
  for (int i = 0; i < n; i++) {
    uint64_t* slot = ring + 2 * ((step + i) % uint32_t(slots));
    st_release_sys_u64(slot, uint64_t(uint32_t(chosen[2 * i + 1])) << 32 | id_of(chosen[2 * i]));
    st_release_sys_u64(slot + 1, uint64_t(step) + i + 1);
  }
}
