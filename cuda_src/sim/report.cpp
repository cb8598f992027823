// report.cpp - what went wrong, in one line: kernel, place, rank, block, thread; and for a deadlock, who waits where.
#include <cstdarg>
#include <cstdio>
#include <map>

#include "world.h"

namespace simt {
namespace {

std::string triple(Index3 i) { return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")"; }
std::string text(Place p) { return p.file ? std::string(p.file) + ":" + std::to_string(p.line) : std::string("its start"); }

}  // namespace

std::string World::who(const Thread& t) const {
  const Launch& l = *t.block->launch;
  std::string s = "kernel " + std::string(l.entry->name);
  if (ranks.size() > 1) s += ", rank " + std::to_string(l.rank);
  return s + ", block " + triple(t.block->index) + ", thread " + triple(t.index);
}

// "h + 1024 (argument h is 1024 bytes)": an address in terms of the launch's arguments, or of the rank's memory.
std::string World::where(const void* p, const Launch* launch) const {
  const char* c = static_cast<const char*>(p);
  char buffer[64];
  if (shared.contains(p)) {
    for (const auto& b : running) {
      for (const SharedVar& v : b->vars)
        if (c >= v.begin - 32 && c < v.begin + v.bytes + 32)
          return "shared " + std::string(v.name) + (c < v.begin ? " - " + std::to_string(v.begin - c) : " + " + std::to_string(c - v.begin)) + " (" +
                 std::to_string(v.bytes) + " bytes)";
      if (c >= b->shared->statics_end && c <= b->shared->dyn_end + 4096)
        return "dynamic shared memory + " + std::to_string(c - b->shared->dyn) + " (" + std::to_string(b->launch->smem) + " bytes)";
    }
    return "shared memory of no array";
  }
  const Allocation* a = memory.find(p);
  if (!a) {
    snprintf(buffer, sizeof buffer, "address %p, outside all device memory", p);
    return buffer;
  }
  // Several arguments may be views of one allocation: prefer the one that holds the address, then the nearest below it.
  const Argument* best = nullptr;
  if (launch)
    for (const Argument& g : launch->arguments) {
      if (!g.begin || g.begin < a->pages || g.begin > a->pages_end) continue;
      if (!best || (g.begin <= c && (best->begin > c || g.begin > best->begin))) best = &g;
    }
  const std::string dead = a->live ? "" : ", freed";
  if (best) {
    const long offset = c - best->begin;
    return "argument " + std::string(best->name) + (offset < 0 ? " - " : " + ") + std::to_string(offset < 0 ? -offset : offset) + " (" +
           std::to_string(best->bytes) + " bytes" + dead + ")";
  }
  return "rank " + std::to_string(a->rank) + " memory + " + std::to_string(c - a->begin) + " of an allocation of " + std::to_string(a->bytes) +
         " bytes" + dead;
}

void World::fail_elsewhere(const std::string& what) {
  if (failed) return;
  failed = true;
  error = what;
}

void World::fail_now(Place place, const std::string& what) {
  Thread* t = running_thread();
  fail_elsewhere(what + "; " + who(*t) + (place.file ? ", at " + text(place) : ""));
  current = nullptr;
  fiber_switch(*t->fiber, main);
  __builtin_unreachable();  // a failed world runs nothing again
}

void fail(Place place, const char* format, ...) {
  char buffer[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(buffer, sizeof buffer, format, list);
  va_end(list);
  world->fail_now(place, buffer);
}

// Every waiting thread, grouped by what it waits for: "block (0,0,0): 31 threads (1,0,0)…(31,0,0) wait at __syncthreads, x.cu:12".
std::string World::stuck() const {
  struct Group {
    const Thread *first, *last;
    int count;
  };
  std::map<std::string, Group> groups;
  for (const auto& b : running)
    for (const Thread& t : b->threads) {
      if (t.state == State::DONE || (t.warp->ready >> t.lane & 1)) continue;
      std::string what;
      if (t.state == State::BARRIER) what = "wait at __syncthreads, " + text(t.place);
      if (t.state == State::GRID) what = "wait in griddepcontrol.wait, " + text(t.place);
      if (t.state == State::CLUSTER) what = "wait in cluster_wait, " + text(t.place);
      if (t.state == State::RUNNING) what = "are ready";
      if (t.state == State::POLL) what = "poll " + where(t.poll, b->launch) + ", " + text(t.place);
      if (t.state == State::COLLECTIVE) {
        what = "wait in a warp collective, " + text(t.place);
        for (const Collective& c : t.warp->pending)
          if ((t.warp->in_use >> (&c - t.warp->pending.data()) & 1) && (c.arrived >> t.lane & 1)) {
            char lanes[32];
            snprintf(lanes, sizeof lanes, "0x%08x", c.mask & ~c.arrived);
            what = "wait in " + std::string(c.op->name) + " for lanes " + lanes + ", " + text(t.place);
          }
      }
      std::string key = "kernel " + std::string(b->launch->entry->name) + (ranks.size() > 1 ? ", rank " + std::to_string(b->launch->rank) : "") +
                        ", block " + triple(b->index) + ": " + what;
      auto [it, fresh] = groups.try_emplace(key, Group{&t, &t, 0});
      it->second.count++;
      it->second.last = &t;
    }
  std::string s = "deadlock: no thread can go on";
  for (const auto& [key, g] : groups)
    s += "\n  " + key + " [" + std::to_string(g.count) + (g.count == 1 ? " thread, " : " threads, ") + triple(g.first->index) +
         (g.count == 1 ? "" : "…" + triple(g.last->index)) + "]";
  for (size_t r = 0; r < ranks.size(); r++)
    for (const auto& l : ranks[r].active)
      if (l->entry && l->next_cluster < l->order.size())
        s += "\n  kernel " + std::string(l->entry->name) + (ranks.size() > 1 ? ", rank " + std::to_string(r) : "") + ": " +
             std::to_string((l->order.size() - l->next_cluster) * l->cluster) + " block(s) have not started; " + std::to_string(l->resident) +
             " are resident, the device holds " + std::to_string(l->resident_limit);
  return s;
}

}  // namespace simt
