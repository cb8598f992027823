// memory.h - device memory in which every buffer is bounded: guard pages around it, canaries in the slack inside the last page.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// Present only when AddressSanitizer's runtime is loaded into the process.
extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void*, size_t);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, size_t);
}

namespace simt {

struct Allocation {
  char* begin;       // 256-byte aligned, as from cuMemAlloc
  size_t bytes;      // what was asked for; the bytes from here to `pages_end` are canaries
  char* pages;       // first accessible byte
  char* pages_end;   // first byte of the guard page behind it
  int rank;
  bool live;
};

// One address range for all ranks, so that a pointer's owner is a division. Addresses are never given out twice: use after free faults.
class Memory {
 public:
  Memory(int ranks, size_t bytes_per_rank);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* allocate(int rank, size_t bytes);  // filled with 0xff; nullptr when the rank's memory is full
  bool release(void* p);
  int owner(const void* p) const {
    const size_t offset = size_t(static_cast<const char*>(p) - base_);
    return offset < total_ ? int(offset / span_) : -1;
  }
  // The allocation that holds `p`, or whose guard page or slack does; nullptr for memory that is none of ours.
  const Allocation* find(const void* p) const;
  // The first damaged canary byte of an allocation, or nullptr.
  static const char* damaged(const Allocation& a);
  size_t used(int rank) const { return arenas_[size_t(rank)].used; }
  size_t capacity() const { return capacity_; }

 private:
  struct Arena {
    char* next;
    size_t used = 0;
    std::vector<Allocation> all;  // ascending addresses
  };
  char* base_;
  size_t span_, total_, capacity_, page_;
  std::vector<Arena> arenas_;
};

// One block's shared memory: static arrays from the bottom of one guarded area, dynamic memory against the end of another.
struct SharedVar {
  const void* key;
  const char* name;
  char* begin;
  size_t bytes;
};
struct SharedSlot {
  char *statics, *statics_end;  // guarded on both sides
  char *dyn, *dyn_end;
};
class SharedPool {
 public:
  static constexpr size_t STATIC_BYTES = 96 << 10, DYN_BYTES = 256 << 10;
  SharedPool();
  ~SharedPool();
  SharedSlot* take();
  void put(SharedSlot* slot) { free_.push_back(slot); }
  bool contains(const void* p) const;

 private:
  size_t page_;
  char* base_ = nullptr;
  size_t slots_ = 0;
  std::vector<std::unique_ptr<SharedSlot>> all_;
  std::vector<SharedSlot*> free_;
};

}  // namespace simt
