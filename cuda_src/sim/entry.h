// entry.h - turns the entry points of one .cu file into the table that the loader reads. The generated stub includes the .cu, this file,
// and names each entry point once; parameter types are deduced, so any signature works.
#pragma once
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "simt.h"

namespace simt {

// The NumPy dtype of memory of T, in the project's storage types.
template <class T>
constexpr const char* storage() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, __nv_bfloat16>) return "uint16";
  else if constexpr (std::is_same_v<U, __nv_fp8_e4m3>) return "uint8";
  else if constexpr (std::is_same_v<U, float> || std::is_same_v<U, float2> || std::is_same_v<U, float4>) return "float32";
  else if constexpr (std::is_same_v<U, double>) return "float64";
  else if constexpr (std::is_integral_v<U> && sizeof(U) == 1) return std::is_signed_v<U> ? "int8" : "uint8";
  else if constexpr (std::is_integral_v<U> && sizeof(U) == 2) return std::is_signed_v<U> ? "int16" : "uint16";
  else if constexpr (std::is_integral_v<U> && sizeof(U) == 4) return std::is_signed_v<U> ? "int32" : "uint32";
  else if constexpr (std::is_integral_v<U> && sizeof(U) == 8) return std::is_signed_v<U> ? "int64" : "uint64";
  else return "any";
}

template <class T>
constexpr Param param(const char* name) {
  if constexpr (std::is_pointer_v<T>) return {name, 'p', sizeof(T), storage<std::remove_pointer_t<T>>()};
  else if constexpr (std::is_floating_point_v<T>) return {name, 'f', sizeof(T), ""};
  else if constexpr (std::is_integral_v<T>) return {name, std::is_signed_v<T> ? 'i' : 'u', sizeof(T), ""};
  else return {name, 's', sizeof(T), ""};
}

template <class Function>
struct Signature;
template <class... P>
struct Signature<void (*)(P...)> {
  static constexpr int COUNT = sizeof...(P);
  using Names = std::initializer_list<const char*>;

  template <void (*kernel)(P...)>
  static const Param* params(Names names) {
    return list<kernel>(names, std::index_sequence_for<P...>());
  }
  template <void (*kernel)(P...), size_t... I>
  static const Param* list([[maybe_unused]] Names names, std::index_sequence<I...>) {
    static const Param all[] = {param<P>(names.begin()[I])..., Param{nullptr, 0, 0, ""}};  // one table a kernel
    return all;
  }
  template <void (*kernel)(P...)>
  static void call(void* const* args) {
    unpack<kernel>(args, std::index_sequence_for<P...>());
  }
  template <void (*kernel)(P...), size_t... I>
  static void unpack([[maybe_unused]] void* const* args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<P>*>(args[I])...);
  }
};

}  // namespace simt

// SIMT_ENTRY(kernel, largest block, "first parameter", "second", …)
#define SIMT_ENTRY(kernel, max_threads, ...)                                                             \
  {#kernel, max_threads, simt::Signature<decltype(&kernel)>::COUNT,                                      \
   simt::Signature<decltype(&kernel)>::template params<&kernel>({__VA_ARGS__}),                 \
   simt::Signature<decltype(&kernel)>::template call<&kernel>}

#define SIMT_ENTRIES(...)                                                        \
  static const simt::Entry simt_table[] = {__VA_ARGS__};                         \
  extern "C" SIMT_API const simt::Entry* simt_entries() { return simt_table; }   \
  extern "C" SIMT_API int simt_entry_count() { return int(sizeof simt_table / sizeof *simt_table); }
