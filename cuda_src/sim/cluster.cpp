// cluster.cpp - clusters: blocks of a launch that start together, meet in a barrier of their own, and reach each other's shared memory.
#include "world.h"

namespace simt {
namespace {

// A block that was launched without clusters is a cluster of its own.
Cluster& cluster_of(Block* b) {
  if (!b->cluster) {
    b->cluster = std::make_shared<Cluster>();
    b->cluster->blocks = {b};
    b->cluster->live = b->cluster->pending = b->live;
  }
  return *b->cluster;
}

void complete(Cluster& c) {
  c.phase++;
  c.pending = c.live;
  world->progress++;
  std::vector<Thread*> waiting;
  waiting.swap(c.waiting);
  for (Thread* t : waiting) world->make_ready(t);
}

}  // namespace

uint32_t cluster_rank() { return running_thread()->block->cluster_rank; }

void cluster_arrive(Place place) {
  Thread* t = running_thread();
  Cluster& c = cluster_of(t->block);
  t->place = place;
  if (t->in_cluster_barrier) world->fail_now(place, "cluster_arrive: the thread has arrived already and not waited since");
  t->in_cluster_barrier = true;
  t->cluster_phase = c.phase;
  if (--c.pending == 0) complete(c);
  if (world->options.random) world->yield_now();
}

void cluster_wait(Place place) {
  Thread* t = running_thread();
  if (!t->in_cluster_barrier) world->fail_now(place, "cluster_wait: the thread has not arrived");
  Cluster& c = cluster_of(t->block);
  while (c.phase == t->cluster_phase) {
    c.waiting.push_back(t);
    world->suspend(State::CLUSTER, place);
  }
  t->in_cluster_barrier = false;
}

// A thread that has returned is not waited for.
void cluster_left(const Thread& t) {
  Cluster* c = t.block->cluster.get();
  if (!c) return;
  c->live--;
  if (!(t.in_cluster_barrier && t.cluster_phase == c->phase) && --c->pending == 0 && c->live) complete(*c);
}

void* cluster_peer(const void* p, size_t bytes, uint32_t rank, Place place) {
  Block* b = running_thread()->block;
  Cluster& c = cluster_of(b);
  const char* at = static_cast<const char*>(p);
  const size_t smem = b->launch->smem;
  if (at < b->shared->dyn || at + bytes > b->shared->dyn + smem)
    fail(place, "a push must go to dynamic shared memory, where the block's own copy of the place is given");
  if (rank >= c.blocks.size()) fail(place, "a push to block %u of a cluster of %zu", rank, c.blocks.size());
  Block* peer = c.blocks[rank];
  if (!peer) fail(place, "a push to block %u of the cluster, which has returned", rank);
  if (c.phase == 0) fail(place, "a push before the cluster's first barrier: block %u may not have started", rank);
  return peer->shared->dyn + (at - b->shared->dyn);
}

}  // namespace simt
