// peers.cuh - what every kernel that talks to a peer shares: peer pointers, polls with a deadline, sums in rank order.
#pragma once
#include "vec.cuh"

constexpr int MAX_RANKS = 8;

// Every rank's buffer of one kind, by rank, as this rank addresses it; passed by value.
struct Peers {
  uint64_t base[MAX_RANKS];
  DEVICE uint4* packs(int rank) const { return reinterpret_cast<uint4*>(base[rank]); }
  DEVICE uint32_t* words(int rank) const { return reinterpret_cast<uint32_t*>(base[rank]); }
};

// How long a poll may last, and where to say which peer did not answer; passed by value. ns = 0: no limit.
struct PollLimit {
  uint64_t ns;
  uint64_t fault;  // address of 4 words that the host can read: {1 + rank that waits, 1 + peer waited for, call (twoshot: barrier), unused}
};

// Polls after which a thread that waits for another of its own rank takes it for missing: at least 5 s.
constexpr uint32_t LOCAL_POLLS = 1u << 24;

// Says who gave up on whom, and ends the launch. The fence: a trap completes no stores.
DEVICE void give_up(const PollLimit& limit, int rank, int peer, uint32_t call) {
  uint32_t* fault = reinterpret_cast<uint32_t*>(limit.fault);
  st_volatile_u32(fault + 1, uint32_t(peer) + 1);
  st_volatile_u32(fault + 2, call);
  st_release_sys_u32(fault, uint32_t(rank) + 1);
  __threadfence_system();
  trap();
}

// One thread's watch over its polls. The clock is read every 1,024th poll only: it is far slower than a poll.
struct Watch {
  uint64_t until = 0;
  uint32_t polls = 0;
};
// One more unsuccessful poll: gives up when the time is over.
DEVICE void watch_poll(Watch& w, const PollLimit& limit, int rank, int peer, uint32_t call) {
  if (limit.ns == 0 || ++w.polls % 1024 != 1) return;
  const uint64_t now = global_timer_ns();
  if (w.until == 0) w.until = now + limit.ns;
  if (now >= w.until) give_up(limit, rank, peer, call);
}

// Eight bf16 added to eight fp32 sums.
DEVICE void add_pack(float (&sum)[8], uint4 v) {
  float f[8];
  unpack_bf16(f, v);
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] += f[i];
}
// The sum of a pack over ranks, in rank order from +0: every rank holds the same bits. Sources beyond the world must be zero.
template <int RANKS>
DEVICE void sum_sources(float (&sum)[8], const uint4 (&v)[RANKS]) {
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = 0.f;
#pragma unroll
  for (int s = 0; s < RANKS; s++) add_pack(sum, v[s]);
}

// Where sums go. aim() before griddep_wait. fetch() after it: what it reads arrives while the thread waits for its peers.
struct Replace {  // as bf16
  uint4* out;
  uint4* at;
  DEVICE void aim(int pack) { at = out + pack, settle(at); }
  DEVICE void fetch() {}
  DEVICE void store(const float (&sum)[8]) const { *at = pack_bf16x8(sum); }
};
struct Accumulate {  // added to the fp32 residual stream
  float* h;
  float4* at;
  float4 a, b;
  DEVICE void aim(int pack) { at = reinterpret_cast<float4*>(h + 8 * int64_t(pack)), settle(at); }
  DEVICE void fetch() { a = ld_global_f4(at), b = ld_global_f4(at + 1); }
  DEVICE void add(float (&sum)[8]) const {
    const float old[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = old[i] + sum[i];
  }
  DEVICE void put(const float (&v)[8]) const { at[0] = make_float4(v[0], v[1], v[2], v[3]), at[1] = make_float4(v[4], v[5], v[6], v[7]); }
  DEVICE void store(float (&sum)[8]) const {
    add(sum);
    put(sum);
  }
};
