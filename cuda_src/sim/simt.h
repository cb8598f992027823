// simt.h - CUDA's language as the host's C++ compiler sees it: what common.cuh includes when there is no CUDA compiler.
#pragma once
#ifdef SIMT_SCAN
// First pass of the loader: only the preprocessor runs, and the loader reads the names of the entry points from its output.
#define __global__ SIMT_SCAN_ENTRY
#define __launch_bounds__(...) SIMT_SCAN_BOUNDS(__VA_ARGS__)
#else

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "runtime.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __align__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ SHARED_MEMORY_IS_DECLARED_WITH_THE_MACROS_SHARED_AND_DYN_SHARED
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

#undef assert
#define assert(condition) ((condition) ? void() : simt::fail(simt::Place::here(), "assertion failed: %s", #condition))

namespace simt {
template <class T>
struct same {
  using type = T;
};
template <class T>
inline T& shared_array(const void* key, const char* name) {
  static_assert(sizeof(T) <= 48 << 10, "static shared memory is limited to 48 KB");
  return *static_cast<T*>(static_shared(key, name, sizeof(T), alignof(T) < 16 ? 16 : alignof(T)));
}
}  // namespace simt

// The key's address tells the array apart from all others, also between instances of a template.
#define SHARED(T, name)                     \
  static const char simt_key_##name = 0;    \
  typename simt::same<T>::type& name = simt::shared_array<typename simt::same<T>::type>(&simt_key_##name, #name)
#define DYN_SHARED(T, name) T* name = reinterpret_cast<T*>(simt::current->view->dyn_shared)
#define DYN_SHARED_TILES(T, name) DYN_SHARED(T, name)
#define NEG_INF (-__builtin_huge_valf())

#define threadIdx (simt::current->index)
#define blockIdx (simt::current->view->index)
#define blockDim (simt::current->view->dim)
#define gridDim (simt::current->view->grid)
#define warpSize 32

#include "intrinsics.h"
#endif
