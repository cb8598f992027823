// link.cpp - store buffers between ranks, and the adversary that decides how slow each of them is.
//
// The strategies come from measurement: uniformly random link speeds never found the summed-counter bug in 1,000 schedules of 8 ranks,
// one or two stalled links found it in one of eight.
#include "link.h"

#include <cstring>
#include <utility>

#include "world.h"

namespace simt {

void Links::push(int from, int to, const PendingStore& store) {
  link(from, to).queue.push_back(store);
  pending_++;
}

void Links::forward(const Thread& t, int to, void* value, const char* from, size_t bytes) const {
  char* v = static_cast<char*>(value);
  for (const PendingStore& s : link(t.block->launch->rank, to).queue) {
    if (s.thread != &t || s.block_uid != t.block->uid || s.add) continue;
    for (size_t i = 0; i < s.bytes; i++) {
      const char* p = s.to + i;
      if (p >= from && p < from + bytes) v[p - from] = char(s.data[i]);
    }
  }
}

// Lands entry i, or an earlier one to the same address: one link keeps the order of stores to one place.
void Links::land(World& w, size_t link, size_t i) {
  Link& l = links_[link];
  const PendingStore& chosen = l.queue[i];
  for (size_t j = 0; j < i; j++) {
    const PendingStore& s = l.queue[j];
    if (s.to < chosen.to + chosen.bytes && chosen.to < s.to + s.bytes) {
      i = j;
      break;
    }
  }
  const PendingStore s = l.queue[i];
  l.queue.erase(l.queue.begin() + long(i));
  pending_--;
  apply(w, int(link) / ranks_, s.to, s.data, s.bytes, s.add, s.carried);
}

template <class Which>
void Links::drain_if(World& w, int from, Which which) {
  for (int to = 0; to < ranks_; to++) {
    auto& queue = link(from, to).queue;
    if (queue.empty()) continue;
    std::vector<PendingStore> out, stay;
    for (const PendingStore& s : queue) (which(s, to) ? out : stay).push_back(s);
    queue.swap(stay);
    pending_ -= out.size();
    for (const PendingStore& s : out) apply(w, from, s.to, s.data, s.bytes, s.add, s.carried);
  }
}

// A fence orders what its thread wrote and what it has observed: the block's stores before its last barrier, the warp's before its last
// __syncwarp, and everything that a narrower fence of this rank has published.
static bool ordered(const PendingStore& s, const Thread& t) {
  return (s.thread == &t && s.block_uid == t.block->uid) || (s.block_uid == t.block->uid && s.block_epoch < t.block->epoch) ||
         (s.warp == t.warp && s.block_uid == t.block->uid && s.warp_epoch < t.warp->epoch);
}

void Links::fence_system(World& w, const Thread& t) {
  if (pending_) drain_if(w, t.block->launch->rank, [&](const PendingStore& s, int) { return s.published || ordered(s, t); });
}

void Links::fence_gpu(World& w, const Thread& t) {
  if (!pending_) return;
  const int from = t.block->launch->rank;
  for (int to = 0; to < ranks_; to++)
    for (PendingStore& s : link(from, to).queue) s.published |= ordered(s, t);
  drain_if(w, from, [&](const PendingStore& s, int to) { return to == from && s.published; });
}

void Links::settle(World& w, const Thread& t, int to, const char* p, size_t bytes) {
  const int from = t.block->launch->rank;
  drain_if(w, from, [&](const PendingStore& s, int d) {
    return d == to && s.thread == &t && s.block_uid == t.block->uid && s.to < p + bytes && p < s.to + s.bytes;
  });
}

void Links::drain(World& w, int from) {
  if (pending_) drain_if(w, from, [](const PendingStore&, int) { return true; });
}

void Links::tick(World& w) {
  if (w.options.adversary && w.steps >= next_strategy_) new_strategy(w);
  for (int k = 0; k < 2 && pending_; k++) {
    const size_t which = w.random.below(uint32_t(links_.size()));
    Link& l = links_[which];
    if (l.queue.empty() || !l.rate || w.random.next() > l.rate) continue;
    for (uint32_t n = 1 + w.random.below(4); n && !l.queue.empty(); n--) land(w, which, w.random.below(uint32_t(l.queue.size())));
  }
}

bool Links::force(World& w) {
  if (!pending_) return false;
  const size_t start = w.random.below(uint32_t(links_.size()));
  for (int stalled = 0; stalled < 2; stalled++)
    for (size_t k = 0; k < links_.size(); k++) {
      const size_t which = (start + k) % links_.size();
      Link& l = links_[which];
      if (l.queue.empty() || (!stalled && !l.rate)) continue;
      land(w, which, w.random.below(uint32_t(l.queue.size())));
      return true;
    }
  return false;
}

void Links::new_strategy(World& w) {
  enum { ALL_RANDOM, STALLED_LINKS, SLOW_RANK, UNIFORM };
  static const uint32_t weights[4] = {1, 4, 16, 64}, rates[4] = {1u << 31, 1u << 28, 1u << 24, 1u << 18};
  const uint32_t mode = w.options.adversary ? w.random.below(4) : uint32_t(UNIFORM);
  for (Rank& r : w.ranks) r.weight = mode == ALL_RANDOM ? weights[w.random.below(4)] : 16;
  for (Link& l : links_) l.rate = mode == ALL_RANDOM ? rates[w.random.below(4)] : mode == UNIFORM ? 1u << 30 : ~0u;
  if (mode == STALLED_LINKS)
    for (uint32_t n = 1 + w.random.below(2); n; n--) links_[w.random.below(uint32_t(links_.size()))].rate = 0;
  if (mode == SLOW_RANK) {
    const int slow = int(w.random.below(uint32_t(ranks_)));
    w.ranks[size_t(slow)].weight = 1;
    if (w.random.next() & 1)
      for (int to = 0; to < ranks_; to++) link(slow, to).rate = 1u << 20;
  }
  next_strategy_ = w.steps + 256 + w.random.below(mode == STALLED_LINKS ? 32768 : 8192);
}

}  // namespace simt
