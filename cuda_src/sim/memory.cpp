// memory.cpp - reservations, guard pages and canaries.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace simt {
namespace {

constexpr size_t ALIGN = 256;
constexpr unsigned char CANARY = 0xfd, UNWRITTEN = 0xff;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

char* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("simt: cannot reserve address space for simulated memory");
    std::abort();
  }
  return static_cast<char*>(p);
}

}  // namespace

Memory::Memory(int ranks, size_t bytes_per_rank) : capacity_(bytes_per_rank), page_(size_t(sysconf(_SC_PAGESIZE))) {
  // Addresses are cheap and never reused, memory is not: reserve several times what may be in use at once.
  span_ = std::max(round_up(4 * bytes_per_rank, page_), size_t(1) << 30);
  total_ = span_ * size_t(ranks);
  base_ = reserve(total_);
  arenas_.resize(size_t(ranks));
  for (int r = 0; r < ranks; r++) arenas_[size_t(r)].next = base_ + size_t(r) * span_;
}

Memory::~Memory() {
  if (__asan_unpoison_memory_region)
    for (const Arena& arena : arenas_)
      for (const Allocation& a : arena.all) __asan_unpoison_memory_region(a.pages, size_t(a.pages_end - a.pages));
  munmap(base_, total_);
}

void* Memory::allocate(int rank, size_t bytes) {
  Arena& arena = arenas_[size_t(rank)];
  const size_t padded = round_up(std::max<size_t>(bytes, 1), ALIGN), mapped = round_up(padded, page_);
  char* limit = base_ + (size_t(rank) + 1) * span_;
  if (arena.used + padded > capacity_ || size_t(limit - arena.next) < mapped + 2 * page_) return nullptr;
  char* pages = arena.next + page_;
  if (mprotect(pages, mapped, PROT_READ | PROT_WRITE) != 0) return nullptr;
  const Allocation a{pages + mapped - padded, bytes, pages, pages + mapped, rank, true};
  memset(a.pages, CANARY, size_t(a.begin - a.pages));
  memset(a.begin, UNWRITTEN, bytes);
  memset(a.begin + bytes, CANARY, size_t(a.pages_end - a.begin) - bytes);
  if (__asan_poison_memory_region) {
    __asan_poison_memory_region(a.pages, size_t(a.begin - a.pages));
    __asan_poison_memory_region(a.begin + bytes, size_t(a.pages_end - a.begin) - bytes);
  }
  arena.next = a.pages_end;
  arena.used += padded;
  arena.all.push_back(a);
  return a.begin;
}

bool Memory::release(void* p) {
  Allocation* a = const_cast<Allocation*>(find(p));
  if (!a || !a->live || a->begin != p) return false;
  a->live = false;
  const size_t mapped = size_t(a->pages_end - a->pages);
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(a->pages, mapped);
  madvise(a->pages, mapped, MADV_DONTNEED);
  mprotect(a->pages, mapped, PROT_NONE);
  arenas_[size_t(a->rank)].used -= round_up(std::max<size_t>(a->bytes, 1), ALIGN);
  return true;
}

const Allocation* Memory::find(const void* p) const {
  const int rank = owner(p);
  if (rank < 0) return nullptr;
  const auto& all = arenas_[size_t(rank)].all;
  const char* c = static_cast<const char*>(p);
  // A guard page lies between two neighbours; it counts as the end of the lower one, in its upper half as the start of the next.
  auto it = std::upper_bound(all.begin(), all.end(), c, [this](const char* q, const Allocation& a) { return q < a.pages - page_ / 2; });
  return it == all.begin() ? nullptr : &*(it - 1);
}

const char* Memory::damaged(const Allocation& a) {
  if (__asan_poison_memory_region) return nullptr;  // poisoned instead: AddressSanitizer reports the access itself
  for (const char* p = a.pages; p < a.begin; p++)
    if (static_cast<unsigned char>(*p) != CANARY) return p;
  for (const char* p = a.begin + a.bytes; p < a.pages_end; p++)
    if (static_cast<unsigned char>(*p) != CANARY) return p;
  return nullptr;
}

// ---- shared memory ---------------------------------------------------------------------------------------------------
namespace {
constexpr size_t MAX_SLOTS = 2048;  // blocks resident at once, over all ranks
}

SharedPool::SharedPool() : page_(size_t(sysconf(_SC_PAGESIZE))) {}

SharedPool::~SharedPool() {
  const size_t stride = STATIC_BYTES + DYN_BYTES + 3 * page_;
  if (__asan_unpoison_memory_region)
    for (const auto& s : all_) {
      __asan_unpoison_memory_region(s->statics, STATIC_BYTES);
      __asan_unpoison_memory_region(s->dyn_end - DYN_BYTES, DYN_BYTES);
    }
  if (base_) munmap(base_, stride * MAX_SLOTS);
}

SharedSlot* SharedPool::take() {
  if (!free_.empty()) {
    SharedSlot* s = free_.back();
    free_.pop_back();
    return s;
  }
  const size_t stride = STATIC_BYTES + DYN_BYTES + 3 * page_;
  if (!base_) base_ = reserve(stride * MAX_SLOTS);
  if (slots_ == MAX_SLOTS) return nullptr;
  char* p = base_ + stride * slots_++;
  auto slot = std::make_unique<SharedSlot>();
  slot->statics = p + page_;
  slot->statics_end = slot->statics + STATIC_BYTES;
  slot->dyn_end = slot->statics_end + page_ + DYN_BYTES;
  slot->dyn = slot->dyn_end;
  mprotect(slot->statics, STATIC_BYTES, PROT_READ | PROT_WRITE);
  mprotect(slot->statics_end + page_, DYN_BYTES, PROT_READ | PROT_WRITE);
  if (__asan_poison_memory_region) {  // unpoisoned as far as a block uses it
    __asan_poison_memory_region(slot->statics, STATIC_BYTES);
    __asan_poison_memory_region(slot->dyn_end - DYN_BYTES, DYN_BYTES);
  }
  all_.push_back(std::move(slot));
  return all_.back().get();
}

bool SharedPool::contains(const void* p) const {
  const char* c = static_cast<const char*>(p);
  return base_ && c >= base_ && c < base_ + (STATIC_BYTES + DYN_BYTES + 3 * page_) * MAX_SLOTS;
}

}  // namespace simt
