// clusters.cu - blocks that push to each other: one kernel that is right, and its mistakes; tests/simt/test_clusters.py says what each shows.
// block: 32; dynamic shared memory: a float4 a block of the cluster, a float2, the push barrier.
#include "include/vec.cuh"

struct Mailbox {
  float4 slot[8];
  float2 pair;
  uint64_t barrier;
};

enum Mistake { NONE, EARLY_PUSH, NO_WAIT, ARRIVES_TWICE, WAITS_FIRST, NEVER_ARRIVES, PEER_RETURNED, STATIC_SHARED, NO_BARRIER, NO_PEER, TOO_FEW };

// out[block] = the sum of what all blocks of its cluster pushed: 1 + their index in the grid. Blocks whose bit is set in `leave` return at once.
template <Mistake M>
DEVICE void sum_cluster(float* out, int cluster, int leave) {
  DYN_SHARED(Mailbox, box);
  SHARED(float4[8], wrong);
  const int rank = cluster_rank(), t = threadIdx.x;
  if (t == 0 && M != NO_BARRIER) push_init(&box->barrier);
  __syncwarp();
  if (M == WAITS_FIRST) cluster_wait();
  if (M != NEVER_ARRIVES || rank) cluster_arrive();
  if (M == ARRIVES_TWICE) cluster_arrive();
  if (leave >> rank & 1) return;
  if (M != EARLY_PUSH) cluster_wait();
  const int staying = cluster - __popc(leave);
  const float4 v = make_float4(float(blockIdx.x + 1), 0.f, 0.f, 0.f);
  for (int to = t; to < cluster + (M == NO_PEER); to += 32)
    if (!(leave >> to & 1) || M == PEER_RETURNED) push_f4(M == STATIC_SHARED ? &wrong[rank] : &box->slot[rank], to, v, &box->barrier);
  if (t == 0) push_expect(&box->barrier, staying * (M == TOO_FEW ? 8 : 16));
  if (M != NO_WAIT)
    while (!push_arrived(&box->barrier)) continue;
  float sum = 0.f;
  for (int from = 0; from < cluster; from++)
    if (!(leave >> from & 1)) sum += box->slot[from].x;
  if (t == 0) out[blockIdx.x] = sum;
}
#define CLUSTER_SUMS(name, mistake) \
  KERNEL(32) void name(float* out, int cluster, int leave) { sum_cluster<mistake>(out, cluster, leave); }
CLUSTER_SUMS(cluster_sums, NONE)
CLUSTER_SUMS(early_push, EARLY_PUSH)
CLUSTER_SUMS(no_wait, NO_WAIT)
CLUSTER_SUMS(arrives_twice, ARRIVES_TWICE)
CLUSTER_SUMS(waits_first, WAITS_FIRST)
CLUSTER_SUMS(never_arrives, NEVER_ARRIVES)
CLUSTER_SUMS(peer_returned, PEER_RETURNED)
CLUSTER_SUMS(static_shared, STATIC_SHARED)
CLUSTER_SUMS(no_barrier, NO_BARRIER)
CLUSTER_SUMS(no_peer, NO_PEER)
CLUSTER_SUMS(too_few, TOO_FEW)

// The barrier over and over, some threads gone; out[block] = 1 if every block of the cluster had come to each round before it went on.
KERNEL(64) void barrier_rounds(uint32_t* out, uint32_t* rounds, int cluster, int count) {
  const int first = blockIdx.x / cluster * cluster;
  bool in_step = true;
  if (threadIdx.x >= 40) return;
  for (int r = 1; r <= count; r++) {
    if (threadIdx.x == 0) st_volatile_u32(rounds + blockIdx.x, r);
    __syncwarp(threadIdx.x < 32 ? 0xffffffffu : 0xffu);
    cluster_arrive();
    cluster_wait();
    for (int b = 0; b < cluster; b++) in_step = in_step && int(ld_volatile_u32(rounds + first + b)) >= r;
  }
  if (threadIdx.x == 0) out[blockIdx.x] = in_step;
}
