// crt/host_defines.h - stands in for the file of that name, which NVIDIA's run-time headers include but their wheel does not contain
// (it comes with the compiler). Only what vector_types.h and the half-precision headers need of it under a host compiler.
#pragma once
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define CUDARTAPI
