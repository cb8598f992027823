// race.cpp - vector clocks (FastTrack's epochs, two readers remembered a byte) over blocks and launches.
#include "race.h"

#include <algorithm>
#include <cstring>

#include "world.h"

namespace simt {

std::string code_place(const void* pc);  // fault.cpp

namespace {

const std::shared_ptr<const Epochs>* known(const Clock& c, uint32_t block) {
  for (const auto& b : c.blocks)
    if (b.first == block) return &b.second;
  return nullptr;
}

std::shared_ptr<const Epochs> larger(const std::shared_ptr<const Epochs>& a, const std::shared_ptr<const Epochs>& b) {
  auto out = std::make_shared<Epochs>(*a);
  for (size_t i = 0; i < out->size(); i++) (*out)[i] = std::max((*out)[i], (*b)[i]);
  return out;
}

}  // namespace

void Clock::join(const Clock& other) {
  for (size_t r = 0; r < streams.size(); r++) streams[r] = std::max(streams[r], other.streams[r]);
  for (const auto& theirs : other.blocks) {
    auto mine = std::find_if(blocks.begin(), blocks.end(), [&](const auto& b) { return b.first == theirs.first; });
    if (mine == blocks.end())
      blocks.push_back(theirs);
    else if (mine->second != theirs.second)
      mine->second = larger(mine->second, theirs.second);
  }
}

uint32_t Clock::epoch_of(uint32_t block, uint32_t thread) const {
  const auto* epochs = known(*this, block);
  return epochs ? (**epochs)[thread] : 0;
}

Race::ThreadClock& Race::clock(const Thread& t) { return blocks_[t.block->uid].threads[t.number]; }

// ---- the life of launches and blocks -----------------------------------------------------------------------------------

void Race::launch_queued(const Launch& l) {
  const size_t rank = size_t(l.rank);
  auto base = host_;
  const bool overlaps = l.entry && l.dependent && last_kernel_[rank] && bases_[rank].count(last_kernel_[rank]);
  // A dependent launch is ordered after what its predecessor was ordered after, until it waits.
  base[rank] = std::max(base[rank], overlaps ? bases_[rank][last_kernel_[rank]][rank] : l.seq - 1);
  last_kernel_[rank] = l.entry ? l.seq : 0;
  if (l.entry) bases_[rank][l.seq] = base;
}

void Race::launch_finished(const Launch& l) {
  auto& bases = bases_[size_t(l.rank)];
  auto& learned = learned_[size_t(l.rank)];
  if (l.seq > 2) bases.erase(l.seq - 2);
  Clock all = known_after(size_t(l.rank), l.seq - 1);
  const auto own = learned.find(l.seq);
  if (own != learned.end()) all.join(own->second);
  forget_ended(all, size_t(l.rank));
  learned[l.seq] = all;
  uint32_t oldest = l.seq;  // that a launch may still ask for
  for (const auto& b : bases) oldest = std::min(oldest, b.second[size_t(l.rank)]);
  auto last = learned.upper_bound(oldest);
  if (last != learned.begin()) learned.erase(learned.begin(), --last);
}

// What launches up to `seq` of a rank have learned of the others.
Clock Race::known_after(size_t rank, uint32_t seq) const {
  const auto next = learned_[rank].upper_bound(seq);
  return next == learned_[rank].begin() ? Clock() : std::prev(next)->second;
}

// Leaves what `c` knows of other ranks' blocks whose launches it does not know to have ended.
void Race::forget_ended(Clock& c, size_t rank) const {
  c.streams[rank] = 0;
  const auto covered = [&](const auto& b) {
    const BlockRecord& r = blocks_[b.first];
    return size_t(r.rank) == rank || c.streams[size_t(r.rank)] >= r.seq;
  };
  c.blocks.erase(std::remove_if(c.blocks.begin(), c.blocks.end(), covered), c.blocks.end());
}

void Race::block_started(const Block& b) {
  const Launch& l = *b.launch;
  if (blocks_.size() <= b.uid) blocks_.resize(b.uid + 1);
  BlockRecord& r = blocks_[b.uid];
  r.rank = l.rank;
  r.seq = l.seq;
  r.threads.assign(b.threads.size(), ThreadClock());
  ThreadClock first;
  first.now.streams = bases_[size_t(l.rank)][l.seq];
  first.now.join(known_after(size_t(l.rank), first.now.streams[size_t(l.rank)]));
  first.now.blocks.emplace_back(b.uid, std::make_shared<Epochs>(b.threads.size(), 0));
  for (ThreadClock& t : r.threads) t = first;
}

void Race::block_finished(const Block& b) {
  if (world_.ranks.size() > 1) {  // launches behind this one know what its threads have acquired from other ranks
    const size_t rank = size_t(b.launch->rank);
    Clock& all = learned_[rank][b.launch->seq];
    for (const ThreadClock& t : blocks_[b.uid].threads) {
      Clock c = t.now;
      forget_ended(c, rank);
      all.join(c);
    }
  }
  std::vector<ThreadClock>().swap(blocks_[b.uid].threads);
  for (const SharedVar& v : b.vars) forget(v.begin, v.bytes);
  forget(b.shared->dyn, size_t(b.shared->dyn_end - b.shared->dyn));
}

void Race::grid_waited(Thread& t) {
  const Launch& l = *t.block->launch;
  uint32_t& s = clock(t).now.streams[size_t(l.rank)];
  s = std::max(s, l.seq - 1);
  clock(t).now.join(known_after(size_t(l.rank), s));
}

// ---- synchronisation ---------------------------------------------------------------------------------------------------

// All of `threads`, of one block, come to know what any of them knows.
void Race::merge(const std::vector<const Thread*>& threads) {
  const uint32_t uid = threads.front()->block->uid;
  Clock all = clock(*threads.front()).now;
  const Epochs* seen = nullptr;
  for (const Thread* t : threads) {
    const Clock& c = clock(*t).now;
    if (c.blocks.size() == 1 && c.blocks[0].second.get() == seen && c.streams == all.streams) continue;  // the common case
    seen = c.blocks[0].second.get();
    all.join(c);
  }
  auto own = std::make_shared<Epochs>(**known(all, uid));
  for (const Thread* t : threads) (*own)[t->number] = clock(*t).epoch;
  for (auto& b : all.blocks)
    if (b.first == uid) b.second = own;
  for (const Thread* t : threads) {
    ThreadClock& c = clock(*t);
    c.now = all;
    c.epoch++;
  }
}

void Race::barrier(const Block& b) {
  std::vector<const Thread*> threads;
  for (const Thread& t : b.threads)
    if (t.state != State::DONE) threads.push_back(&t);
  merge(threads);
}

void Race::warp_barrier(const Warp& w, uint32_t mask) {
  std::vector<const Thread*> threads;
  for (int lane = 0; lane < WARP; lane++)
    if (mask >> lane & 1) threads.push_back(w.lanes + lane);
  merge(threads);
}

void Race::meet(const std::vector<const Thread*>& threads, const std::vector<std::shared_ptr<const Clock>>& gone) {
  merge(threads);
  if (gone.empty()) return;
  Clock all = clock(*threads.front()).now;
  for (const auto& c : gone) all.join(*c);
  for (const Thread* t : threads) clock(*t).now = all;
}

std::shared_ptr<const Clock> Race::snapshot(const Thread& t) {
  ThreadClock& c = clock(t);
  auto copy = std::make_shared<Clock>(c.now);
  for (auto& b : copy->blocks)
    if (b.first == t.block->uid) {
      auto own = std::make_shared<Epochs>(*b.second);
      (*own)[t.number] = c.epoch;
      b.second = own;
    }
  c.epoch++;
  return copy;
}

void Race::fence(Thread& t) {
  ThreadClock& c = clock(t);
  c.now.join(c.pending);
  c.pending = Clock();
  c.fenced = snapshot(t);
}

void Race::loaded(Thread& t, const void* p, size_t bytes, bool acquire, Place place) {
  check(t, p, bytes, {t.block->uid, 0, place_index(place), uint16_t(t.number), Access::SYNC_READ, true}, nullptr, place);
  const auto it = synced_.find(p);
  if (it == synced_.end() || !it->second) return;
  ThreadClock& c = clock(t);
  (acquire ? c.now : c.pending).join(*it->second);
}

std::shared_ptr<const Clock> Race::stored(Thread& t, const void* p, size_t bytes, bool release, Place place) {
  check(t, p, bytes, {t.block->uid, 0, place_index(place), uint16_t(t.number), Access::SYNC_WRITE, true}, nullptr, place);
  return release ? snapshot(t) : clock(t).fenced;
}

void Race::landed(const void* p, const std::shared_ptr<const Clock>& carried, bool add) {
  auto& slot = synced_[p];
  if (!add || !slot) {
    slot = carried;
  } else if (carried) {  // a reduction continues the release sequence
    auto both = std::make_shared<Clock>(*slot);
    both->join(*carried);
    slot = both;
  }
}

void Race::modified(Thread& t, const void* p, size_t bytes, bool release, bool acquire, Place place) {
  const auto it = synced_.find(p);
  const std::shared_ptr<const Clock> before = it == synced_.end() ? nullptr : it->second;
  landed(p, stored(t, p, bytes, release, place), true);
  ThreadClock& c = clock(t);
  if (before) (acquire ? c.now : c.pending).join(*before);
}

// ---- accesses ----------------------------------------------------------------------------------------------------------

bool Race::ordered(const Mark& m, const Thread& t, const ThreadClock& c) const {
  if (m.block == t.block->uid && m.thread == t.number) return true;
  const BlockRecord& r = blocks_[m.block];
  return c.now.streams[size_t(r.rank)] >= r.seq || c.now.epoch_of(m.block, m.thread) >= m.epoch;
}

Race::Page& Race::page(uintptr_t address) {
  const uintptr_t index = address / PAGE;
  if (last_page_ && last_index_ == index) return *last_page_;
  auto& slot = pages_[index];
  if (!slot) slot = std::make_unique<Page>();
  last_page_ = slot.get();
  last_index_ = index;
  return *slot;
}

void Race::forget(const char* begin, size_t bytes) {
  last_page_ = nullptr;
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin), end = first + bytes;
  for (uintptr_t a = first; a < end;) {
    const uintptr_t next = std::min(end, (a / PAGE + 1) * PAGE);
    const auto it = pages_.find(a / PAGE);
    if (it != pages_.end()) {
      if (next - a == PAGE)
        pages_.erase(it);
      else
        std::fill(it->second->cells + a % PAGE, it->second->cells + a % PAGE + (next - a), Cell());
    }
    a = next;
  }
}

