// async.cpp - mbarriers, bulk tensor copies, named barriers: what runs beside the threads (async.h). The products are in wgmma.cpp.
#include "async.h"

#include <algorithm>
#include <cstring>

#include "race.h"
#include "world.h"

namespace simt {
namespace {

constexpr uint32_t MAX_ARRIVALS = (1u << 20) - 1;
constexpr int64_t TX_BIAS = 1 << 21;

// An mbarrier is one 64-bit word in shared memory; ours holds this. `tx`: bytes announced and not landed; landed first, it is negative.
struct Barrier {
  uint32_t phase, pending, expected;
  int64_t tx;
};

Barrier unpack(uint64_t w) {
  return {uint32_t(w & 1), uint32_t(w >> 1) & MAX_ARRIVALS, uint32_t(w >> 21) & MAX_ARRIVALS, int64_t(w >> 41) - TX_BIAS};
}
uint64_t pack(const Barrier& b) {
  return uint64_t(b.phase) | uint64_t(b.pending) << 1 | uint64_t(b.expected) << 21 | uint64_t(b.tx + TX_BIAS) << 41;
}

// `arrivals` threads arrive, and the bytes that are still expected change by `bytes` (two's complement).
uint64_t modify(uint64_t word, uint64_t arrivals, uint64_t bytes) {
  Barrier b = unpack(word);
  b.pending -= uint32_t(arrivals);
  b.tx += int64_t(bytes);
  if (!b.pending && !b.tx) b.phase ^= 1, b.pending = b.expected;
  return pack(b);
}

// `bar` of block b, or of another block of its cluster.
void require_barrier(const Block& b, const uint64_t* bar, Place place) {
  const auto at = reinterpret_cast<const char*>(bar) - b.shared->dyn;
  if (*bar >> 63) fail(place, "mbarrier at dynamic shared memory + %lld was not initialised", static_cast<long long>(at));
}
void require_own_barrier(const uint64_t* bar, Place place) {
  shared_address(bar, place);
  require_barrier(*running_thread()->block, bar, place);
}

uint32_t swizzled(uint32_t address, uint32_t swizzle) { return swizzle ? address ^ (address >> 7 & 7) << 4 : address; }

// Calls piece(shared offset, zero bytes before, source, source bytes) for every 16 bytes of the box; what the source lacks is zero.
template <class F>
void each_piece(const SimTensorMap& m, const int* at, uint32_t dst, F piece) {
  const uint32_t row_bytes = m.box[0] * m.item;
  uint32_t rows = 1;
  for (uint32_t d = 1; d < m.rank; d++) rows *= m.box[d];
  for (uint32_t r = 0; r < rows; r++) {
    const char* source = m.base;
    bool inside = true;
    for (uint32_t d = 1, rest = r; d < m.rank; rest /= m.box[d], d++) {
      const int64_t i = int64_t(at[d]) + rest % m.box[d];
      inside = inside && i >= 0 && i < int64_t(m.dims[d]);
      source += i * int64_t(m.strides[d - 1]);
    }
    for (uint32_t b = 0; b < row_bytes; b += 16) {
      const int64_t x = int64_t(at[0]) * m.item + b, width = int64_t(m.dims[0]) * m.item;
      const int64_t first = std::max<int64_t>(x, 0), end = inside ? std::min(x + 16, width) : first;
      piece(swizzled(dst + r * row_bytes + b, m.swizzle), uint32_t(first - x), source + first, end > first ? uint32_t(end - first) : 0);
    }
  }
}

uint32_t box_bytes(const SimTensorMap& m) {
  uint32_t n = m.item;
  for (uint32_t d = 0; d < m.rank; d++) n *= m.box[d];
  return n;
}

// What the instruction requires of its operands (PTX, "Tensors").
void require_copy(const SimTensorMap& m, uint32_t rank, const int* at, uint32_t dst, Block& b, Place place) {
  if (m.magic != TENSOR_MAP_MAGIC) fail(place, "tma_load: this is no tensor map");
  if (at[0] * int(m.item) % 16) fail(place, "tma_load from element %d: not a whole pack of 16 bytes", at[0]);
  if (m.rank != rank) fail(place, "tma_load_%ud with a tensor map of %u dimensions", rank, m.rank);
  if (dst % (m.swizzle ? 1024 : 128)) fail(place, "tma_load: destination at %u, not aligned to %d bytes", dst, m.swizzle ? 1024 : 128);
  if (dst + box_bytes(m) > b.launch->smem)
    fail(place, "tma_load: %u bytes to dynamic shared memory + %u, the launch has %zu", box_bytes(m), dst, b.launch->smem);
}

void land(Block& b, const PendingCopy& c) {
  each_piece(c.map, c.at, c.dst, [&](uint32_t offset, uint32_t before, const char* source, uint32_t bytes) {
    memset(b.shared->dyn + offset, 0, 16);
    if (bytes) memcpy(b.shared->dyn + offset + before, source, bytes);
  });
}

void copy_into(Block& b, const PendingCopy& c, uint32_t rank, Place place) {
  Thread* t = running_thread();
  require_barrier(b, c.bar, place);
  require_copy(c.map, rank, c.at, c.dst, b, place);
  each_piece(c.map, c.at, c.dst, [&](uint32_t offset, uint32_t, const char* source, uint32_t bytes) {
    require_memory(source, bytes, place);
    if (!world->race) return;
    if (bytes) world->race->async(*t, source, bytes, false, place);
    world->race->async(*t, b.shared->dyn + offset, 16, true, place);
  });
  // Whoever acquires the barrier from now on is ordered after the copy: the phase cannot end before it.
  if (world->race) world->race->modified(*t, c.bar, 8, true, false, place);
  b.copies.push_back(c);
  world->wake(reinterpret_cast<const char*>(c.bar), 8);  // who sleeps on the barrier has to look again to make the copy land
}

uint64_t add_f32(uint64_t old, uint64_t value, uint64_t) {
  const uint32_t bits[2] = {uint32_t(old), uint32_t(value)};
  float x[2];
  memcpy(x, bits, 8);
  x[0] += x[1];
  uint32_t sum;
  memcpy(&sum, x, 4);
  return sum;
}

// The box goes from shared memory to where it lies in the tensor; what is outside of it is dropped.
void write_box(Thread& t, const PendingBox& s) {
  const char* dyn = t.block->shared->dyn;
  each_piece(s.map, s.at, s.src, [&](uint32_t offset, uint32_t before, const char* target, uint32_t bytes) {
    if (!bytes) return;
    require_memory(target, bytes, s.place);
    char* to = const_cast<char*>(target);
    const char* from = dyn + offset + before;
    if (world->race) world->race->async(t, from, bytes, false, s.place);
    if (!s.add) {
      if (world->race) world->race->async(t, to, bytes, true, s.place);
      memcpy(to, from, bytes);
      return;
    }
    for (uint32_t i = 0; i < bytes; i += 4) {
      uint32_t bits;
      memcpy(&bits, from + i, 4);
      atomic(to + i, 4, add_f32, bits, 0, Order::RELAXED, s.place);
    }
  });
}

}  // namespace

void copy_async(void* dst, const void* value) {
  Thread& t = *running_thread();
  t.copies.push_back({dst, t.copy_group, {}});
  memcpy(t.copies.back().value, value, 16);
}

void copy_commit() { running_thread()->copy_group++; }

void* copy_arrived(uint32_t pending, void* value) {
  Thread& t = *running_thread();
  if (t.arrived == t.copies.size() || t.copies[t.arrived].group + pending >= t.copy_group) {
    t.copies.erase(t.copies.begin(), t.copies.begin() + t.arrived);
    t.arrived = 0;
    return nullptr;
  }
  const AsyncCopy& copy = t.copies[t.arrived++];
  memcpy(value, copy.value, 16);
  return copy.dst;
}

uint32_t shared_address(const void* p, Place place) {
  const Block& b = *running_thread()->block;
  const char* c = static_cast<const char*>(p);
  if (c < b.shared->dyn || c >= b.shared->dyn + b.launch->smem)
    fail(place, "not in dynamic shared memory: %s", world->where(p, b.launch).c_str());
  return uint32_t(c - b.shared->dyn);
}

void mbarrier_init(uint64_t* bar, uint32_t arrivals, Place place) {
  if (arrivals < 1 || arrivals > MAX_ARRIVALS) fail(place, "mbarrier_init with %u arrivals", arrivals);
  shared_address(bar, place);
  const uint64_t word = pack({0, arrivals, arrivals, 0});
  store(bar, &word, 8, Order::RELAXED, place);
}

void mbarrier_arrive(uint64_t* bar, uint32_t expect_bytes, Place place) {
  require_own_barrier(bar, place);
  atomic(bar, 8, modify, 1, expect_bytes, Order::ACQ_REL, place);
}

void mbarrier_arrive_at(uint64_t* bar, uint32_t rank, Place place) {
  shared_address(bar, place);
  uint64_t* there = static_cast<uint64_t*>(cluster_peer(bar, 8, rank, place));
  require_barrier(*running_thread()->block->cluster->blocks[rank], there, place);
  atomic(there, 8, modify, 1, 0, Order::ACQ_REL, place);
}

bool mbarrier_try_wait(uint64_t* bar, uint32_t parity, Place place) {
  require_own_barrier(bar, place);
  Block& b = *running_thread()->block;
  for (size_t i = 0; i < b.copies.size();) {
    if (b.copies[i].bar != bar) {
      i++;
      continue;
    }
    const PendingCopy c = b.copies[i];
    b.copies.erase(b.copies.begin() + long(i));
    land(b, c);
    uint64_t word = *bar;
    word = modify(word, 0, uint64_t(-int64_t(box_bytes(c.map))));
    *bar = word;
    world->wake(reinterpret_cast<const char*>(bar), 8);
  }
  uint64_t word;
  load(&word, bar, 8, Order::ACQUIRE, place);
  return unpack(word).phase != (parity & 1);
}

void tma_load(void* dst, const void* map, uint64_t* bar, uint32_t rank, const int* at, uint32_t blocks, Place place) {
  Block& own = *running_thread()->block;
  PendingCopy c{};
  memcpy(&c.map, map, sizeof c.map);
  c.dst = shared_address(dst, place);
  shared_address(bar, place);
  std::copy(at, at + rank, c.at);
  if (!blocks) {
    c.bar = bar;
    return copy_into(own, c, rank, place);
  }
  for (uint32_t i = 0; blocks >> i; i++) {
    if (!(blocks >> i & 1)) continue;
    c.bar = static_cast<uint64_t*>(cluster_peer(bar, 8, i, place));
    copy_into(*own.cluster->blocks[i], c, rank, place);
  }
}

void tma_store(const void* map, const void* src, uint32_t rank, const int* at, bool add, Place place) {
  Thread& t = *running_thread();
  PendingBox s{};
  memcpy(&s.map, map, sizeof s.map);
  s.src = shared_address(src, place);
  s.add = add, s.group = t.store_group, s.place = place;
  std::copy(at, at + rank, s.at);
  require_copy(s.map, rank, at, s.src, *t.block, place);
  for (uint32_t d = 0; d < rank; d++)
    if (at[d] < 0) fail(place, "tma_store from element %d of dimension %u: an H200 answers with an illegal instruction", at[d], d);
  if (add && s.map.item != 4) fail(place, "tma_add: the simulator adds fp32, the tensor's elements have %u bytes", s.map.item);
  t.stores.push_back(s);
}

void bulk_commit() { running_thread()->store_group++; }

void bulk_wait_read(uint32_t pending) {
  Thread& t = *running_thread();
  size_t done = 0;
  while (done < t.stores.size() && t.stores[done].group + pending < t.store_group) write_box(t, t.stores[done++]);
  t.stores.erase(t.stores.begin(), t.stores.begin() + long(done));
}

void named_barrier(int id, int threads, bool wait, Place place) {
  Thread* t = running_thread();
  Block& b = *t->block;
  if (id < 1 || id > 15) fail(place, "named_barrier %d: ids are 1 to 15", id);
  if (threads < WARP || threads % WARP || size_t(threads) > b.threads.size()) fail(place, "named_barrier of %d threads", threads);
  NamedBarrier& n = b.named[size_t(id)];
  if (!n.arrived)
    n.expected = threads;
  else if (n.expected != threads)
    fail(place, "named_barrier %d of %d threads, others wait there for %d", id, threads, n.expected);
  n.arrived++;
  if (wait)
    n.waiting.push_back(t);
  else if (world->race)
    n.gone.push_back(world->race->snapshot(*t));
  if (n.arrived < threads) {
    if (wait) world->suspend(State::BARRIER, place);
    return;
  }
  NamedBarrier met;
  std::swap(n, met);
  if (world->race && !met.waiting.empty()) world->race->meet({met.waiting.begin(), met.waiting.end()}, met.gone);
  world->progress++;
  for (Thread* other : met.waiting)
    if (other != t) world->make_ready(other);
  if (world->options.random) world->yield_now();
}

}  // namespace simt
