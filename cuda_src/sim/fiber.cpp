// fiber.cpp - the switch itself (hand-written on x86-64, ucontext elsewhere) and a pool of guarded stacks.
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Present only when AddressSanitizer's runtime is loaded into the process.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, size_t);
}

namespace simt {
namespace {

// 64 KiB hold any sane kernel frame; AddressSanitizer's red zones make frames several times larger.
size_t stack_bytes() { return __asan_unpoison_memory_region ? 512 << 10 : 64 << 10; }

struct Pool {
  std::vector<Fiber*> free;
  int made = 0;
  const void* main_stack = nullptr;  // the scheduler's stack, as AddressSanitizer knows it
  size_t main_bytes = 0;
};
Pool& pool() {
  static Pool p;
  return p;
}

void arrive(void* fake_stack) {
  if (!__sanitizer_finish_switch_fiber) return;
  const void* old_stack = nullptr;
  size_t old_bytes = 0;
  __sanitizer_finish_switch_fiber(fake_stack, &old_stack, &old_bytes);
  if (!pool().main_stack) pool().main_stack = old_stack, pool().main_bytes = old_bytes;  // the first arrival comes from the scheduler
}

void first_entry() {
  arrive(nullptr);
  fiber_main();
}

#ifdef SIMT_USE_UCONTEXT
void make_context(Fiber& f) {
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack;
  f.context.uc_stack.ss_size = f.bytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, first_entry, 0);
}
#else
void make_context(Fiber& f) {
  // Offset the stacks so that the hot ends of a warp's 32 stacks do not fall into the same cache sets.
  uintptr_t top = reinterpret_cast<uintptr_t>(f.stack + f.bytes) - size_t(f.color & 31) * 128;
  void** sp = reinterpret_cast<void**>(top & ~uintptr_t(15));
  *--sp = nullptr;                                   // where first_entry would return to
  *--sp = reinterpret_cast<void*>(first_entry);      // popped by simt_switch's ret
  for (int i = 0; i < 6; i++) *--sp = nullptr;       // rbp, rbx, r12 … r15
  f.sp = sp;
}
#endif

}  // namespace

#ifndef SIMT_USE_UCONTEXT
// System V keeps rbx, rbp, r12 … r15 across calls; everything else the caller has already saved. MXCSR is the same in all fibres.
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch,.-simt_switch
)");
#endif

void fiber_switch_slowly(Fiber& from, Fiber& to) {
  if (__sanitizer_start_switch_fiber) {
    const void* stack = to.stack ? to.stack : pool().main_stack;
    __sanitizer_start_switch_fiber(&from.fake_stack, stack, to.stack ? to.bytes : pool().main_bytes);
  }
#ifdef SIMT_USE_UCONTEXT
  swapcontext(&from.context, &to.context);
#else
  simt_switch(&from.sp, to.sp);
#endif
  arrive(from.fake_stack);
}

Fiber* fiber_take() {
  Pool& p = pool();
  if (!p.free.empty()) {
    Fiber* f = p.free.back();
    p.free.pop_back();
    return f;
  }
  const size_t page = size_t(sysconf(_SC_PAGESIZE)), bytes = stack_bytes();
  char* map = static_cast<char*>(mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (map == MAP_FAILED || mprotect(map, page, PROT_NONE) != 0) {
    std::perror("simt: cannot map a thread's stack");
    std::abort();
  }
  Fiber* f = new Fiber;
  f->stack = map + page;
  f->bytes = bytes;
  f->color = p.made++;
  make_context(*f);
  return f;
}

void fiber_put(Fiber* fiber) { pool().free.push_back(fiber); }

void fiber_abandon(Fiber* fiber) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(fiber->stack, fiber->bytes);
  make_context(*fiber);
  pool().free.push_back(fiber);
}

bool fiber_overflowed(const Fiber& fiber, const void* p) {
  const char* c = static_cast<const char*>(p);
  return fiber.stack && c < fiber.stack && c >= fiber.stack - sysconf(_SC_PAGESIZE);
}

}  // namespace simt
