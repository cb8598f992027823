// accept.cu - the end of a speculative pass: choose an id after every row, keep those whose row was guessed right, move the state on.
//
//   choice[i] = what sample.cu would choose at position pos + 1 + i from the logits of row i
//   rows 0 … n - 1 stand: row 0 always does, row i > 0 if all before it do and ids[i] == choice[i - 1].   choice[0 … n - 1] are posted
//
// So what is posted is what single steps would have posted, greedy or sampled: a draw depends on nothing but seed, position and logits
// (sample.cu), hence a guess is right or wrong, and nothing has to be corrected when it is wrong. Keys and values of rows that do not
// stand lie beyond the new position, where the next pass overwrites them: rolling back is the position alone.
//
// accept_f32         the above. Nothing is posted from step `limit` on, whatever is still queued: such a pass changes nothing.
// accept_forced_f32  for benches and tests: row i > 0 stands with the probability forced / 2^24, by a hash of its position, whatever was chosen; what is
//                    posted before it is then its own id, so that the text is one.
// accept_step        after a decode step that chose by itself (sample.cu): the same bookkeeping. The step posts whatever the limit is.
// accept_begin       before a request's first pass: what accept_f32 leaves behind for the next one.
//
// All leave: history, the id at every position; rows[i].pos = pos + i for the R rows of the next pass, and the same as span = {pos, R}; the draft
// model's state at the target's id and position, and in `filled` the position up to which it has keys: a pass of one row adds none.
// The host is told {passes << 32 | steps, guesses right, guesses, guesses compared, passes that posted}: passes and steps at once, because the host
// reckons from both what is still to come; and, but for accept_step, before the ids themselves, so who sees an id sees the counts of its pass. Nothing is
// released word by word: a release waits until what came before it has crossed the bus, which takes longer than all the rest of accept_step.
//
// Between ranks that have some rows of the LM head each: the last block stores its candidates, 16 rows whatever M is, into every peer's mailbox and
// waits for theirs, as sample_ranks_f32 does (sample.cu says why two slots suffice), counted by passes. All ranks then do the same.
//
// grid: (any, M) (blocks of a row stride over its logits); block: 256; accept_begin, accept_step (1), 32. bytes moved: 4·M·rows; over the link 256 bytes a peer.
// A pass of one row, with nothing guessed, is a step: M may be less than R.
// PRECOND  M <= R <= 16; text_vocab <= V of all ranks; counters [M + 1] zero before the first launch; best holds M·gridDim.x pairs; the ring has more
// slots than there are ids that the host has not read. PRECOND  mailboxes [2, 8, 16] packs, zero, and counts equal on all ranks before the first launch;
// all ranks make the same launches. minimum arch: sm_80
#include "include/candidates.cuh"

constexpr int THREADS = 256, MAX_ROWS = 16;
static_assert(MAX_RANKS * MAX_ROWS <= THREADS, "a thread a candidate");

struct Counts {
  uint32_t passes, right, guesses, compared, posted, unused[3];
};

DEVICE uint32_t id_of(uint64_t rank) { return uint32_t(rank >> 32) == 0xffffffffu ? BAD_ID : ~uint32_t(rank); }

// An id that the draft model does not know is its id 0: it guesses worse, and reads a real row.
DEVICE void next_pass(const DecodeState* state, DecodeState* draft, DecodeState* rows, int32_t* span, int R, int draft_vocab) {
  draft->token = state->token < draft_vocab ? state->token : 0, draft->pos = state->pos;
  span[0] = state->pos, span[1] = R;
  for (int i = 0; i < R; i++) rows[i].pos = state->pos + i;
}

KERNEL(32) void
accept_begin(const DecodeState* state,  // [1]
             DecodeState* draft,        // [1]
             DecodeState* rows,         // [R]
             int32_t* span,             // [2]
             int32_t* filled,           // [1]
             int32_t* history,          // [pos + 1] …
             int R, int draft_vocab) {
  griddep_wait();
  if (threadIdx.x) return;
  history[state->pos] = state->token;
  *filled = state->pos;
  next_pass(state, draft, rows, span, R, draft_vocab);
}

