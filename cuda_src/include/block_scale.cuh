// block_scale.cuh - e4m3 rows with a scale for each block of 128 columns: what attention leaves for O's product: a head is a block, and
// a slice of the product. x[t, k] = code[t, k]·2^(e[t, k / 128] - 127), e a byte: the exponent of a power of two, as fp32 has it. Rows of e are whole 16 bytes.
//
// Scales are coarse: every eighth power of two. e4m3 is a floating format of 18 binades: a block whose largest code is 2 instead of 448 loses nothing but
// what lies 2^-7 and more below its largest. Neighbouring blocks mostly have the same scale then, and the product goes on with its sums as they are.
#pragma once
#include "vec.cuh"

constexpr int BLOCK_COLUMNS = 128;
constexpr uint32_t BLOCK_LOW = 88, BLOCK_HIGH = 168, BLOCK_STEP = 8;  // of e, so that no ratio of scales leaves fp32

// The scale of a block with this largest magnitude.
struct BlockScale {
  uint32_t e;
  float factor;  // code = x·factor; NaN, and so all codes, where the block has an infinity or is beyond all scales
  DEVICE explicit BlockScale(float largest) {
    const uint32_t least = (__float_as_uint(largest * (1.f / 448.f)) + 0x7fffffu) >> 23;  // rounded up to a power of two
    e = min(max((least + BLOCK_STEP - 1) / BLOCK_STEP * BLOCK_STEP, BLOCK_LOW), BLOCK_HIGH);
    factor = __uint_as_float(least <= e ? (254 - e) << 23 : 0x7fc00000u);
  }
};
DEVICE float block_unit(int e) { return __uint_as_float(uint32_t(e) << 23); }
// What turns sums in units of one scale into units of another.
DEVICE float block_ratio(int from, int to) { return __uint_as_float(uint32_t(min(max(127 + from - to, 0), 254)) << 23); }

// For rows made from a tensor core's sums, of which the four lanes of a quad have pairs of neighbours: the largest of a quad; words of pairs.
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}
DEVICE uint32_t lower_halves(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
DEVICE uint32_t upper_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }
