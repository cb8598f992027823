// links.cu - traffic between ranks, right and wrong. Memory of every rank: word 0 a flag, words 1 … n a payload.
#include "include/reduce.cuh"
#include "include/vec.cuh"

struct Peers {
  uint32_t* rank[8];
};

enum Publish { RELEASE, FENCE, NOTHING };

// Put to the right-hand neighbour: payload, then flag. Takes what the left-hand neighbour put.
template <Publish HOW>
DEVICE void put(uint32_t* out, const uint32_t* in, const Peers& peers, int rank, int world, int n) {
  uint32_t *there = peers.rank[(rank + 1) % world], *here = peers.rank[rank];
  for (int i = threadIdx.x; i < n; i += blockDim.x) st_volatile_u32(there + 1 + i, in[i]);
  __syncthreads();
  if (threadIdx.x == 0) {
    if (HOW == FENCE) __threadfence_system();
    if (HOW == RELEASE)
      st_release_sys_u32(there, 1);
    else
      st_volatile_u32(there, 1);
    while (ld_acquire_sys_u32(here) != 1) {
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = ld_volatile_u32(here + 1 + i);
}
#define PUT(name, HOW) \
  KERNEL(64) void name(uint32_t* out, const uint32_t* in, Peers peers, int rank, int world, int n) { put<HOW>(out, in, peers, rank, world, n); }
PUT(put_released, RELEASE)
PUT(put_fenced, FENCE)
PUT(put_unfenced, NOTHING)

KERNEL(64) void put_plainly(uint32_t* out, const uint32_t* in, Peers peers, int rank, int world, int n) {
  if (int(threadIdx.x) < n) peers.rank[(rank + 1) % world][1 + threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x == 0) out[0] = 0;
}

// The flag only; the value that arrived.
KERNEL(32) void signal_right(uint32_t* out, Peers peers, int rank, int world, uint32_t value) {
  if (threadIdx.x) return;
  st_release_sys_u32(peers.rank[(rank + 1) % world], value);
  uint32_t got;
  do got = ld_acquire_sys_u32(peers.rank[rank]);
  while (got == 0);
  *out = got;
}

// A pack is four words to the memory model: how many of them are there when the first one is?
KERNEL(32) void torn_pack(uint32_t* out, Peers peers, int rank) {
  if (threadIdx.x) return;
  if (rank == 0) {
    st_volatile_v4(peers.rank[1], make_uint4(1, 1, 1, 1));
  } else {
    uint4 v;
    do v = ld_volatile_v4(peers.rank[1]);
    while (!v.x);
    *out = v.x + v.y + v.z + v.w;
  }
}

// A thread sees its own store even while it is under way.
KERNEL(32) void reads_back(uint32_t* out, Peers peers, int rank, int world) {
  uint32_t* there = peers.rank[(rank + 1) % world] + 32 * rank + threadIdx.x;
  st_volatile_u32(there, threadIdx.x + 1);
  out[threadIdx.x] = ld_volatile_u32(there);
}

// Many increments of one counter, none of which may be lost.
KERNEL(32) void count_everywhere(Peers peers, int world) {
  for (int r = 0; r < world; r++) red_release_sys_add_u32(peers.rank[r], 1);
}

// Rank 1 looks at four words, then polls the first two, a bounded number of times; how often it looked.
KERNEL(32) void waits_in_part(uint32_t* looks, Peers peers) {
  if (threadIdx.x) return;
  const uint32_t* words = peers.rank[1];
  for (int i = 0; i < 4; i++) ld_volatile_u32(words + i);
  uint32_t n = 0;
  bool missing = true;
  while (missing && n < 10000) {
    const uint32_t a = ld_volatile_u32(words), b = ld_volatile_u32(words + 1);
    missing = !a || !b;
    n++;
  }
  *looks = n;
}
KERNEL(32) void set_two_words(Peers peers, int first) {
  if (threadIdx.x < 2) st_volatile_u32(peers.rank[1] + first + threadIdx.x, 1);
}
