// world.h - the runtime's own structures: threads, warps, blocks, launches, ranks, and the one scheduler over them.
#pragma once
#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "async.h"
#include "fiber.h"
#include "link.h"
#include "memory.h"
#include "runtime.h"
#include "trace.h"

namespace simt {

constexpr int WARP = 32;
constexpr size_t STATIC_SHARED_LIMIT = 48 << 10;

class Race;
struct World;
struct Warp;
struct Block;
struct Launch;

// What a thread last did; meaningless while its bit in Warp::ready is set.
enum class State : uint8_t { RUNNING, BARRIER, COLLECTIVE, POLL, GRID, CLUSTER, DONE };

// A thread's 16 bytes on their way to shared memory, which nobody may see yet.
struct AsyncCopy {
  void* dst;
  uint32_t group;
  unsigned char value[16];
};

// A box on its way from shared to global memory.
struct PendingBox {
  SimTensorMap map;
  int at[5];
  uint32_t src, group;  // offset in dynamic shared memory; how many commits of the thread came before it
  bool add;
  Place place;
};

// What a thread read from where.
struct Poll {
  const char* at;
  unsigned char bytes, value[16];
};

struct Thread : ThreadView {
  Fiber* fiber = nullptr;  // taken when the thread first runs
  Block* block = nullptr;
  Warp* warp = nullptr;
  State state = State::RUNNING;
  uint32_t number = 0;     // within the block, x fastest
  Place place{nullptr, 0};
  // The last polled value: reading it again from the same address puts the thread to sleep.
  const char* poll = nullptr;
  unsigned char poll_bytes = 0, poll_value[16] = {};
  uint64_t poll_progress = 0;
  int poll_repeats = 0;
  // In order only: its latest reads, one an address, and how many reads in a row found what they had found before. A thread that polls
  // several addresses in turn, one a peer, sleeps when it has found all of them as they were.
  std::vector<Poll> polls;
  size_t unchanged = 0;
  bool reads_clock = false;  // its polls have a deadline
  std::vector<AsyncCopy> copies;  // those from `arrived` on are on their way
  size_t arrived = 0;
  uint32_t copy_group = 0;  // the group that is open
  std::vector<PendingBox> stores;  // bulk copies out of shared memory that it has not waited for
  uint32_t store_group = 0;
  bool in_cluster_barrier = false;  // arrived, and has not waited since
  uint32_t cluster_phase = 0;       // in which it arrived
};

struct Collective {
  uint32_t mask = 0, arrived = 0;  // mask 0: the slot is free
  const WarpOp* op = nullptr;
  Place place{nullptr, 0};
  void* operand[WARP];
};

// A product that a warp has issued and not waited for.
struct Product {
  float* d[WARP];
  int registers;
  uint64_t desc_a, desc_b;
  bool accumulate;
  Element element;
  int group;  // how many commits came before it
  Place place;
  const uint32_t* a[WARP];  // or null
};

// A bulk copy that nobody has waited for.
struct PendingCopy {
  SimTensorMap map;
  int at[5];
  uint32_t dst;  // offset in dynamic shared memory
  uint64_t* bar;
};

struct NamedBarrier {
  int expected = 0, arrived = 0;
  std::vector<Thread*> waiting;
  std::vector<std::shared_ptr<const Clock>> gone;  // for the race checker: what those knew that have arrived and do not wait
};

struct Warp {
  Block* block = nullptr;
  uint32_t number = 0;    // within the block
  Thread* lanes = nullptr;  // the block's threads from this warp's first on
  uint32_t live = 0, ready = 0;  // lanes that have not returned; lanes that can run
  uint32_t epoch = 0;     // __syncwarps so far
  uint32_t in_use = 0;    // bit i: pending[i] is active
  std::array<Collective, WARP> pending;
  int groups = 0;  // of products, committed
  std::vector<Product> products;
};

struct Cluster {
  std::vector<Block*> blocks;  // by rank; null once it has returned
  uint32_t live = 0, pending = 0, phase = 0;  // threads that have not returned; of these, not arrived; barriers passed
  std::vector<Thread*> waiting;
};

struct Block : BlockView {
  Launch* launch = nullptr;
  uint32_t uid = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  uint32_t live = 0, exited = 0;
  uint32_t ready_warps = 0, last_warp = 0;  // warps with ready lanes; the one that ran last
  size_t ready_at = 0;                      // index in Rank::ready while any warp is
  // The barrier that is being gathered.
  uint32_t arrived = 0;
  Place barrier_place{nullptr, 0};
  int vote_or = 0, vote_and = 1, vote_count = 0, vote_result = 0;
  uint32_t epoch = 0;  // barriers passed
  bool triggered = false;  // griddepcontrol.launch_dependents
  std::array<NamedBarrier, 16> named;
  std::vector<PendingCopy> copies;
  SharedSlot* shared = nullptr;
  std::vector<SharedVar> vars;
  std::shared_ptr<Cluster> cluster;
  uint32_t cluster_rank = 0;
  char* statics_next = nullptr;
};

struct Argument {
  const char* name;
  const char* begin;  // the view that was passed: [begin, begin + bytes); null for values
  size_t bytes;
};

// One queued operation of a rank's stream: a kernel launch, or a copy or fill when `entry` is null.
struct Launch {
  const Entry* entry = nullptr;
  int rank = 0;
  uint32_t seq = 0;  // position in the rank's stream, from 1
  Index3 grid{1, 1, 1}, block{1, 1, 1};
  size_t smem = 0;
  uint32_t cluster = 1;  // blocks a cluster, along x
  bool dependent = false;  // programmatic dependent launch
  std::vector<unsigned char> values;
  std::vector<void*> args;
  std::vector<Argument> arguments;
  std::vector<uint32_t> order;  // first blocks of clusters in the order in which they start
  size_t next_cluster = 0;
  uint32_t resident = 0, finished = 0, triggers = 0;
  uint32_t resident_limit = 1;  // how many blocks may be on the device at once
  bool complete = false, previous_complete = true;
  bool waited = false;  // some thread executed griddepcontrol.wait
  // copy (from host bytes in `values`) or fill
  char* target = nullptr;
  size_t target_bytes = 0;
  int fill_byte = -1;

