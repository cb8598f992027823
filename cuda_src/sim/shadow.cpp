// shadow.cpp - the call-backs that -fsanitize=thread puts before every load and store of compiled kernels. ThreadSanitizer's own
// run-time library is not linked: these definitions take its place. They check bounds, alignment and races of the simulated thread.
#include "race.h"
#include "world.h"

namespace simt {

std::string code_place(const void* pc);  // fault.cpp

namespace {

bool within_arguments(const Launch& l, const char* p, size_t bytes) {
  for (const Argument& a : l.arguments)
    if (a.begin && p >= a.begin && p + bytes <= a.begin + a.bytes) return true;
  return false;
}

bool within_shared(const Block& b, const char* p, size_t bytes) {
  for (const SharedVar& v : b.vars)
    if (p >= v.begin && p + bytes <= v.begin + v.bytes) return true;
  return p >= b.shared->dyn && p + bytes <= b.shared->dyn + b.launch->smem;
}

void on_access(const void* address, size_t bytes, bool write, bool aligned, const void* pc) {
  Thread* t = running_thread();
  if (!t || !world || !world->race) return;
  const char* p = static_cast<const char*>(address);
  const Launch& l = *t->block->launch;
  const bool in_shared = world->shared.contains(p);
  const int owner = world->memory.owner(p);
  if (!in_shared && owner < 0) return;  // the thread's own stack, or the simulator's data
  if (in_shared ? !within_shared(*t->block, p, bytes) : !within_arguments(l, p, bytes))
    world->fail_now({nullptr, 0}, std::string("out of bounds: ") + (write ? "write of " : "read of ") + std::to_string(bytes) + " bytes at " +
                                      world->where(p, &l) + code_place(pc));
  if (aligned && reinterpret_cast<uintptr_t>(p) % bytes)
    world->fail_now({nullptr, 0}, "misaligned " + std::to_string(bytes) + "-byte " + (write ? "store to " : "load of ") + world->where(p, &l) +
                                      code_place(pc));
  if (write && owner >= 0 && owner != l.rank)
    world->fail_now({nullptr, 0}, "plain store to memory of rank " + std::to_string(owner) + ", " + world->where(p, &l) +
                                      ": stores to a peer go through a store wrapper of ptx.cuh" + code_place(pc));
  world->race->plain(*t, p, bytes, write, pc);
}

}  // namespace
}  // namespace simt

#define PC __builtin_extract_return_addr(__builtin_return_address(0))
#define SIMT_TSAN(n)                                                                                       \
  SIMT_API void __tsan_read##n(void* p) { simt::on_access(p, n, false, true, PC); }                        \
  SIMT_API void __tsan_write##n(void* p) { simt::on_access(p, n, true, true, PC); }                        \
  SIMT_API void __tsan_unaligned_read##n(void* p) { simt::on_access(p, n, false, false, PC); }             \
  SIMT_API void __tsan_unaligned_write##n(void* p) { simt::on_access(p, n, true, false, PC); }             \
  SIMT_API void __tsan_volatile_read##n(void* p) { simt::on_access(p, n, false, true, PC); }               \
  SIMT_API void __tsan_volatile_write##n(void* p) { simt::on_access(p, n, true, true, PC); }               \
  SIMT_API void __tsan_unaligned_volatile_read##n(void* p) { simt::on_access(p, n, false, false, PC); }    \
  SIMT_API void __tsan_unaligned_volatile_write##n(void* p) { simt::on_access(p, n, true, false, PC); }

extern "C" {
SIMT_TSAN(1)
SIMT_TSAN(2)
SIMT_TSAN(4)
SIMT_TSAN(8)
SIMT_TSAN(16)
SIMT_API void __tsan_read_range(void* p, size_t n) { simt::on_access(p, n, false, false, PC); }
SIMT_API void __tsan_write_range(void* p, size_t n) { simt::on_access(p, n, true, false, PC); }
SIMT_API void __tsan_func_entry(void*) {}
SIMT_API void __tsan_func_exit() {}
SIMT_API void __tsan_init() {}
SIMT_API void __tsan_vptr_read(void**) {}
SIMT_API void __tsan_vptr_update(void**, void*) {}
}
