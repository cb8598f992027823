// trace.cpp - recording and printing of events.
#include "trace.h"

#include <cstdio>

#include "world.h"

namespace simt {

void note(Event::Kind kind, const void* address, const void* value, size_t bytes, Place place) {
  if (!world->trace) return;
  const Thread& t = *running_thread();
  const Launch& l = *t.block->launch;
  const Index3 b = t.block->index, g = t.block->grid;
  Event e{kind, uint8_t(l.rank), uint8_t(bytes), l.seq, b.x + g.x * (b.y + g.y * b.z), t.number, world->steps, l.entry->name, address, place, {}};
  if (bytes) memcpy(e.value, value, bytes);
  world->trace->add(e);
}

void note_landing(World& w, const void* address, const void* value, size_t bytes, int from_rank) {
  if (!w.trace) return;
  Event e{Event::LAND, uint8_t(from_rank), uint8_t(bytes), 0, 0, 0, w.steps, "", address, {nullptr, 0}, {}};
  memcpy(e.value, value, bytes);
  w.trace->add(e);
}

std::string Trace::text(const World& w) const {
  static const char* const names[] = {"load", "store", "lands", "atomic", "fence", "block starts"};
  std::string out;
  for (size_t i = 0; i < events_.size(); i++) {
    const Event& e = events_[(next_ + i) % events_.size()];
    char line[512];
    int n = snprintf(line, sizeof line, "%8llu  rank %d  ", static_cast<unsigned long long>(e.step), e.rank);
    if (e.kind != Event::LAND)
      n += snprintf(line + n, sizeof line - size_t(n), "%s #%u  block %u  thread %u  ", e.kernel, e.launch, e.block, e.thread);
    n += snprintf(line + n, sizeof line - size_t(n), "%s", names[e.kind]);
    out.append(line, size_t(n));
    if (e.bytes) {
      out += " " + w.where(e.address, nullptr) + " =";
      for (size_t word = 0; word < e.bytes; word += 4) {
        uint32_t v = 0;
        memcpy(&v, e.value + word, e.bytes < 4 ? e.bytes : 4);
        snprintf(line, sizeof line, " %08x", v);
        out += line;
      }
    }
    if (e.place.file) out += "  " + std::string(e.place.file) + ":" + std::to_string(e.place.line);
    out += "\n";
  }
  return out;
}

}  // namespace simt
