// graph_loop.cuh - the one call by which a kernel says whether a graph's WHILE node runs its body again (CUDA 12.4).
//
// It is no instruction and no library: the compiler leaves the symbol open, as it does vprintf's, and a driver that has conditional nodes fills it in
// when it loads the cubin. So only cubins that are loaded where such nodes exist may include this. On the simulator the handle is a word's address.
#pragma once
#include "peers.cuh"

// What names the node; passed by value.
struct LoopHandle {
  uint64_t node;
};

#if defined(__CUDACC__)
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
DEVICE void set_again(LoopHandle handle, bool again) { cudaGraphSetConditional(handle.node, again ? 1u : 0u); }
#else
inline void set_again(LoopHandle handle, bool again) { st_volatile_u32(reinterpret_cast<uint32_t*>(handle.node), again ? 1u : 0u); }
#endif
