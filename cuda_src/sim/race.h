// race.h - a happens-before checker: vector clocks over threads, fed by -fsanitize=thread's call-backs and by the runtime.
//
// Two accesses race when they overlap, one of them writes, not both go through the load, store and atomic wrappers, and no chain of
// barriers, fences, releases and acquires, griddepcontrol.wait or launch boundaries orders them. The schedule does not have to
// interleave them: one run of one seed is usually enough.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime.h"

namespace simt {

struct World;
struct Thread;
struct Block;
struct Warp;
struct Launch;

constexpr int MAX_RANKS = 8;

using Epochs = std::vector<uint32_t>;  // of a block's threads, by thread number

// What a thread knows to have happened. Immutable vectors are shared: after a barrier the whole block holds the same one.
struct Clock {
  std::array<uint32_t, MAX_RANKS> streams{};                            // launches that have ended, by rank
  std::vector<std::pair<uint32_t, std::shared_ptr<const Epochs>>> blocks;  // by block uid
  void join(const Clock& other);
  uint32_t epoch_of(uint32_t block, uint32_t thread) const;
};

enum class Access : uint8_t { READ, WRITE, SYNC_READ, SYNC_WRITE };  // SYNC: through a wrapper

class Race {
 public:
  explicit Race(World& world) : world_(world) {}

  void launch_queued(const Launch& l);
  void launch_finished(const Launch& l);
  void host_synced(int rank, uint32_t seq) { host_[size_t(rank)] = seq; }
  void host_wrote(const char* begin, size_t bytes) { forget(begin, bytes); }
  void block_started(const Block& b);
  void block_finished(const Block& b);
  void grid_waited(Thread& t);
  void barrier(const Block& b);
  void warp_barrier(const Warp& w, uint32_t mask);
  void fence(Thread& t);

  void loaded(Thread& t, const void* p, size_t bytes, bool acquire, Place place);
  // Returns what the store carries to whoever acquires it, null for nothing: it takes effect when the store lands.
  std::shared_ptr<const Clock> stored(Thread& t, const void* p, size_t bytes, bool release, Place place);
  void landed(const void* p, const std::shared_ptr<const Clock>& carried, bool add);
  void modified(Thread& t, const void* p, size_t bytes, bool release, bool acquire, Place place);
  // A plain access of compiled code, at `pc`.
  void plain(Thread& t, const void* p, size_t bytes, bool write, const void* pc);
  // An access by hardware that works for the thread: a bulk copy, a product's operand.
  void async(Thread& t, const void* p, size_t bytes, bool write, Place place);
  // These threads, of one block, have met at a barrier, where others, whose snapshots are `gone`, did not wait.
  void meet(const std::vector<const Thread*>& threads, const std::vector<std::shared_ptr<const Clock>>& gone);
  // What the thread knows now, itself included; what it does from here on comes after.
  std::shared_ptr<const Clock> snapshot(const Thread& t);

 private:
  struct ThreadClock {
    uint32_t epoch = 1;  // the thread's own component
    Clock now, pending;
    std::shared_ptr<const Clock> fenced;
  };
  struct BlockRecord {
    int rank;
    uint32_t seq;
    std::vector<ThreadClock> threads;  // empty once the block has ended
  };
  struct Mark {  // who accessed a byte
    uint32_t block = ~0u, epoch = 0, code = 0;
    uint16_t thread = 0;
    Access access = Access::READ;
    bool is_place = false;  // `code` is an index into places_, else the low half of a program counter
    bool sync() const { return access == Access::SYNC_READ || access == Access::SYNC_WRITE; }
  };
  struct Cell {
    Mark write, read[2];
  };
  static constexpr size_t PAGE = 256;
  struct Page {
    Cell cells[PAGE];
  };

  ThreadClock& clock(const Thread& t);
  Clock known_after(size_t rank, uint32_t seq) const;
  void forget_ended(Clock& c, size_t rank) const;
  bool ordered(const Mark& m, const Thread& t, const ThreadClock& c) const;
  void merge(const std::vector<const Thread*>& threads);
  void check(Thread& t, const void* p, size_t bytes, Mark mark, const void* pc, Place place);
  void forget(const char* begin, size_t bytes);
  Page& page(uintptr_t address);
  uint32_t place_index(Place place);
  [[noreturn]] void report(Thread& t, const char* byte, const Mark& before, const Mark& now, const void* pc, Place place);

  World& world_;
  std::array<uint32_t, MAX_RANKS> host_{};                 // what the host has waited for
  std::array<std::unordered_map<uint32_t, std::array<uint32_t, MAX_RANKS>>, MAX_RANKS> bases_;  // rank → seq → streams at launch
  std::array<uint32_t, MAX_RANKS> last_kernel_{};          // seq of the last queued operation if it was a kernel, else 0
  std::array<std::map<uint32_t, Clock>, MAX_RANKS> learned_;  // rank → seq → what launches up to it have acquired from other ranks
  std::vector<BlockRecord> blocks_;                        // by uid
  std::unordered_map<const void*, std::shared_ptr<const Clock>> synced_;  // what the last store to an address carried
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  Page* last_page_ = nullptr;
  uintptr_t last_index_ = 0;
  std::vector<Place> places_;
};

}  // namespace simt
