// push.cuh - waiting for what other blocks of the cluster, or clusters of the launch, push.
#pragma once
#include "ptx.cuh"

// One more look at stores that are on their way: their threads wait for nothing, so a second without them is a fault.
DEVICE void look_again(uint32_t& looks) {
  if (++looks == 1u << 23) trap();
}
