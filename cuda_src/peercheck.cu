// peercheck.cu - does memory that one GPU stores arrive at another, and does what it loads from there hold what was stored?
//
// On some machines the driver grants peer access and the link then loses or corrupts what crosses it (IOMMU and ACS settings, broken bridges).
// So before ranks count on it, each pair writes, reads and compares, both ways, with the same instructions that the all-reduces use.
//
// peercheck_store_u32  data[i] = pattern(i, seed)
// peercheck_count_u32  *wrong += words of data that are not pattern(i, seed)
//
// pattern: a hash of word number and seed, so that neither a stale word nor one from another place passes. grid, block: any.
// bytes moved: 16·n. PRECOND  data 16-byte aligned, on any GPU that this one may access. minimum arch: sm_80
#include "include/ptx.cuh"

DEVICE uint32_t pattern(uint32_t i, uint32_t seed) {
  uint32_t x = i * 0x9E3779B1u ^ seed;
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return x ^ x >> 16;
}
DEVICE uint4 pattern_pack(uint32_t pack, uint32_t seed) {
  return make_uint4(pattern(4 * pack, seed), pattern(4 * pack + 1, seed), pattern(4 * pack + 2, seed), pattern(4 * pack + 3, seed));
}

KERNEL(256) void
peercheck_store_u32(uint64_t data,  // address of [n] packs, maybe another GPU's
                    uint32_t seed, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    st_volatile_v4(reinterpret_cast<uint4*>(data) + i, pattern_pack(uint32_t(i), seed));
}

KERNEL(256) void
peercheck_count_u32(uint32_t* wrong,  // [1]
                    uint64_t data,    // address of [n] packs, maybe another GPU's
                    uint32_t seed, int n) {
  uint32_t bad = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const uint4 got = ld_volatile_v4(reinterpret_cast<const uint4*>(data) + i), want = pattern_pack(uint32_t(i), seed);
    bad += (got.x != want.x) + (got.y != want.y) + (got.z != want.z) + (got.w != want.w);
  }
  if (bad) atomicAdd(wrong, bad);
}
