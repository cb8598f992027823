// common.cuh - what makes one .cu file compile under NVRTC, nvcc and the host's C++ compiler (the SIMT simulator).
//
// Rules for every kernel (docs/kernels.md): shared memory through SHARED / DYN_SHARED only, no static initialisers of it;
// inline PTX through ptx.cuh only; polls through its load wrappers, stores to a peer through its store wrappers;
// NEG_INF, never INFINITY; explicit fmaf; launch geometry is never assumed.
#pragma once
#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp8.h>
template <class T>
struct shared_type { using type = T; };
// SHARED(float[8][32], partial): one static shared array.  DYN_SHARED(float, buf): the launch's dynamic shared memory.
#define SHARED(T, name) __shared__ typename shared_type<T>::type name
#define DYN_SHARED(T, name)                                     \
  extern __shared__ __align__(16) unsigned char dyn_shared_[]; \
  T* name = reinterpret_cast<T*>(dyn_shared_)
// The same, aligned to 1,024 bytes as swizzled tiles need it. The launch asks for whole kilobytes (the simulator aligns only then).
#define DYN_SHARED_TILES(T, name)                                        \
  extern __shared__ __align__(1024) unsigned char dyn_shared_tiles_[]; \
  T* name = reinterpret_cast<T*>(dyn_shared_tiles_)
#define NEG_INF (-__int_as_float(0x7f800000))
// A structure passed by value that is indexed at run time: read from the parameter bank, without a copy in local memory.
#define BY_VALUE const __grid_constant__
#if defined(__CUDACC_RTC__)
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
#else
#include <cstdint>
#endif
#else
#include "../sim/simt.h"
#define BY_VALUE const
#endif

using bf16 = __nv_bfloat16;
using e4m3 = __nv_fp8_e4m3;

constexpr int WARP = 32;
constexpr unsigned FULL_MASK = 0xffffffffu;

// A kernel's entry point: KERNEL(256) void add_bf16(...). The number is the largest block it may be launched with.
#define KERNEL(max_threads) extern "C" __global__ __launch_bounds__(max_threads)
#define KERNEL_OCC(max_threads, blocks) extern "C" __global__ __launch_bounds__(max_threads, blocks)
#define DEVICE __device__ __forceinline__
