// mma_lane.h - one lane's operands of an emulated mma.sync: pointers to the fragments on its stack.
#pragma once
#include "runtime.h"

namespace simt {

struct MmaLane {
  float (*c)[4];
  const uint32_t (*a)[4];
  const uint32_t (*b)[2];
};

}  // namespace simt
