// fault.cpp - SIGSEGV and its kin, raised by kernel code, become a report of the kernel, block, thread and argument.
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <cstring>

#include "world.h"

extern "C" {
__attribute__((weak)) void __asan_init();
__attribute__((weak)) void __asan_set_error_report_callback(void (*)(const char*));
}

namespace simt {

// " <libfile+0x1234>": Python turns it into file and line.
std::string code_place(const void* pc) {
  Dl_info info;
  if (!pc || !dladdr(pc, &info) || !info.dli_fname) return "";
  char text[1200];
  const auto offset = static_cast<unsigned long>(static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase));
  snprintf(text, sizeof text, " <%s+0x%lx>", info.dli_fname, offset);
  return text;
}

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction saved[4];
stack_t saved_stack;
char handler_stack[64 << 10];
int depth = 0;

void* program_counter(void* context) {
  auto* u = static_cast<ucontext_t*>(context);
#if defined(__x86_64__) && defined(__linux__)
  return reinterpret_cast<void*>(u->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__) && defined(__linux__)
  return reinterpret_cast<void*>(u->uc_mcontext.pc);
#else
  (void)u;
  return nullptr;
#endif
}

bool was_write(void* context) {
#if defined(__x86_64__) && defined(__linux__)
  return static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#else
  (void)context;
  return false;
#endif
}

void on_signal(int signal, siginfo_t* info, void* context) {
  Thread* t = running_thread();
  if (!world || !t) {  // not in kernel code: let the signal take its usual course
    for (int i = 0; i < 4; i++)
      if (SIGNALS[i] == signal) sigaction(signal, &saved[i], nullptr);
    return;
  }
  std::string what;
  if (signal == SIGFPE) {
    what = "arithmetic fault: integer division by zero or overflow";
  } else if (signal == SIGILL) {
    what = "illegal instruction: the code ran into something that cannot happen, or a trap";
  } else if (t->fiber && fiber_overflowed(*t->fiber, info->si_addr)) {
    what = "stack overflow: the thread's local variables do not fit its stack";
  } else if (info->si_code == SI_KERNEL || (signal == SIGBUS && info->si_code == BUS_ADRALN)) {
    what = "misaligned vector access, or an address that is no address";
  } else {
    what = std::string("out of bounds: ") + (was_write(context) ? "write to " : "read of ") + world->where(info->si_addr, t->block->launch);
  }
  what += code_place(program_counter(context));
  // Leaves the handler for good: SA_NODEFER kept the signal unblocked, and the alternate stack counts as free once we are off it.
  world->fail_now({nullptr, 0}, what);
}

}  // namespace

// AddressSanitizer reports with a stack trace of its own; it does not know which simulated thread it was.
static void on_sanitizer_report(const char*) {
  const Thread* t = running_thread();
  if (world && t) fprintf(stderr, "simulated thread: %s\n", world->who(*t).c_str());
}

void faults_install() {
  if (__asan_init) {
    if (__asan_set_error_report_callback) __asan_set_error_report_callback(on_sanitizer_report);
    return;
  }
  if (depth++) return;
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &saved_stack);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &saved[i]);
}

void faults_remove() {
  if (__asan_init || --depth) return;
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &saved[i], nullptr);
  sigaltstack(&saved_stack, nullptr);
}

}  // namespace simt