  uint32_t blocks() const { return grid.x * grid.y * grid.z; }
};

struct Rank {
  std::vector<Block*> ready;  // those with ready warps
  std::vector<Thread*> yielded;               // in order: run when nobody else can
  std::vector<Thread*> parked;                // threads of any rank that poll this rank's memory
  std::deque<std::unique_ptr<Launch>> queue;  // not started
  std::vector<std::unique_ptr<Launch>> active;  // oldest first; more than one only with dependent launch
  uint32_t launched = 0, completed = 0;       // sequence numbers
  uint32_t weight = 1;                        // share of the scheduler's attention
  std::vector<Thread*> grid_waiters;          // in griddepcontrol.wait
};

struct Options {
  uint64_t seed = 0;
  bool random = false;       // false: in order, one block at a time
  bool weak_links = false;   // stores to other ranks may be delayed and reordered
  bool weak_local = false;   // volatile stores to the own rank too
  bool adversary = true;     // seed-chosen strategy; false: uniform
  bool race = false;         // vector clocks (kernels must be compiled with -fsanitize=thread)
  size_t trace = 0;            // events to remember
  size_t rank_bytes = size_t(4) << 30;
};

// xorshift64*: all of a schedule's randomness.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0x1234567) {
    for (int i = 0; i < 4; i++) next();
  }
  uint32_t next() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return uint32_t(state_ * 0x2545F4914F6CDD1Dull >> 32);
  }
  uint32_t below(uint32_t n) { return uint32_t(uint64_t(next()) * n >> 32); }
  // A random set bit of a non-empty mask.
  uint32_t bit(uint32_t mask) {
    for (uint32_t skip = below(uint32_t(__builtin_popcount(mask))); skip; skip--) mask &= mask - 1;
    return uint32_t(__builtin_ctz(mask));
  }

 private:
  uint64_t state_;
};

struct World {
  World(int ranks, const Options& options);
  ~World();

  // ---- from the host
  void enqueue(std::unique_ptr<Launch> launch);
  // Runs until nothing can run; false: the world has failed. `waiting`: the host needs it to finish, so deadlines may pass.
  bool advance(bool waiting);
  void host_synced(int rank);
  bool rank_idle(int rank) const { return ranks[size_t(rank)].active.empty() && ranks[size_t(rank)].queue.empty(); }

  // ---- scheduling (scheduler.cpp, stream.cpp)
  Thread* pick();
  Thread* take_ready();
  void make_ready(Thread* t) { make_ready(*t->warp, 1u << t->lane); }
  void make_ready(Warp& w, uint32_t lanes);
  Thread* take(Rank& r, Block* b, uint32_t warp, uint32_t lane);
  void switch_to(Thread* next);            // from the running thread
  void suspend(State state, Place place);  // the running thread; returns when it is scheduled again
  void yield_now();
  bool resume_yielded();
  Thread* thread_done(Thread* t);          // the running thread has returned; what to run next
  bool start_more(bool beyond_width);
  bool start_next_launch(Rank& rank);
  void start_cluster(Launch& launch);
  Block* start_block(Launch& launch, uint32_t index);
  void finish_block(Block* b);
  void block_triggered(Block* b);
  void launch_complete(Rank& rank, Launch& launch);
  void wake(const char* begin, size_t bytes);
  bool wake_parked(bool all);
  int rounds_left();
  bool memory_changed(const Thread& t) const;
  bool polls_in(const Thread& t, const char* begin, size_t bytes) const;
  void park(Place place);                  // the running thread, until what it polls changes

  // ---- failure (report.cpp)
  [[noreturn]] void fail_now(Place place, const std::string& what);
  void fail_elsewhere(const std::string& what);
  std::string stuck() const;
  std::string who(const Thread& t) const;
  std::string where(const void* p, const Launch* launch) const;

  Options options;
  Random random;
  Memory memory;
  SharedPool shared;
  std::vector<Rank> ranks;
  Links links;
  std::unique_ptr<Race> race;
  std::unique_ptr<Trace> trace;
  Fiber main;
  std::vector<std::unique_ptr<Block>> running;
  std::vector<std::unique_ptr<Block>> spare;
  std::string error;
  bool failed = false;
  bool may_start = false;  // a block or launch may have become startable
  uint64_t steps = 0, switches = 0, progress = 0, wake_mark = ~0ull;
  uint64_t yield_mark = ~0ull;
  uint64_t leapt_ns = 0;
  bool host_waits = false;
  int wake_rounds = 0;
  uint32_t width = 1;       // blocks that a rank likes to keep resident
  uint32_t next_uid = 0;
  uint32_t chance_load = 0, chance_store = 0;  // of giving way after a poll or a store, of 2^32
};

extern World* world;  // the one that is running
inline Thread* running_thread() { return static_cast<Thread*>(current); }

inline void World::switch_to(Thread* next) {
  Fiber& from = *running_thread()->fiber;
  switches++;
  current = next;
  if (next && !next->fiber) next->fiber = fiber_take();
  fiber_switch(from, next ? *next->fiber : main);
}

void cluster_left(const Thread& t);

// Signals that kernel code raised become failures of the world (fault.cpp).
void faults_install();
void faults_remove();

}  // namespace simt
