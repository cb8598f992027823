// attn_format.cuh - the two formats of a KV cache as attention reads them: eight neighbouring elements of a row are a pack, and become the
// 16-bit operands of a tensor core in registers. e4m3 becomes f16, exactly; Q (saturating) and P are f16 then, else bf16.
#pragma once
#include "kv_cache.cuh"

struct CacheBf16 {
  using Element = bf16;
  using Eight = uint4;  // eight dimensions
  using Pack = uint4;   // of a key
  static constexpr bool FINE_PARTS = false;
  DEVICE static Pack load(const bf16* p) { return ld_once_v4(p); }
  DEVICE static Eight load_again(const bf16* p) { return ld_global_v4(p); }  // what other blocks read too
  static constexpr int K_DIMS = 8, K_CHUNKS = 1;
  DEVICE static uint4 wide(Pack v, int = 0) { return v; }
  // Of two rows: word d holds dimension d of both, a's in the lower half.
  DEVICE static void pairs(uint32_t (&out)[8], Pack a, Pack b) {
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) out[2 * i] = __byte_perm(x[i], y[i], 0x5410), out[2 * i + 1] = __byte_perm(x[i], y[i], 0x7632);
  }
  template <int HD>
  struct Values {
    using Pack = uint4;
    static constexpr int DIMS = 8, CHUNKS = 1;
    DEVICE static Pack load(const bf16* p) { return ld_once_v4(p); }
    DEVICE static void pairs(uint32_t (&out)[8], Pack a, Pack b, int) { CacheBf16::pairs(out, a, b); }
  };
  DEVICE static uint4 query(uint4 bf16x8) { return bf16x8; }
  DEVICE static uint32_t pack(float lo, float hi) { return pack_bf16(lo, hi); }
  DEVICE static void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16_16816(c, a, b); }
};

struct CacheE4m3 {
  using Element = uint8_t;
  using Eight = uint2;
  using Pack = uint4;
  static constexpr bool FINE_PARTS = true;
  static constexpr int K_DIMS = 16, K_CHUNKS = 2;
  DEVICE static Pack load(const uint8_t* p) { return ld_once_v4(p); }
  DEVICE static Eight load_again(const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); }
  DEVICE static uint4 wide(uint2 v) { return make_uint4(widen_e4m3(v.x), widen_e4m3(v.x >> 16), widen_e4m3(v.y), widen_e4m3(v.y >> 16)); }
  DEVICE static uint4 wide(Pack v, int half) { return wide(half ? make_uint2(v.z, v.w) : make_uint2(v.x, v.y)); }
  DEVICE static void pairs(uint32_t (&out)[8], uint2 a, uint2 b) {
    const uint32_t x[2] = {a.x, a.y}, y[2] = {b.x, b.y};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t low = __byte_perm(x[i], y[i], 0x5140), high = __byte_perm(x[i], y[i], 0x7362);  // bytes of dimensions 0 and 1, 2 and 3
      out[4 * i] = widen_e4m3(low), out[4 * i + 1] = widen_e4m3(low >> 16);
      out[4 * i + 2] = widen_e4m3(high), out[4 * i + 3] = widen_e4m3(high >> 16);
    }
  }
  template <int HD>
  struct Values {  // 64 dimensions
    using Pack = uint2;
    static constexpr int DIMS = 8, CHUNKS = 1;
    DEVICE static Pack load(const uint8_t* p) { return ld_once_v2(p); }
    DEVICE static void pairs(uint32_t (&out)[8], Pack a, Pack b, int) { CacheE4m3::pairs(out, a, b); }
  };
  DEVICE static uint4 query(uint4 bf16x8) {
    float f[8];
    unpack_bf16(f, bf16x8);
    return pack_f16x8(f);
  }
  DEVICE static uint32_t pack(float lo, float hi) { return pack_f16(lo, hi); }
  DEVICE static void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_f16_16816(c, a, b); }
};

template <>
struct CacheE4m3::Values<128> {
  using Pack = uint4;
  static constexpr int DIMS = 16, CHUNKS = 2;
  DEVICE static Pack load(const uint8_t* p) { return ld_once_v4(p); }
  DEVICE static void pairs(uint32_t (&out)[8], Pack a, Pack b, int half) {
    CacheE4m3::pairs(out, half ? make_uint2(a.z, a.w) : make_uint2(a.x, a.y), half ? make_uint2(b.z, b.w) : make_uint2(b.x, b.y));
  }
};

// Keys and values of one KV head.
template <class F>
struct AttnHead {
  const typename F::Element *k, *v;  // [max_len, HD]
  const uint8_t* fine;               // [max_len, FINE], e4m3 only
};
