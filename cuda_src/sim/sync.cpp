// sync.cpp - block barriers and warp collectives, and the ways in which they can be got wrong.
#include <cstring>

#include "race.h"
#include "world.h"

namespace simt {
namespace {

bool same(Place a, Place b) { return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0); }
std::string text(Place p) { return std::string(p.file) + ":" + std::to_string(p.line); }

void release_barrier(Block* b, Vote vote) {
  b->vote_result = vote == Vote::OR ? b->vote_or : vote == Vote::AND ? b->vote_and : b->vote_count;
  if (world->race) world->race->barrier(*b);
  b->arrived = 0;
  b->epoch++;
  b->vote_or = b->vote_count = 0;
  b->vote_and = 1;
  world->progress++;
  Thread* me = running_thread();
  for (Warp& w : b->warps) world->make_ready(w, &w == me->warp ? w.live & ~(1u << me->lane) : w.live);
}

// Lanes that wait for `t` in a collective while it goes to a barrier will wait for ever.
void require_no_pending_collective(const Thread& t, Place place) {
  for (uint32_t bits = t.warp->in_use; bits; bits &= bits - 1) {
    const Collective& c = t.warp->pending[size_t(__builtin_ctz(bits))];
    if (c.mask >> t.lane & 1)
      world->fail_now(place, "lane missing: the thread is at __syncthreads while its warp waits for it in " + std::string(c.op->name) + ", " +
                                 text(c.place));
  }
}

// The failures are apart from the fast path, whose stack frame 32 lanes have in cache at once.
[[noreturn, gnu::noinline, gnu::cold]] void bad_mask(const WarpOp& op, bool own, Place place) {
  world->fail_now(place, std::string(op.name) + (own ? ": the calling lane is not in its own mask"
                                                     : ": the mask names a lane that has returned or does not exist"));
}

// The collective that the lanes of `mask` have begun, among those under way in the warp; nullptr if there is none.
[[gnu::noinline]] Collective* find_collective(Warp& w, uint32_t mask, const WarpOp& op, Place place) {
  for (uint32_t bits = w.in_use; bits; bits &= bits - 1) {
    Collective& c = w.pending[size_t(__builtin_ctz(bits))];
    if (!(c.mask & mask)) continue;
    if (c.mask != mask || c.op != &op || !same(c.place, place))
      world->fail_now(place, "warp divergence: lanes of one mask meet in different places, " + std::string(c.op->name) + " at " + text(c.place) +
                                 " and " + op.name + " at " + text(place));
    return &c;
  }
  return nullptr;
}

Collective* begin_collective(Warp& w, uint32_t mask, const WarpOp& op, Place place) {
  const int slot = __builtin_ctz(~w.in_use);
  w.in_use |= 1u << slot;
  Collective* c = &w.pending[size_t(slot)];
  c->mask = mask;
  c->arrived = 0;
  c->op = &op;
  c->place = place;
  return c;
}

[[gnu::noinline]] void finish_collective(Warp& w, Collective* c, uint32_t mask, const WarpOp& op) {
  op.finish(c->operand, mask);
  if (op.orders_memory) {
    w.epoch++;
    if (world->race) world->race->warp_barrier(w, mask);
  }
  w.in_use &= ~(1u << (c - w.pending.data()));  // no progress: a warp that polls together meets in one after every look
  world->make_ready(w, mask & ~(1u << running_thread()->lane));
}

}  // namespace

int barrier(Vote vote, int predicate, Place place) {
  Thread* t = running_thread();
  Block* b = t->block;
  if (b->exited)
    world->fail_now(place, "barrier divergence: __syncthreads after " + std::to_string(b->exited) + " thread(s) of the block returned");
  if (t->warp->in_use) require_no_pending_collective(*t, place);
  if (b->arrived == 0)
    b->barrier_place = place;
  else if (!same(b->barrier_place, place))
    world->fail_now(place, "barrier divergence: threads of one block wait at __syncthreads in different places, " + text(b->barrier_place) +
                               " and " + text(place));
  b->vote_or |= predicate != 0;
  b->vote_and &= predicate != 0;
  b->vote_count += predicate != 0;
  if (++b->arrived < b->live) {
    world->suspend(State::BARRIER, place);
  } else {
    release_barrier(b, vote);
    if (world->options.random) world->yield_now();
  }
  return b->vote_result;
}

void collective(uint32_t mask, const WarpOp& op, void* operand, Place place) {
  Thread* t = running_thread();
  Warp& w = *t->warp;
  const uint32_t me = 1u << t->lane;
  if (__builtin_expect(!(mask & me) || (mask & ~w.live), 0)) bad_mask(op, !(mask & me), place);
  Collective* c = w.in_use ? find_collective(w, mask, op, place) : nullptr;
  if (!c) c = begin_collective(w, mask, op, place);
  c->operand[t->lane] = operand;
  c->arrived |= me;
  t->place = place;
  if (c->arrived == mask) return finish_collective(w, c, mask, op);
  const uint32_t others = w.ready & (w.ready - 1);
  if (world->options.random || !others) return world->suspend(State::COLLECTIVE, place);
  // The common case, without the scheduler: the warp's next lane goes on.
  t->state = State::COLLECTIVE;
  Thread* next = w.lanes + __builtin_ctz(w.ready);
  w.ready = others;
  world->switch_to(next);
  t->state = State::RUNNING;
}

uint32_t live_lanes() { return running_thread()->warp->live; }

void griddep_wait(Place place) {
  Thread* t = running_thread();
  Launch& l = *t->block->launch;
  l.waited = true;
  while (!l.previous_complete) {
    world->ranks[size_t(l.rank)].grid_waiters.push_back(t);
    world->suspend(State::GRID, place);
  }
  if (world->race) world->race->grid_waited(*t);
}

void griddep_launch() { world->block_triggered(running_thread()->block); }

void yield() { world->yield_now(); }

// A clock of its own: a microsecond a scheduling step, so that the same seed sees the same times.
uint64_t timer_ns() {
  running_thread()->reads_clock = true;
  return world->steps * 1000 + world->leapt_ns;
}

void* static_shared(const void* key, const char* name, size_t bytes, size_t align) {
  Block* b = running_thread()->block;
  for (const SharedVar& v : b->vars)
    if (v.key == key) return v.begin;
  constexpr size_t RED_ZONE = 64;
  char* p = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(b->statics_next) + align - 1) & ~uintptr_t(align - 1));
  size_t total = bytes;
  for (const SharedVar& v : b->vars) total += v.bytes;
  if (total > STATIC_SHARED_LIMIT || p + bytes > b->shared->statics_end)
    world->fail_now(running_thread()->place, "static shared memory: " + std::string(name) + " brings the block to " + std::to_string(total) +
                                                 " bytes, the limit is " + std::to_string(STATIC_SHARED_LIMIT));
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(p, bytes);
  memset(p, 0xff, bytes);
  b->vars.push_back({key, name, p, bytes});
  b->statics_next = p + bytes + RED_ZONE;
  return p;
}

}  // namespace simt
