// choose.cuh - the choice of the next id: candidates, their maximum over a launch, and the state that moves on. Definitions: sample.cu.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"

constexpr uint32_t BAD_ID = 0xffffffffu;

// One decode state, written by the host before a request and advanced here.
struct DecodeState {
  int32_t token;  // the id that the next step embeds
  int32_t pos;    // its position
  uint32_t step;  // ids chosen so far in this request
  uint32_t calls; // choices that ranks have made together
};
struct SampleParams {
  float temperature;  // 0: greedy
  uint32_t seed_lo, seed_hi;
  int32_t text_vocab;
};

DEVICE uint32_t mul_hi(uint32_t a, uint32_t b) { return uint32_t((uint64_t(a) * b) >> 32); }

// First output word of Philox4x32-10.
DEVICE uint32_t philox(uint32_t c0, uint32_t c1, uint32_t k0, uint32_t k1) {
  uint32_t c2 = 0, c3 = 0;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const uint32_t h0 = mul_hi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = mul_hi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c0;
}

DEVICE float gumbel(uint32_t r) {
  const float u = (float(r >> 9) + 0.5f) * 1.1920928955078125e-7f;  // 2^-23: u is never 0 or 1
  return -logf(-logf(u));
}

// A float and its row in one word that orders as (value, then lowest row): the largest word wins; what is not finite outranks everything.
DEVICE uint64_t rank_of(float x, uint32_t row) {
  const uint32_t b = __float_as_uint(x + 0.f);  // -0 equals +0: the lower row wins
  const uint32_t key = (b & 0x7f800000u) == 0x7f800000u ? 0xffffffffu : (b & 0x80000000u) ? ~b : b | 0x80000000u;
  return uint64_t(key) << 32 | uint32_t(~row);
}
DEVICE uint64_t rank_max(uint64_t a, uint64_t b) { return a > b ? a : b; }

// Largest rank and sum of hashes over the block, in thread 0.
DEVICE void block_best(uint64_t& rank, uint32_t& hash, uint64_t* ranks, uint32_t* hashes) {
#pragma unroll
  for (int m = WARP / 2; m; m >>= 1) {
    rank = rank_max(rank, __shfl_xor_sync(FULL_MASK, (unsigned long long)rank, m));
    hash += __shfl_xor_sync(FULL_MASK, hash, m);
  }
  if (threadIdx.x % WARP == 0) ranks[threadIdx.x / WARP] = rank, hashes[threadIdx.x / WARP] = hash;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < int(blockDim.x) / WARP; i++) rank = rank_max(rank, ranks[i]), hash += hashes[i];
}

struct ChoiceShared {
  uint64_t ranks[WARP];
  uint32_t hashes[WARP];
  uint32_t arrived;
};

// Row v and its logit x join a thread's best and its hash.
DEVICE void consider(uint64_t& rank, uint32_t& hash, float x, uint32_t v, const SampleParams& p, uint32_t position) {
  hash += (__float_as_uint(x) ^ v * 0x9E3779B1u) * 0x85EBCA6Bu;  // a sum, so that the order of blocks does not matter
  rank = rank_max(rank, rank_of(p.temperature == 0.f ? x : x / p.temperature + gumbel(philox(v, position, p.seed_lo, p.seed_hi)), v));
}

// The maximum and the sum over the launch. True in the last block to arrive, whose thread 0 has them.
DEVICE bool best_of_grid(uint64_t& rank, uint32_t& hash, uint64_t* best, uint32_t* counter, ChoiceShared& sh) {
  block_best(rank, hash, sh.ranks, sh.hashes);
  if (threadIdx.x == 0) {
    best[2 * blockIdx.x] = rank;
    best[2 * blockIdx.x + 1] = hash;
    sh.arrived = atom_inc_acq_rel_gpu(counter, gridDim.x - 1);
  }
  __syncthreads();
  if (sh.arrived != gridDim.x - 1) return false;
  rank = 0, hash = 0;
  for (int i = threadIdx.x; i < int(gridDim.x); i += blockDim.x) rank = rank_max(rank, best[2 * i]), hash += uint32_t(best[2 * i + 1]);
  block_best(rank, hash, sh.ranks, sh.hashes);
  return true;
}

// By one thread: the state moves on, and the host is told.
DEVICE void commit(DecodeState* state, uint64_t* ring, int slots, uint64_t rank, uint32_t hash) {
  const uint32_t id = uint32_t(rank >> 32) == 0xffffffffu ? BAD_ID : ~uint32_t(rank), step = state->step;
  state->token = id == BAD_ID ? 0 : int32_t(id);  // steps already queued must still read a real row
  state->pos += 1;
  state->step = step + 1;
  uint64_t* slot = ring + 2 * (step % uint32_t(slots));
  st_volatile_u64(slot, uint64_t(hash) << 32 | id);
  st_release_sys_u64(slot + 1, uint64_t(step) + 1);
}