DEVICE void tell(uint64_t* told, const Counts& c, uint32_t steps) {
  st_volatile_u64(told + 1, c.right);
  st_volatile_u64(told + 2, c.guesses);
  st_volatile_u64(told + 3, c.compared);
  st_volatile_u64(told + 4, c.posted);
  st_volatile_u64(told, uint64_t(c.passes) << 32 | steps);
}

KERNEL(32) void
accept_step(const DecodeState* state,  // [1]
            DecodeState* draft,        // [1]
            DecodeState* rows,         // [R]
            int32_t* span,             // [2]
            int32_t* history,          // [pos + 1] …
            Counts* counts,            // [1]
            uint64_t* told,            // [5] host memory
            int R, int draft_vocab) {
  griddep_wait();
  if (threadIdx.x) return;
  history[state->pos] = state->token;
  next_pass(state, draft, rows, span, R, draft_vocab);
  Counts c = *counts;
  c.passes++, c.posted++;
  *counts = c;
  tell(told, c, state->step);
}

// Where ranks meet; passed by value.
struct PassMeeting {
  Peers mailboxes;
  PollLimit limit;
  int32_t rank, world;
};

struct AcceptShared {
  ChoiceShared choice;
  uint64_t best[MAX_RANKS][MAX_ROWS];
  uint32_t hash[MAX_RANKS][MAX_ROWS];
  uint32_t posted[MAX_ROWS];
};

// By a whole block, after the last of this rank's candidates: sh.best[0] and sh.hash[0] of all ranks' rows.
DEVICE void meet(AcceptShared& sh, const uint64_t* chosen, const PassMeeting& m, uint32_t passes, int M) {
  const int peer = threadIdx.x / MAX_ROWS, row = threadIdx.x % MAX_ROWS, slots_at = int(passes & 1) * MAX_RANKS * MAX_ROWS;
  const uint32_t tag = (passes + 1) & 0xffu;
  if (peer < m.world) {
    uint64_t best = row < M ? chosen[2 * row] : 0;
    uint32_t hash = row < M ? uint32_t(chosen[2 * row + 1]) : 0;
    if (peer != m.rank) {
      st_volatile_v4(m.mailboxes.packs(peer) + slots_at + m.rank * MAX_ROWS + row, tagged(best, hash, tag));
      Watch watch = watch_start(m.limit);
      const uint4* slot = m.mailboxes.packs(m.rank) + slots_at + peer * MAX_ROWS + row;
      uint4 got;
      while (!carries(got = ld_volatile_v4(slot), tag)) watch_poll(watch, m.rank, peer, passes + 1);
      best = rank_in(got), hash = hash_in(got);
    }
    sh.best[peer][row] = best, sh.hash[peer][row] = hash;
  }
  __syncthreads();
  if (threadIdx.x < M)
    for (int r = 1; r < m.world; r++)
      sh.best[0][threadIdx.x] = rank_max(sh.best[0][threadIdx.x], sh.best[r][threadIdx.x]), sh.hash[0][threadIdx.x] += sh.hash[r][threadIdx.x];
  __syncthreads();
}

// Whether a forced row at this position stands.
DEVICE bool coin(uint32_t position, uint32_t forced) { return philox(position, 0x9E3779B9u, 0x2545F491u, 0u) >> 8 < forced; }

