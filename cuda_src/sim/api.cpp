// api.cpp - the C interface through which Python (qwen_raw/simt/native.py) drives the runtime.
#include <algorithm>
#include <cstring>

#include "race.h"
#include "world.h"

using namespace simt;

constexpr size_t ALIGN = 64;  // of arguments: a tensor map's

static uint64_t give_text(const std::string& s, char* text, uint64_t bytes) {
  if (bytes) {
    const size_t n = std::min<size_t>(bytes - 1, s.size());
    memcpy(text, s.data(), n);
    text[n] = 0;
  }
  return s.size();
}

extern "C" {

struct SimtOptions {
  uint64_t seed, rank_bytes;
  int random, weak_links, weak_local, adversary, race;
  uint64_t trace;
};

struct SimtArgument {
  const char* name;
  const void* value;  // `bytes` bytes, copied
  uint64_t bytes;
  const void* view;  // buffers: the piece of memory that the kernel may touch through this argument
  uint64_t view_bytes;
};

struct SimtLaunch {
  const Entry* entry;
  int rank;
  uint32_t grid[3], block[3];
  uint64_t smem;
  int dependent;
  uint32_t resident_limit, cluster;
  uint32_t argument_count;
  const SimtArgument* arguments;
};

struct SimtStats {
  uint64_t steps, switches, progress, pending_stores;
};

SIMT_API World* simt_world_create(int ranks, const SimtOptions* o) {
  if (ranks < 1 || ranks > MAX_RANKS) return nullptr;
  Options options;
  options.seed = o->seed;
  options.random = o->random;
  options.weak_links = o->weak_links;
  options.weak_local = o->weak_local;
  options.adversary = o->adversary;
  options.race = o->race;
  options.trace = o->trace;
  options.rank_bytes = o->rank_bytes;
  return new World(ranks, options);
}

SIMT_API void simt_world_destroy(World* w) { delete w; }

SIMT_API void* simt_allocate(World* w, int rank, uint64_t bytes) { return w->memory.allocate(rank, bytes); }

SIMT_API int simt_release(World* w, void* p) { return w->memory.release(p); }

SIMT_API uint64_t simt_memory_used(World* w, int rank) { return w->memory.used(rank); }

SIMT_API void simt_launch(World* w, const SimtLaunch* in) {
  auto l = std::make_unique<Launch>();
  l->entry = in->entry;
  l->rank = in->rank;
  l->grid = {in->grid[0], in->grid[1], in->grid[2]};
  l->block = {in->block[0], in->block[1], in->block[2]};
  l->smem = in->smem;
  l->dependent = in->dependent;
  l->resident_limit = in->resident_limit;
  l->cluster = in->cluster;
  size_t total = 0;
  for (uint32_t i = 0; i < in->argument_count; i++) total += (in->arguments[i].bytes + ALIGN - 1) / ALIGN * ALIGN;
  l->values.resize(total + ALIGN);
  unsigned char* next = l->values.data() + (ALIGN - reinterpret_cast<uintptr_t>(l->values.data()) % ALIGN) % ALIGN;
  for (uint32_t i = 0; i < in->argument_count; i++) {
    const SimtArgument& a = in->arguments[i];
    memcpy(next, a.value, a.bytes);
    l->args.push_back(next);
    next += (a.bytes + ALIGN - 1) / ALIGN * ALIGN;
    l->arguments.push_back({a.name, static_cast<const char*>(a.view), a.view_bytes});
  }
  w->enqueue(std::move(l));
}

SIMT_API void simt_copy(World* w, int rank, void* to, const void* from, uint64_t bytes) {
  auto l = std::make_unique<Launch>();
  l->rank = rank;
  l->target = static_cast<char*>(to);
  l->target_bytes = bytes;
  l->values.assign(static_cast<const unsigned char*>(from), static_cast<const unsigned char*>(from) + bytes);
  w->enqueue(std::move(l));
}

SIMT_API void simt_fill(World* w, int rank, void* to, int byte, uint64_t bytes) {
  auto l = std::make_unique<Launch>();
  l->rank = rank;
  l->target = static_cast<char*>(to);
  l->target_bytes = bytes;
  l->fill_byte = byte & 0xff;
  w->enqueue(std::move(l));
}

// 0: nothing is left to do. 1: something waits for work that has not been queued. 2: failed, see simt_error.
SIMT_API int simt_advance(World* w, int waiting) {
  if (!w->advance(waiting)) return 2;
  for (size_t r = 0; r < w->ranks.size(); r++)
    if (!w->rank_idle(int(r))) return 1;
  return 0;
}

SIMT_API int simt_rank_idle(World* w, int rank) { return w->rank_idle(rank); }

SIMT_API void simt_host_synced(World* w, int rank) { w->host_synced(rank); }

SIMT_API const char* simt_error(World* w) { return w->error.c_str(); }

// Both copy as much of a text as fits, and return its whole length.
SIMT_API uint64_t simt_stuck(World* w, char* text, uint64_t bytes) { return give_text(w->stuck(), text, bytes); }

SIMT_API uint64_t simt_trace(World* w, char* text, uint64_t bytes) {
  return give_text(w->trace ? w->trace->text(*w) : std::string(), text, bytes);
}

// The allocation that holds p: its bounds, or 0.
SIMT_API int simt_find(World* w, const void* p, const void** begin, uint64_t* bytes) {
  const Allocation* a = w->memory.find(p);
  if (!a || !a->live || p < a->begin || p >= a->begin + a->bytes) return 0;
  *begin = a->begin;
  *bytes = a->bytes;
  return 1;
}

SIMT_API void simt_stats(World* w, SimtStats* out) { *out = {w->steps, w->switches, w->progress, w->links.pending()}; }

}  // extern "C"

void simt::World::host_synced(int rank) {
  if (race) race->host_synced(rank, ranks[size_t(rank)].completed);
}