void Race::plain(Thread& t, const void* p, size_t bytes, bool write, const void* pc) {
  const Mark m{t.block->uid, 0, uint32_t(reinterpret_cast<uintptr_t>(pc)), uint16_t(t.number), write ? Access::WRITE : Access::READ, false};
  check(t, p, bytes, m, pc, {nullptr, 0});
}

void Race::async(Thread& t, const void* p, size_t bytes, bool write, Place place) {
  check(t, p, bytes, {t.block->uid, 0, place_index(place), uint16_t(t.number), write ? Access::WRITE : Access::READ, true}, nullptr, place);
}

void Race::check(Thread& t, const void* p, size_t bytes, Mark mark, const void* pc, Place place) {
  const ThreadClock& c = clock(t);
  mark.epoch = c.epoch;
  const bool write = mark.access == Access::WRITE || mark.access == Access::SYNC_WRITE, sync = mark.sync();
  const bool in_shared = world_.shared.contains(p);
  const uintptr_t first = reinterpret_cast<uintptr_t>(p);
  for (size_t i = 0; i < bytes; i++) {
    Cell& cell = page(first + i).cells[(first + i) % PAGE];
    const char* byte = static_cast<const char*>(p) + i;
    if (in_shared && !write && cell.write.block == ~0u)
      world_.fail_now(place, "uninitialised shared memory: read of " + world_.where(byte, t.block->launch) + code_place(pc));
    if (cell.write.block != ~0u && !(sync && cell.write.sync()) && !ordered(cell.write, t, c)) report(t, byte, cell.write, mark, pc, place);
    if (write) {
      for (const Mark& r : cell.read)
        if (r.block != ~0u && !(sync && r.sync()) && !ordered(r, t, c)) report(t, byte, r, mark, pc, place);
      cell.write = mark;
      cell.read[0] = cell.read[1] = Mark();
    } else if (cell.read[0].block == mark.block && cell.read[0].thread == mark.thread) {
      cell.read[0] = mark;
    } else {
      cell.read[1] = cell.read[0];
      cell.read[0] = mark;
    }
  }
}