template <bool FORCED>
DEVICE void accept(DecodeState* state, DecodeState* draft, DecodeState* rows, int32_t* span, int32_t* filled, const int32_t* ids, int32_t* history,
                   const float* logits, const SampleParams* params, uint64_t* best, uint64_t* chosen, uint32_t* counters, const uint32_t* limit,
                   Counts* counts, uint64_t* ring, uint64_t* told, int slots, int R, int V, int first, int draft_vocab, const PassMeeting& m,
                   const uint32_t* forced) {
  SHARED(AcceptShared, sh);
  griddep_wait();
  const SampleParams p = *params;
  const int row = blockIdx.y, M = gridDim.y, end = min(V, p.text_vocab - first);
  const uint32_t position = uint32_t(state->pos) + 1 + row;
  uint64_t rank = 0;
  uint32_t hash = 0;
  for (int v = blockIdx.x * THREADS + threadIdx.x; v < end; v += gridDim.x * THREADS)
    consider(rank, hash, logits[int64_t(row) * V + v], uint32_t(first + v), p, position);
  if (!best_of_grid(rank, hash, best + int64_t(row) * gridDim.x * 2, counters + row, sh.choice)) return;
  if (threadIdx.x == 0) {
    chosen[2 * row] = rank, chosen[2 * row + 1] = hash;
    sh.choice.arrived = atom_inc_acq_rel_gpu(counters + M, M - 1);
  }
  __syncthreads();
  if (sh.choice.arrived != uint32_t(M) - 1) return;
  meet(sh, chosen, m, counts->passes, M);
  if (threadIdx.x) return;

  const uint32_t step = state->step;
  const int pos = state->pos, room = min(M, int32_t(*limit - step));
  uint32_t last = 0;
  int n = 0;
  bool wrong = false;
  while (n < room && !wrong) {
    last = id_of(sh.best[0][n]);
    const bool guessed = n + 1 < M && last != BAD_ID;
    bool stands = guessed && uint32_t(ids[n + 1]) == last;
    if (FORCED && guessed) {
      stands = coin(uint32_t(pos + 1 + n), *forced);
      if (stands) last = uint32_t(ids[n + 1]);
    }
    sh.posted[n++] = last;
    wrong = guessed && !stands;
    if (!guessed) break;
  }
  Counts c = *counts;
  c.passes++;
  if (n > 0) {
    if (last == BAD_ID) last = 0;  // passes already queued must still read a real row
    for (int i = 1; i < n; i++) history[pos + i] = ids[i];
    history[pos + n] = int32_t(last);
    state->token = int32_t(last), state->pos = pos + n, state->step = step + n;
    c.right += n - 1, c.guesses += M - 1, c.compared += n - 1 + wrong, c.posted++;
    if (M > 1) *filled = pos + n;
    next_pass(state, draft, rows, span, R, draft_vocab);
  }
  *counts = c;
  tell(told, c, step + n);
  const auto slot = [&](int i) { return ring + 2 * ((step + i) % uint32_t(slots)); };
  for (int i = 0; i < n; i++) st_volatile_u64(slot(i), uint64_t(sh.hash[0][i]) << 32 | sh.posted[i]);
  __threadfence_system();  // one for all: who sees a number sees its id, and the counts
  for (int i = 0; i < n; i++) st_volatile_u64(slot(i) + 1, uint64_t(step) + i + 1);
}

KERNEL_OCC(THREADS, 2) void
accept_f32(DecodeState* state,          // [1]
           DecodeState* draft,          // [1]
           DecodeState* rows,           // [R]
           int32_t* span,               // [2]
           int32_t* filled,             // [1]
           const int32_t* ids,          // [M]
           int32_t* history,            // [pos + M + 1] …
           const float* logits,         // [M, V] of ids first … first + V - 1
           const SampleParams* params,  // [1]
           uint64_t* best,              // [M, grid.x, 2] scratch
           uint64_t* chosen,            // [M, 2] scratch: rank, hash
           uint32_t* counters,          // [M + 1]
           const uint32_t* limit,       // [1]
           Counts* counts,              // [1]
           uint64_t* ring,              // [slots, 2] host memory, as sample.cu's
           uint64_t* told,              // [5] host memory
           int slots, int R, int V, int first, int draft_vocab, BY_VALUE PassMeeting meeting) {
  accept<false>(state, draft, rows, span, filled, ids, history, logits, params, best, chosen, counters, limit, counts, ring, told, slots, R, V, first,
                draft_vocab, meeting, nullptr);
}

KERNEL_OCC(THREADS, 2) void
accept_forced_f32(DecodeState* state,          // as accept_f32's, and so on
                  DecodeState* draft,          //
                  DecodeState* rows,           //
                  int32_t* span,               //
                  int32_t* filled,             //
                  const int32_t* ids,          //
                  int32_t* history,            //
                  const float* logits,         //
                  const SampleParams* params,  //
                  uint64_t* best,              //
                  uint64_t* chosen,            //
                  uint32_t* counters,          //
                  const uint32_t* limit,       //
                  Counts* counts,              //
                  uint64_t* ring,              //
                  uint64_t* told,              //
                  int slots, int R, int V, int first, int draft_vocab, BY_VALUE PassMeeting meeting,
                  const uint32_t* forced) {    // [1] of 2^24
  accept<true>(state, draft, rows, span, filled, ids, history, logits, params, best, chosen, counters, limit, counts, ring, told, slots, R, V, first,
               draft_vocab, meeting, forced);
}
