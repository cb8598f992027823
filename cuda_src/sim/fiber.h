// fiber.h - stacks that can be left and re-entered: the mechanism under every simulated thread.
#pragma once
#include <cstddef>
#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#include <ucontext.h>
#define SIMT_USE_UCONTEXT 1
#endif

namespace simt {

struct Fiber {
#ifdef SIMT_USE_UCONTEXT
  ucontext_t context;
#else
  void* sp = nullptr;
#endif
  char* stack = nullptr;  // lowest usable byte; the page below it is a guard. Null for the scheduler's own stack
  size_t bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
  int color = 0;
};

void fiber_switch_slowly(Fiber& from, Fiber& to);  // with ucontext, or telling AddressSanitizer
#ifndef SIMT_USE_UCONTEXT
extern "C" __attribute__((visibility("hidden"))) void simt_switch(void** save, void* to);
extern "C" __attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, size_t);
#endif

// Leave `from`, continue `to`. Returns when somebody switches back to `from`.
inline void fiber_switch(Fiber& from, Fiber& to) {
#ifndef SIMT_USE_UCONTEXT
  if (!__sanitizer_start_switch_fiber) return simt_switch(&from.sp, to.sp);
#endif
  fiber_switch_slowly(from, to);
}

// A fibre from the pool, or a new one; it begins in (or returns to the loop of) fiber_main, which the scheduler defines.
Fiber* fiber_take();
// Give back a fibre that is about to switch away from the end of fiber_main's loop.
void fiber_put(Fiber* fiber);
// Give back a fibre that was abandoned in the middle of a kernel: it starts afresh next time.
void fiber_abandon(Fiber* fiber);
// True if `p` lies in the guard page of `fiber`: its stack overflowed.
bool fiber_overflowed(const Fiber& fiber, const void* p);

[[noreturn]] void fiber_main();

}  // namespace simt
