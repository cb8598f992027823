// order.cpp - loads, stores, atomics and fences whose order other threads can observe.
#include <algorithm>
#include <cstring>

#include "race.h"
#include "world.h"

namespace simt {
namespace {

constexpr int MANY_POLLS = 256;  // polls without any progress in the world, after which a thread that reads several addresses sleeps too
constexpr size_t MOST_POLLED = 8;  // addresses that a thread is known to poll in turn

bool releases(Order o) { return o == Order::RELEASE || o == Order::ACQ_REL; }
bool acquires(Order o) { return o == Order::ACQUIRE || o == Order::ACQ_REL; }
int rank_of(const Thread& t) { return t.block->launch->rank; }

// Under a random schedule a thread may lose its turn after any observable access.
void give_way(uint32_t chance) {
  if (world->options.random && world->random.next() < chance) world->yield_now();
}

void require_natural(const void* p, size_t bytes, const char* what, Place place) {
  if (reinterpret_cast<uintptr_t>(p) % bytes)
    fail(place, "misaligned %zu-byte %s of %s", bytes, what, world->where(p, running_thread()->block->launch).c_str());
}

// Touch the memory inside the runtime: a bad address must be reported for the thread that used it, whatever the link would do later.
int checked_owner(const void* p, size_t bytes, bool write, Place place) {
  const int owner = world->memory.owner(p);
  if (owner < 0 && !world->shared.contains(p))
    fail(place, "out of bounds: %s of %zu bytes at %p, outside all device memory", write ? "store" : "load", bytes, p);
  const Allocation* a = owner < 0 ? nullptr : world->memory.find(p);
  const char* c = static_cast<const char*>(p);
  if (owner >= 0 && (!a || !a->live || c < a->begin || c + bytes > a->begin + a->bytes))
    fail(place, "out of bounds: %s of %zu bytes at %s", write ? "store" : "load", bytes,
         world->where(p, running_thread()->block->launch).c_str());
  return owner;
}

void store_or_add(void* dst, const void* src, size_t bytes, bool add, Order order, Place place) {
  Thread* t = running_thread();
  t->place = place;
  require_natural(dst, bytes, "store", place);
  const int owner = checked_owner(dst, bytes, true, place), mine = rank_of(*t);
  if (releases(order)) world->links.fence_system(*world, *t);
  std::shared_ptr<const Clock> carried;
  if (world->race) carried = world->race->stored(*t, dst, bytes, releases(order), place);
  note(Event::STORE, dst, src, bytes, place);
  const bool late = owner >= 0 && world->options.weak_links && (owner != mine || world->options.weak_local);
  if (!late) {
    apply(*world, mine, static_cast<char*>(dst), src, bytes, add, carried);
  } else {
    // A 16-byte store is not one access to the memory model: its words may land apart.
    for (size_t i = 0; i < bytes; i += 4) {
      PendingStore s{static_cast<char*>(dst) + i, uint8_t(bytes < 4 ? bytes : 4), add, false, t, t->block->uid, t->block->epoch, t->warp,
                     t->warp->epoch, {}, carried};
      if (bytes == 8) s.bytes = 8;  // 64-bit words are single-copy atomic
      memcpy(s.data, static_cast<const char*>(src) + i, s.bytes);
      world->links.push(mine, owner, s);
      if (bytes == 8) break;
    }
  }
  give_way(world->chance_store);
}

// In order no other thread runs between two looks, so a round over several addresses that finds each as it was is a poll, too. (Under a
// random schedule a thread gives way after a look, and MANY_POLLS do.)
bool round_in_vain(Thread& t, const void* p, size_t bytes) {
  if (world->options.random) return false;
  Poll now{static_cast<const char*>(p), uint8_t(bytes), {}};
  memcpy(now.value, p, bytes);
  for (Poll& before : t.polls) {
    if (before.at != p || before.bytes != bytes) continue;
    if (memcmp(before.value, p, bytes) == 0) {
      if (++t.unchanged < t.polls.size()) return false;
      // What differs now was not read in this round: the thread has done with it, and must not be woken for it again and again.
      const auto done = [](const Poll& old) { return memcmp(old.at, old.value, old.bytes) != 0; };
      t.polls.erase(std::remove_if(t.polls.begin(), t.polls.end(), done), t.polls.end());
      return true;
    }
    before = now;
    t.unchanged = 0;
    return false;
  }
  if (t.polls.size() == MOST_POLLED) t.polls.erase(t.polls.begin());
  t.polls.push_back(now);
  t.unchanged = 0;
  return false;
}

// Sleeps when the thread reads what it has just read: true if it did.
bool sleep_if_polling(Thread& t, const void* p, size_t bytes, Place place) {
  const bool again = t.poll == p && t.poll_bytes == bytes && memcmp(t.poll_value, p, bytes) == 0;
  t.poll = static_cast<const char*>(p);
  t.poll_bytes = uint8_t(bytes);
  memcpy(t.poll_value, p, bytes);
  if (t.poll_progress != world->progress) t.poll_progress = world->progress, t.poll_repeats = 0;
  if (again) t.polls.clear();
  const bool known = again || round_in_vain(t, p, bytes);  // that nothing else is polled
  if (!known && ++t.poll_repeats <= MANY_POLLS) return false;
  if (known) t.poll_repeats = 0;
  world->park(place);
  t.poll_repeats = 0;
  t.unchanged = 0;
  return true;
}

}  // namespace

void require_memory(const void* p, size_t bytes, Place place) {
  if (bytes) checked_owner(p, bytes, false, place);
}

void load(void* dst, const void* src, size_t bytes, Order order, Place place) {
  Thread* t = running_thread();
  t->place = place;
  require_natural(src, bytes, "load", place);
  const int owner = checked_owner(src, bytes, false, place);
  memcpy(dst, src, bytes);
  if (world->race) world->race->loaded(*t, src, bytes, acquires(order), place);
  if (owner >= 0 && world->links.pending()) world->links.forward(*t, owner, dst, static_cast<const char*>(src), bytes);
  note(Event::LOAD, src, dst, bytes, place);
  if (!sleep_if_polling(*t, src, bytes, place)) give_way(world->chance_load);
}

void store(void* dst, const void* src, size_t bytes, Order order, Place place) { store_or_add(dst, src, bytes, false, order, place); }

void reduce_add_u32(uint32_t* dst, uint32_t value, Order order, Place place) { store_or_add(dst, &value, 4, true, order, place); }

uint64_t atomic(void* p, size_t bytes, Modify modify, uint64_t a, uint64_t b, Order order, Place place) {
  Thread* t = running_thread();
  t->place = place;
  require_natural(p, bytes, "atomic", place);
  const int owner = checked_owner(p, bytes, true, place);
  if (releases(order)) world->links.fence_gpu(*world, *t);
  if (owner >= 0 && world->links.pending()) world->links.settle(*world, *t, owner, static_cast<const char*>(p), bytes);
  if (world->race) world->race->modified(*t, p, bytes, releases(order), acquires(order), place);
  uint64_t old = 0;
  memcpy(&old, p, bytes);
  const uint64_t next = modify(old, a, b);
  note(Event::ATOMIC, p, &next, bytes, place);
  if (next == old) {  // a failed compare-and-swap, say: it may be a poll
    sleep_if_polling(*t, p, bytes, place);
    return old;
  }
  memcpy(p, &next, bytes);
  world->wake(static_cast<const char*>(p), bytes);
  give_way(world->chance_store);
  return old;
}

void fence(Scope scope, Place place) {
  Thread* t = running_thread();
  t->place = place;
  note(Event::FENCE, nullptr, nullptr, 0, place);
  if (world->race) world->race->fence(*t);
  if (scope == Scope::SYSTEM) world->links.fence_system(*world, *t);
  if (scope == Scope::GPU) world->links.fence_gpu(*world, *t);
  if (scope != Scope::BLOCK) give_way(world->chance_store);
}

void apply(World& w, int from, char* to, const void* data, size_t bytes, bool add, const std::shared_ptr<const Clock>& carried) {
  if (add) {
    uint32_t old, more;
    memcpy(&old, to, 4);
    memcpy(&more, data, 4);
    old += more;
    memcpy(to, &old, 4);
  } else {
    memcpy(to, data, bytes);
  }
  note_landing(w, to, to, bytes, from);
  if (w.race) w.race->landed(to, carried, add);
  w.wake(to, bytes);
}

}  // namespace simt
