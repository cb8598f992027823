// wgmma.cpp - products of warpgroups. Each of the four warps computes its own 16 rows, when it waits for the group: exact products,
// summed in double, rounded once.
#include <cstring>

#include "async.h"
#include "race.h"
#include "world.h"

#pragma GCC optimize("O3")

namespace simt {
namespace {

constexpr int MAX_N = 256, MAX_K = 32, BYTES = 32;  // of k

float float_from(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

float widen(Element e, const unsigned char* row, int k) {
  if (e == Element::E4M3) {
    const uint32_t v = row[k], sign = (v & 0x80u) << 24, magnitude = (v & 0x7fu) << 20;
    if ((v & 0x7fu) == 0x7fu) return float_from(sign | 0x7fc00000u);
    return float_from(sign | magnitude) * 0x1p120f;  // the exponent's bias differs by 120; subnormals become normal
  }
  const uint32_t h = uint32_t(row[2 * k]) | uint32_t(row[2 * k + 1]) << 8;
  if (e == Element::BF16) return float_from(h << 16);
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
  if ((h & 0x7c00u) == 0x7c00u) return float_from(sign | 0x7f800000u | magnitude);
  return float_from(sign | magnitude) * 0x1p112f;
}

// What a descriptor names: 16 bytes `piece` of row r. Eight of them are 128 bytes; the next eight, of a transposed operand, lie `apart`.
struct Operand {
  uint32_t start, apart, stride;
  explicit Operand(uint64_t desc)
      : start(uint32_t(desc & 0x3fff) << 4), apart(uint32_t(desc >> 16 & 0x3fff) << 4), stride(uint32_t(desc >> 32 & 0x3fff) << 4) {}
  uint32_t at(int r, int piece) const {
    const uint32_t a = start + uint32_t(piece / 8) * apart + uint32_t(r / 8) * stride + uint32_t(r % 8) * 128 + uint32_t(piece % 8) * 16;
    return a ^ (a >> 7 & 7) << 4;
  }
};

// The first `bytes` of row r.
void read_row(Thread& t, const Operand& o, int r, unsigned char* out, int bytes, Place place) {
  const Block& b = *t.block;
  for (int piece = 0; piece < bytes / 16; piece++) {
    const uint32_t at = o.at(r, piece);
    if (at + 16 > b.launch->smem) fail(place, "wgmma: operand at dynamic shared memory + %u, the launch has %zu", at, b.launch->smem);
    if (world->race) world->race->async(t, b.shared->dyn + at, 16, false, place);
    memcpy(out + 16 * piece, b.shared->dyn + at, 16);
  }
}

// Row r of the warp's 16×16 in registers: lane 4g + t has rows g and g + 8, columns 2t, 2t + 1, and these + 8.
void row_of_registers(const Product& p, int r, float* out) {
  for (int k = 0; k < 16; k++) {
    const uint32_t word = p.a[4 * (r % 8) + k % 8 / 2][r / 8 + 2 * (k / 8)];
    out[k] = float_from(k % 2 ? word & 0xffff0000u : word << 16);
  }
}

void multiply(Warp& w, const Product& p) {
  static float a[16][MAX_K], b[MAX_K][MAX_N];
  static double sum[MAX_N];
  const int N = 2 * p.registers, K = p.element == Element::E4M3 ? 32 : 16, first = int(w.number % 4) * 16;
  unsigned char row[2 * MAX_N];
  const Operand oa(p.desc_a), ob(p.desc_b);
  for (int r = 0; r < 16; r++) {
    if (p.a[0]) {
      row_of_registers(p, r, a[r]);
      continue;
    }
    read_row(w.lanes[0], oa, first + r, row, BYTES, p.place);
    for (int k = 0; k < K; k++) a[r][k] = widen(p.element, row, k);
  }
  if (p.a[0]) {  // and b transposed
    for (int k = 0; k < K; k++) {
      read_row(w.lanes[0], ob, k, row, 2 * N, p.place);
      for (int n = 0; n < N; n++) b[k][n] = widen(p.element, row, n);
    }
  } else {
    for (int n = 0; n < N; n++) {
      read_row(w.lanes[0], ob, n, row, BYTES, p.place);
      for (int k = 0; k < K; k++) b[k][n] = widen(p.element, row, k);
    }
  }
  for (int r = 0; r < 16; r++) {
    memset(sum, 0, sizeof(double) * size_t(N));
    for (int k = 0; k < K; k++) {
      const double x = a[r][k];
      for (int n = 0; n < N; n++) sum[n] += x * double(b[k][n]);
    }
    for (int n = 0; n < N; n++) {
      float& d = p.d[4 * (r % 8) + n % 8 / 2][n / 8 * 4 + r / 8 * 2 + n % 2];
      d = float(sum[n] + (p.accumulate ? double(d) : 0.0));
    }
  }
}

void require_descriptor(uint64_t desc, Place place) {
  if (desc >> 62 != 1) fail(place, "wgmma: the simulator knows descriptors with a swizzle of 128 bytes");
  if ((desc >> 49 & 7) || (desc >> 32 & 0x3fff) != 64) fail(place, "wgmma: a descriptor whose 8 rows are not 1,024 bytes apart");
}

void finish_issue(void* const* operands, uint32_t) {
  Warp& w = *running_thread()->warp;
  Product p{};
  const WgmmaLane& first = *static_cast<const WgmmaLane*>(operands[0]);
  p.registers = first.registers, p.desc_a = first.desc_a, p.desc_b = first.desc_b;
  p.accumulate = first.accumulate, p.element = first.element, p.group = w.groups, p.place = running_thread()->place;
  for (int lane = 0; lane < WARP; lane++) {
    const WgmmaLane& l = *static_cast<const WgmmaLane*>(operands[lane]);
    if (l.desc_a != p.desc_a || l.desc_b != p.desc_b || l.accumulate != p.accumulate)
      fail(p.place, "wgmma: lanes of one warp bring different descriptors");
    p.d[lane] = l.d, p.a[lane] = l.a;
  }
  w.products.push_back(p);
}
void finish_commit(void* const*, uint32_t) { running_thread()->warp->groups++; }
void finish_wait(void* const* operands, uint32_t) {
  Warp& w = *running_thread()->warp;
  const int allowed = *static_cast<const int*>(operands[0]);
  size_t done = 0;
  while (done < w.products.size() && w.products[done].group < w.groups - allowed) multiply(w, w.products[done++]);
  // All lanes know that the operands, read in lane 0's name, have been read.
  if (done && world->race) {
    world->race->modified(w.lanes[0], &w, 1, true, false, w.products[0].place);
    for (int lane = 1; lane < WARP; lane++) world->race->modified(w.lanes[lane], &w, 1, false, true, w.products[0].place);
  }
  w.products.erase(w.products.begin(), w.products.begin() + long(done));
}
constexpr WarpOp ISSUE{"wgmma", finish_issue, false}, COMMIT{"wgmma_commit", finish_commit, false}, WAIT{"wgmma_wait", finish_wait, false};

}  // namespace

void wgmma_issue(const WgmmaLane& lane, Place place) {
  if (running_thread()->block->threads.size() < (running_thread()->warp->number / 4 + 1) * 128u)
    fail(place, "wgmma: the warp is not in a whole warpgroup");
  if (!lane.a) require_descriptor(lane.desc_a, place);
  require_descriptor(lane.desc_b, place);
  if (lane.a && lane.registers > 32 && (lane.desc_b >> 16 & 0x3f)) fail(place, "wgmma: columns that are not whole kilobytes apart");
  WgmmaLane mine = lane;
  collective(0xffffffffu, ISSUE, &mine, place);
}
void wgmma_commit(Place place) { collective(0xffffffffu, COMMIT, nullptr, place); }
void wgmma_wait(int groups, Place place) { collective(0xffffffffu, WAIT, &groups, place); }

}  // namespace simt
