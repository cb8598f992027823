// scheduler.cpp - which thread runs next. In order: one block at a time, the warp that ran last first. Random: anything ready, by seed.
#include <algorithm>
#include <cstring>

#include "race.h"
#include "world.h"

namespace simt {

ThreadView* current = nullptr;
World* world = nullptr;

World::World(int n, const Options& o)
    : options(o), random(o.seed), memory(n, o.rank_bytes), ranks(size_t(n)), links(n), race(o.race ? new Race(*this) : nullptr),
      trace(o.trace ? new Trace(o.trace) : nullptr) {
  if (!options.random) return;
  static const uint32_t chances[3] = {~0u, 1u << 31, 1u << 28};
  chance_load = chances[random.below(3)];
  chance_store = chances[random.below(3)];
  static const uint32_t widths[4] = {1, 2, 3, 8};
  width = widths[random.below(4)];
  links.new_strategy(*this);
}

World::~World() {
  for (auto& b : running)
    for (Thread& t : b->threads)
      if (t.fiber && t.state != State::DONE) fiber_abandon(t.fiber);
}

void World::make_ready(Warp& w, uint32_t lanes) {
  if (!lanes) return;
  w.ready |= lanes;
  Block& b = *w.block;
  if (!b.ready_warps) {
    auto& ready = ranks[size_t(b.launch->rank)].ready;
    b.ready_at = ready.size();
    ready.push_back(&b);
  }
  b.ready_warps |= 1u << w.number;
}

Thread* World::take(Rank& r, Block* b, uint32_t warp, uint32_t lane) {
  Warp& w = b->warps[warp];
  w.ready &= ~(1u << lane);
  b->last_warp = warp;
  if (!w.ready) b->ready_warps &= ~(1u << warp);
  if (!b->ready_warps) {
    r.ready[b->ready_at] = r.ready.back();
    r.ready[b->ready_at]->ready_at = b->ready_at;
    r.ready.pop_back();
  }
  return w.lanes + lane;
}

Thread* World::take_ready() {
  if (!options.random) {
    for (Rank& r : ranks) {
      if (r.ready.empty()) continue;
      Block* b = r.ready.back();
      const uint32_t warp = b->warps[b->last_warp].ready ? b->last_warp : uint32_t(__builtin_ctz(b->ready_warps));
      return take(r, b, warp, uint32_t(__builtin_ctz(b->warps[warp].ready)));
    }
    return nullptr;
  }
  uint32_t total = 0;
  for (const Rank& r : ranks)
    if (!r.ready.empty()) total += r.weight;
  if (!total) return nullptr;
  uint32_t x = random.below(total);
  for (Rank& r : ranks) {
    if (r.ready.empty()) continue;
    if (x < r.weight) {
      Block* b = r.ready[random.below(uint32_t(r.ready.size()))];
      const uint32_t warp = random.bit(b->ready_warps);
      return take(r, b, warp, random.bit(b->warps[warp].ready));
    }
    x -= r.weight;
  }
  return nullptr;
}

// How often sleeping threads look again although nothing has changed. They may be loads that only look like a poll, or polls of several
// addresses. Once the host waits for them, polls with a deadline are let run into it: time passes in leaps.
int World::rounds_left() {
  constexpr int LOOKS = 64, LOOKS_BEFORE_A_DEADLINE = 8192;
  constexpr uint64_t LEAP_NS = 1000000000;
  if (!host_waits) return LOOKS;
  for (const Rank& r : ranks)
    for (const Thread* t : r.parked)
      if (t->reads_clock) {
        leapt_ns += LEAP_NS;
        return LOOKS_BEFORE_A_DEADLINE;
      }
  return LOOKS;
}

// The next thread to run, or nullptr when nothing can happen without the host (or the world has failed).
Thread* World::pick() {
  steps++;
  while (!failed) {
    if (options.random) {
      links.tick(*this);
      if (may_start) start_more(false);
    }
    if (Thread* t = take_ready()) return t;
    if (start_more(false)) continue;
    if (resume_yielded()) continue;
    if (links.force(*this)) continue;
    if (wake_parked(false)) continue;
    if (start_more(true)) continue;
    if (progress != wake_mark) wake_mark = progress, wake_rounds = 0;
    if (wake_rounds++ < rounds_left() && wake_parked(true)) continue;
    return nullptr;
  }
  return nullptr;
}

void World::suspend(State state, Place place) {
  Thread* t = running_thread();
  t->state = state;
  t->place = place;
  Thread* next = pick();
  if (next != t) switch_to(next);
  t->state = State::RUNNING;
}

void World::yield_now() {
  Thread* t = running_thread();
  if (options.random)
    make_ready(t);
  else
    ranks[size_t(t->block->launch->rank)].yielded.push_back(t);
  suspend(State::RUNNING, t->place);
}

bool World::resume_yielded() {
  bool any = false;
  for (Rank& r : ranks) {
    for (Thread* t : r.yielded) make_ready(t), any = true;
    r.yielded.clear();
  }
  if (any && progress == yield_mark) start_more(true);  // everyone yields and nothing changes: what they wait for may not have started
  yield_mark = progress;
  return any;
}

bool World::advance(bool waiting) {
  if (failed) return false;
  host_waits = waiting;
  World* outer = world;
  world = this;
  faults_install();
  wake_parked(true);
  wake_rounds = 0;
  while (Thread* t = pick()) {
    current = t;
    if (!t->fiber) t->fiber = fiber_take();
    switches++;
    fiber_switch(main, *t->fiber);
  }
  current = nullptr;
  faults_remove();
  world = outer;
  return !failed;
}

// What every fibre does: run a thread, then either begin another thread on the same stack (a thread that never waited costs no switch)
// or go to sleep in the pool.
void fiber_main() {
  for (;;) {
    Thread* t = running_thread();
    const Launch& launch = *t->block->launch;
    launch.entry->call(launch.args.data());
    t = running_thread();
    Fiber* self = t->fiber;
    Thread* next = world->thread_done(t);
    current = next;
    if (next && !next->fiber) {
      next->fiber = self;
      continue;
    }
    fiber_put(self);
    world->switches++;
    fiber_switch(*self, next ? *next->fiber : world->main);
  }
}

Thread* World::thread_done(Thread* t) {
  Block* b = t->block;
  t->state = State::DONE;
  t->fiber = nullptr;
  t->warp->live &= ~(1u << t->lane);
  progress++;
  b->exited++;
  if (b->arrived)
    fail_elsewhere("barrier divergence: a thread returned while others of its block wait at __syncthreads, " +
                   std::string(b->barrier_place.file) + ":" + std::to_string(b->barrier_place.line) + "; " + who(*t));
  for (int i = 0; i < WARP && !failed; i++) {
    const Collective& c = t->warp->pending[size_t(i)];
    if ((t->warp->in_use >> i & 1) && (c.mask >> t->lane & 1))
      fail_elsewhere("lane missing: a lane returned while its warp waits for it in " + std::string(c.op->name) + ", " + c.place.file + ":" +
                     std::to_string(c.place.line) + "; " + who(*t));
  }
  cluster_left(*t);
  if (--b->live == 0 && !failed) finish_block(b);
  return pick();
}

// ---- threads that poll -------------------------------------------------------------------------------------------------

void World::wake(const char* begin, size_t bytes) {
  progress++;
  const int owner = memory.owner(begin);
  for (size_t r = 0; r < ranks.size(); r++) {
    if (owner >= 0 && owner != int(r)) continue;
    auto& parked = ranks[r].parked;
    for (size_t i = 0; i < parked.size();) {
      Thread* t = parked[i];
      const bool hit = owner < 0 || t->poll_repeats > 0 || polls_in(*t, begin, bytes);
      if (!hit) {
        i++;
        continue;
      }
      parked[i] = parked.back();
      parked.pop_back();
      make_ready(t);
    }
  }
}

void World::park(Place place) {
  Thread* t = running_thread();
  const int owner = memory.owner(t->poll);
  ranks[size_t(owner < 0 ? t->block->launch->rank : owner)].parked.push_back(t);  // shared memory: woken by any wake of its rank
  suspend(State::POLL, place);
}

bool World::polls_in(const Thread& t, const char* begin, size_t bytes) const {
  if (t.poll < begin + bytes && begin < t.poll + t.poll_bytes) return true;
  for (const Poll& p : t.polls)
    if (p.at < begin + bytes && begin < p.at + p.bytes) return true;
  return false;
}

bool World::memory_changed(const Thread& t) const {
  if (memcmp(t.poll, t.poll_value, t.poll_bytes) != 0) return true;
  for (const Poll& p : t.polls)
    if (memcmp(p.at, p.value, p.bytes) != 0) return true;
  return false;
}

// Wakes the threads whose polled memory has changed behind the wrappers' back, or all of them.
bool World::wake_parked(bool all) {
  bool any = false;
  for (Rank& r : ranks)
    for (size_t i = 0; i < r.parked.size();) {
      Thread* t = r.parked[i];
      if (!all && !memory_changed(*t)) {
        i++;
        continue;
      }
      r.parked[i] = r.parked.back();
      r.parked.pop_back();
      make_ready(t);
      any = true;
    }
  return any;
}

}  // namespace simt
