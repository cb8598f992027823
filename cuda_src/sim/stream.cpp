// stream.cpp - a rank's stream: launches in order, blocks of a launch in the schedule's order, dependent launches that start early.
#include <algorithm>
#include <cstring>

#include "race.h"
#include "world.h"

namespace simt {

void World::enqueue(std::unique_ptr<Launch> launch) {
  Rank& r = ranks[size_t(launch->rank)];
  launch->seq = ++r.launched;
  if (launch->entry) {
    const uint32_t size = launch->cluster, n = launch->blocks() / size;
    launch->order.resize(n);
    for (uint32_t i = 0; i < n; i++) launch->order[i] = i * size;
    if (options.random)
      for (uint32_t i = n; i > 1; i--) std::swap(launch->order[i - 1], launch->order[random.below(i)]);
  }
  if (race) race->launch_queued(*launch);
  may_start = true;
  r.queue.push_back(std::move(launch));
}

// Starts the stream's next operation if it may start now. A dependent launch may as soon as every block of its predecessor has said so
// or has ended; in order, where nothing is gained by it, it waits like any other.
bool World::start_next_launch(Rank& r) {
  if (r.queue.empty()) return false;
  Launch& next = *r.queue.front();
  if (!r.active.empty()) {
    const Launch& before = *r.active.back();
    const bool early = options.random && next.entry && next.dependent && r.active.size() < 3 && before.triggers == before.blocks();
    if (!early) return false;
    next.previous_complete = false;
  }
  r.active.push_back(std::move(r.queue.front()));
  r.queue.pop_front();
  progress++;
  if (next.entry) return true;
  if (next.fill_byte >= 0)
    memset(next.target, next.fill_byte, next.target_bytes);
  else
    memcpy(next.target, next.values.data(), next.target_bytes);
  wake(next.target, next.target_bytes);
  if (race) race->host_wrote(next.target, next.target_bytes);
  launch_complete(r, next);
  return true;
}

// Gives each rank something to do: starts launches and blocks up to the preferred number of resident blocks, or (`beyond_width`, when
// all resident ones wait) one cluster more, as long as the device would hold it.
bool World::start_more(bool beyond_width) {
  bool any = false;
  may_start = false;
  for (Rank& r : ranks) {
    while (start_next_launch(r)) any = true;
    for (size_t i = 0; i < r.active.size(); i++) {
      Launch& l = *r.active[i];
      const uint32_t room = std::min(l.resident_limit, beyond_width ? l.resident + 1 : width);
      while (l.next_cluster < l.order.size() && l.resident < room && l.resident + l.cluster <= std::max(l.resident_limit, l.cluster))
        start_cluster(l), any = true;
    }
    if (any && !options.random) return true;
  }
  return any;
}

void World::start_cluster(Launch& l) {
  const uint32_t first = l.order[l.next_cluster++];
  const auto cluster = l.cluster > 1 ? std::make_shared<Cluster>() : nullptr;
  for (uint32_t rank = 0; rank < l.cluster; rank++) {
    Block* b = start_block(l, first + rank);
    if (!b || !cluster) return;
    b->cluster = cluster;
    b->cluster_rank = rank;
    cluster->blocks.push_back(b);
    cluster->live = cluster->pending += b->live;
  }
}

// Null when the world has failed.
Block* World::start_block(Launch& l, uint32_t i) {
  const uint32_t n = l.block.x * l.block.y * l.block.z;
  std::unique_ptr<Block> owned;
  if (!spare.empty()) {
    owned = std::move(spare.back());
    spare.pop_back();
  } else {
    owned = std::make_unique<Block>();
  }
  Block* b = owned.get();
  running.push_back(std::move(owned));
  b->launch = &l;
  b->uid = next_uid++;
  b->index = {i % l.grid.x, i / l.grid.x % l.grid.y, i / l.grid.x / l.grid.y};
  b->dim = l.block;
  b->grid = l.grid;
  b->live = n;
  b->exited = b->arrived = b->epoch = 0;
  b->triggered = false;
  b->ready_warps = b->last_warp = 0;
  b->shared = shared.take();
  if (!b->shared) {
    fail_elsewhere("too many resident blocks: no shared memory left for another");
    return nullptr;
  }
  b->statics_next = b->shared->statics;
  b->shared->dyn = b->shared->dyn_end - (l.smem + 15) / 16 * 16;
  b->dyn_shared = reinterpret_cast<unsigned char*>(b->shared->dyn);
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(b->shared->dyn, l.smem);
  memset(b->shared->dyn, 0xff, l.smem);
  b->threads.assign(n, Thread());
  b->warps.resize((n + WARP - 1) / WARP);
  for (uint32_t w = 0; w < b->warps.size(); w++) {
    Warp& warp = b->warps[w];
    const uint32_t lanes = std::min<uint32_t>(WARP, n - w * WARP);
    warp.block = b;
    warp.number = w;
    warp.lanes = &b->threads[w * WARP];
    warp.live = lanes == WARP ? ~0u : (1u << lanes) - 1;
    warp.epoch = warp.in_use = warp.ready = 0;
    warp.groups = 0;
    warp.products.clear();
  }
  for (uint32_t t = 0; t < n; t++) {
    Thread& th = b->threads[t];
    th.index = {t % l.block.x, t / l.block.x % l.block.y, t / l.block.x / l.block.y};
    th.lane = t % WARP;
    th.view = b;
    th.block = b;
    th.warp = &b->warps[t / WARP];
    th.number = t;
  }
  l.resident++;
  progress++;
  if (race) race->block_started(*b);
  if (trace) trace->add({Event::BLOCK_START, uint8_t(l.rank), 0, l.seq, i, 0, steps, l.entry->name, nullptr, {nullptr, 0}, {}});
  for (Warp& w : b->warps) make_ready(w, w.live);
  return b;
}

void World::finish_block(Block* b) {
  Launch& l = *b->launch;
  Rank& r = ranks[size_t(l.rank)];
  block_triggered(b);
  if (!b->copies.empty()) return fail_elsewhere("kernel " + std::string(l.entry->name) + ": a block ended with bulk copies under way into its memory");
  for (const Thread& t : b->threads)
    if (!t.stores.empty()) return fail_elsewhere("kernel " + std::string(l.entry->name) + ": a block ended with bulk copies under way out of its memory");
  for (const Warp& w : b->warps)
    if (!w.products.empty()) return fail_elsewhere("kernel " + std::string(l.entry->name) + ": a warp ended with products that it did not wait for");
  for (const NamedBarrier& n : b->named)
    if (n.arrived) return fail_elsewhere("kernel " + std::string(l.entry->name) + ": a block ended with a named barrier that some had arrived at");
  if (race) race->block_finished(*b);
  if (__asan_poison_memory_region) {
    __asan_poison_memory_region(b->shared->statics, size_t(b->statics_next - b->shared->statics));
    __asan_poison_memory_region(b->shared->dyn, size_t(b->shared->dyn_end - b->shared->dyn));
  }
  shared.put(b->shared);
  b->vars.clear();
  if (b->cluster) b->cluster->blocks[b->cluster_rank] = nullptr;
  b->cluster.reset();
  b->cluster_rank = 0;
  for (size_t i = 0; i < running.size(); i++)
    if (running[i].get() == b) {
      spare.push_back(std::move(running[i]));
      running[i] = std::move(running.back());
      running.pop_back();
      break;
    }
  l.resident--;
  may_start = true;
  if (++l.finished == l.blocks()) launch_complete(r, l);
}

void World::block_triggered(Block* b) {
  if (b->triggered) return;
  b->triggered = true;
  b->launch->triggers++;
  may_start = true;
}

void World::launch_complete(Rank& r, Launch& l) {
  links.drain(*this, l.rank);
  for (const Argument& a : l.arguments) {
    const Allocation* alloc = a.begin ? memory.find(a.begin) : nullptr;
    const char* bad = alloc && alloc->live ? Memory::damaged(*alloc) : nullptr;
    if (bad)
      return fail_elsewhere("out of bounds: kernel " + std::string(l.entry->name) + " wrote " + where(bad, &l) +
                            " (noticed after the launch; a device with race=True names the thread)");
  }
  if (l.dependent && !l.waited)
    return fail_elsewhere("kernel " + std::string(l.entry->name) +
                          " was launched as a dependent launch, but no thread of it executed griddepcontrol.wait: whatever follows it in the"
                          " stream could overtake its predecessor");
  l.complete = true;
  progress++;
  if (race) race->launch_finished(l);
  for (size_t i = 0; i < r.active.size(); i++) {
    if (r.active[i].get() != &l) continue;
    if (i + 1 < r.active.size()) r.active[i + 1]->previous_complete = true;
    r.completed = std::max(r.completed, l.seq);
    r.active.erase(r.active.begin() + long(i));
    break;
  }
  std::vector<Thread*> waiting;
  waiting.swap(r.grid_waiters);
  for (Thread* t : waiting) make_ready(t);  // they look again
}

}  // namespace simt
