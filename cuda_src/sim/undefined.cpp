// undefined.cpp - the call-backs of -fsanitize=undefined: instrumented kernels report undefined behaviour through the simulator, with
// block and thread, instead of through a sanitizer's run-time library. Every call-back's data begins with the place in the source.
#include <cstdint>
#include <cstring>
#include <string>

#include "world.h"

namespace {

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];  // quoted
};
struct TypeMismatch {
  SourceLocation place;
  const TypeDescriptor* type;
  unsigned char log_alignment, check;
};
struct OutOfBounds {
  SourceLocation place;
  const TypeDescriptor *array, *index;
};

[[noreturn]] void report(const void* data, const std::string& what) {
  const auto* place = static_cast<const SourceLocation*>(data);
  if (!simt::world || !simt::running_thread()) __builtin_trap();  // host code is not compiled this way
  simt::world->fail_now({place->file, int(place->line)}, what);
}

}  // namespace

extern "C" {

[[noreturn]] SIMT_API void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch* data, uintptr_t address) {
  const uintptr_t alignment = uintptr_t(1) << data->log_alignment;
  const void* p = reinterpret_cast<const void*>(address);
  const simt::Launch* launch = simt::running_thread() ? simt::running_thread()->block->launch : nullptr;
  if (!address) report(data, std::string("null pointer used as ") + data->type->name);
  if (address % alignment)
    report(data, "misaligned " + std::to_string(alignment) + "-byte access as " + data->type->name + ": " + simt::world->where(p, launch));
  report(data, std::string("object of ") + data->type->name + " does not fit the memory at " + simt::world->where(p, launch));
}

[[noreturn]] SIMT_API void __ubsan_handle_out_of_bounds_abort(const OutOfBounds* data, uintptr_t index) {
  report(data, "array index " + std::to_string(intptr_t(index)) + " is out of bounds of " + data->array->name);
}

#define SIMT_UNDEFINED(name, what) \
  [[noreturn]] SIMT_API void __ubsan_handle_##name##_abort(const void* data) { report(data, what); }
SIMT_UNDEFINED(add_overflow, "signed addition overflows")
SIMT_UNDEFINED(sub_overflow, "signed subtraction overflows")
SIMT_UNDEFINED(mul_overflow, "signed multiplication overflows")
SIMT_UNDEFINED(negate_overflow, "signed negation overflows")
SIMT_UNDEFINED(divrem_overflow, "integer division by zero or overflow")
SIMT_UNDEFINED(shift_out_of_bounds, "shift by a negative number or by too many bits, or of a negative number")
SIMT_UNDEFINED(vla_bound_not_positive, "array of no elements")
SIMT_UNDEFINED(float_cast_overflow, "floating value does not fit the integer type")
SIMT_UNDEFINED(load_invalid_value, "value is none of its type's (a bool that is neither 0 nor 1)")
SIMT_UNDEFINED(invalid_builtin, "zero passed to a bit scan")
SIMT_UNDEFINED(nonnull_arg, "null passed where it may not be")
SIMT_UNDEFINED(nonnull_return_v1, "null returned where it may not be")
SIMT_UNDEFINED(pointer_overflow, "pointer arithmetic leaves the address space")

#define SIMT_UNREACHABLE(name, what) \
  [[noreturn]] SIMT_API void __ubsan_handle_##name(const void* data) { report(data, what); }
SIMT_UNREACHABLE(builtin_unreachable, "code was reached that cannot be")
SIMT_UNREACHABLE(missing_return, "a function that returns a value ended without one")
}
