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

void require_barrier(const uint64_t* bar, Place place) {
  if (*bar >> 63) fail(place, "mbarrier at %s was not initialised", world->where(bar, running_thread()->block->launch).c_str());
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

// The block of this rank in the running block's cluster, and where what lies at `p` in this block lies in that one.
Block& block_of(uint32_t rank, Place place) {
  Cluster& c = *running_thread()->block->cluster;
  if (rank >= c.blocks.size()) fail(place, "block %u of a cluster of %zu", rank, c.blocks.size());
  if (!c.blocks[rank]) fail(place, "block %u of the cluster has ended: its shared memory is gone", rank);
  return *c.blocks[rank];
}
uint64_t* barrier_in(const Block& b, const uint64_t* bar, Place place) {
  return reinterpret_cast<uint64_t*>(b.shared->dyn + shared_address(bar, place));
}

// What the instruction requires of its operands (PTX, "Tensors").
void require_copy(const SimTensorMap& m, uint32_t rank, uint32_t dst, Block& b, Place place) {
  if (m.magic != TENSOR_MAP_MAGIC) fail(place, "tma_load: this is no tensor map");
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

void copy_into(Block& b, PendingCopy c, uint32_t rank, Place place) {
  Thread* t = running_thread();
  c.bar = barrier_in(b, c.bar, place);
  require_barrier(c.bar, place);
  require_copy(c.map, rank, c.dst, b, place);
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

}  // namespace

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

void mbarrier_arrive_at(uint64_t* bar, uint32_t rank, Place place) {
  uint64_t* there = barrier_in(block_of(rank, place), bar, place);
  require_barrier(there, place);
  atomic(there, 8, modify, 1, 0, Order::ACQ_REL, place);
}

void mbarrier_arrive(uint64_t* bar, uint32_t expect_bytes, Place place) {
  shared_address(bar, place);
  require_barrier(bar, place);
  atomic(bar, 8, modify, 1, expect_bytes, Order::ACQ_REL, place);
}

bool mbarrier_try_wait(uint64_t* bar, uint32_t parity, Place place) {
  shared_address(bar, place);
  require_barrier(bar, place);
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
  PendingCopy c{};
  memcpy(&c.map, map, sizeof c.map);
  c.dst = shared_address(dst, place);
  c.bar = bar;
  std::copy(at, at + rank, c.at);
  if (!blocks) blocks = 1u << running_thread()->block->cluster_rank;
  for (uint32_t i = 0; blocks >> i; i++)
    if (blocks >> i & 1) copy_into(block_of(i, place), c, rank, place);
}

uint32_t cluster_rank() { return running_thread()->block->cluster_rank; }

void cluster_sync(Place place) {
  Thread* t = running_thread();
  Cluster& c = *t->block->cluster;
  size_t threads = 0;
  for (const Block* b : c.blocks) {
    if (!b || b->exited) fail(place, "cluster_sync after threads of the cluster have returned");
    threads += b->threads.size();
  }
  if (world->race) world->race->modified(*t, &c, 1, true, false, place);
  c.waiting.push_back(t);
  if (c.waiting.size() < threads) {
    world->suspend(State::BARRIER, place);
  } else {
    std::vector<Thread*> all;
    all.swap(c.waiting);
    world->progress++;
    for (Thread* other : all)
      if (other != t) world->make_ready(other);
    if (world->options.random) world->yield_now();
  }
  if (world->race) world->race->modified(*t, &c, 1, false, true, place);
}

void named_barrier(int id, int threads, Place place) {
  Thread* t = running_thread();
  Block& b = *t->block;
  if (id < 1 || id > 15) fail(place, "named_barrier %d: ids are 1 to 15", id);
  if (threads < WARP || threads % WARP || size_t(threads) > b.threads.size()) fail(place, "named_barrier of %d threads", threads);
  NamedBarrier& n = b.named[size_t(id)];
  if (n.threads.empty())
    n.expected = threads;
  else if (n.expected != threads)
    fail(place, "named_barrier %d of %d threads, others wait there for %d", id, threads, n.expected);
  n.threads.push_back(t);
  if (n.threads.size() < size_t(threads)) return world->suspend(State::BARRIER, place);
  std::vector<Thread*> all;
  all.swap(n.threads);
  if (world->race) world->race->meet({all.begin(), all.end()});
  world->progress++;
  for (Thread* other : all)
    if (other != t) world->make_ready(other);
  if (world->options.random) world->yield_now();
}

}  // namespace simt
