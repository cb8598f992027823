// link.h - the memory system between ranks: each ordered pair of ranks has a store buffer whose entries land late and out of order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace simt {

struct World;
struct Block;
struct Warp;
struct Thread;
struct Clock;

struct PendingStore {
  char* to;
  uint8_t bytes;
  bool add;        // red.add instead of a store
  bool published;  // a fence at GPU scope ordered it before whatever its rank fences at system scope later
  const Thread* thread;
  uint32_t block_uid, block_epoch;
  const Warp* warp;
  uint32_t warp_epoch;
  unsigned char data[8];
  std::shared_ptr<const Clock> carried;  // to whoever acquires it (race checker)
};

class Links {
 public:
  explicit Links(int ranks) : ranks_(ranks), links_(size_t(ranks) * size_t(ranks)) {}

  void push(int from, int to, const PendingStore& store);
  // Overlay the thread's own stores that have not landed yet: a thread always sees what it wrote.
  void forward(const Thread& t, int to, void* value, const char* from, size_t bytes) const;
  void fence_system(World& w, const Thread& t);
  void fence_gpu(World& w, const Thread& t);
  // Before a read-modify-write: the thread's own stores to the address come first.
  void settle(World& w, const Thread& t, int to, const char* p, size_t bytes);
  void drain(World& w, int from);  // the end of a launch makes everything visible
  void tick(World& w);             // time passes: something may land
  bool force(World& w);            // nothing else can happen: land something, stalled links last
  void new_strategy(World& w);
  size_t pending() const { return pending_; }

 private:
  struct Link {
    std::vector<PendingStore> queue;
    uint32_t rate = ~0u;  // chance a tick, of 2^32; 0: stalled
  };
  Link& link(int from, int to) { return links_[size_t(from) * size_t(ranks_) + size_t(to)]; }
  const Link& link(int from, int to) const { return links_[size_t(from) * size_t(ranks_) + size_t(to)]; }
  void land(World& w, size_t link, size_t i);
  template <class Which>
  void drain_if(World& w, int from, Which which);

  int ranks_;
  std::vector<Link> links_;
  size_t pending_ = 0;
  uint64_t next_strategy_ = 0;
};

// Perform a store or reduction on memory and wake whoever polls there.
void apply(World& w, int from, char* to, const void* data, size_t bytes, bool add, const std::shared_ptr<const Clock>& carried);

}  // namespace simt