uint32_t Race::place_index(Place place) {
  for (size_t i = 0; i < places_.size(); i++)
    if (places_[i].line == place.line && places_[i].file == place.file) return uint32_t(i);
  places_.push_back(place);
  return uint32_t(places_.size() - 1);
}

void Race::report(Thread& t, const char* byte, const Mark& before, const Mark& now, const void* pc, Place place) {
  static const char* const names[] = {"read", "write", "polled load", "volatile or atomic store"};
  const BlockRecord& r = blocks_[before.block];
  std::string s = std::string("data race: ") + names[int(now.access)] + " of " + world_.where(byte, t.block->launch) + code_place(pc) +
                  " is not ordered after the " + names[int(before.access)];
  if (before.is_place) {
    s += " at " + std::string(places_[before.code].file) + ":" + std::to_string(places_[before.code].line);
  } else {
    const uintptr_t high = reinterpret_cast<uintptr_t>(pc ? pc : reinterpret_cast<const void*>(t.block->launch->entry)) >> 32;
    s += code_place(reinterpret_cast<const void*>(high << 32 | before.code));
  }
  s += " by thread " + std::to_string(before.thread);
  if (before.block != t.block->uid) s += r.seq == t.block->launch->seq && r.rank == t.block->launch->rank ? " of another block" : " of another launch";
  if (r.rank != t.block->launch->rank) s += " on rank " + std::to_string(r.rank);
  world_.fail_now(place, s);
}

}  // namespace simt
