// mma.cpp - mma.sync m16n8k16, bf16 or f16 operands: exact products, summed in double, rounded once. A GPU rounds in between, so
// results agree within an fp32 ulp or two, not bit for bit.
#include <cstring>

#include "mma_lane.h"

#pragma GCC optimize("O3")  // eight times faster here

namespace simt {
namespace {

float float_from(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

float widen_bf16(uint32_t word, int half) { return float_from(half ? word & 0xffff0000u : word << 16); }

// The exponent's bias differs by 112; the multiplication also normalises subnormals.
float widen_f16(uint32_t word, int half) {
  const uint32_t h = half ? word >> 16 : word & 0xffffu, sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
  if ((h & 0x7c00u) == 0x7c00u) return float_from(sign | 0x7f800000u | magnitude);
  return float_from(sign | magnitude) * 0x1p112f;
}

using Row = double __attribute__((vector_size(64)));  // the eight columns of b and of the accumulator

// With g = lane/4, t = lane%4: a[i] holds row g + 8(i&1), columns 2t + 8(i>>1) and the next; b[i] rows 2t + 8i and the next, column g;
// c[i] row g + 8(i>>1), column 2t + (i&1).
template <float (*widen)(uint32_t, int)>
void mma_16816(void* const* operands) {
  float a[16][16];
  Row b[16];
  for (int lane = 0; lane < 32; lane++) {
    const MmaLane& m = *static_cast<const MmaLane*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int h = 0; h < 2; h++) {
      for (int i = 0; i < 4; i++) a[g + 8 * (i & 1)][2 * t + 8 * (i >> 1) + h] = widen((*m.a)[i], h);
      for (int i = 0; i < 2; i++) b[2 * t + 8 * i + h][g] = widen((*m.b)[i], h);
    }
  }
  for (int row = 0; row < 16; row++) {
    Row sum{};
    for (int k = 0; k < 16; k++) sum += double(a[row][k]) * b[k];
    for (int col = 0; col < 8; col++) {
      const MmaLane& m = *static_cast<const MmaLane*>(operands[4 * (row % 8) + col / 2]);
      float& c = (*m.c)[2 * (row / 8) + col % 2];
      c = float(double(c) + sum[col]);
    }
  }
}

}  // namespace

void mma_bf16_16816(void* const* operands, uint32_t) { mma_16816<widen_bf16>(operands); }
void mma_f16_16816(void* const* operands, uint32_t) { mma_16816<widen_f16>(operands); }

}  // namespace simt
