// trace.h - the last observable accesses of a run, kept for whoever wants to see how a schedule went wrong.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "runtime.h"

namespace simt {

struct World;

struct Event {
  enum Kind : uint8_t { LOAD, STORE, LAND, ATOMIC, FENCE, BLOCK_START } kind;
  uint8_t rank, bytes;
  uint32_t launch, block, thread;  // block: linear index in the grid
  uint64_t step;
  const char* kernel;
  const void* address;
  Place place;
  unsigned char value[16];
};

class Trace {
 public:
  explicit Trace(size_t most) : most_(most) {}
  void add(const Event& e) {
    if (events_.size() < most_) {
      events_.push_back(e);
    } else {
      events_[next_] = e;
      next_ = (next_ + 1) % most_;
    }
  }
  // One line an event, oldest first.
  std::string text(const World& w) const;

 private:
  size_t most_, next_ = 0;
  std::vector<Event> events_;
};

// Records what the running thread does, if the world keeps a trace.
void note(Event::Kind kind, const void* address, const void* value, size_t bytes, Place place);
// Records a store to `address` that becomes visible now.
void note_landing(World& w, const void* address, const void* value, size_t bytes, int from_rank);

}  // namespace simt
