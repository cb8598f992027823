// ptx.cuh - all inline PTX of the project, one wrapper per instruction, one line of why. sim/ptx_cpu.h holds the CPU twins:
// the same names and signatures, so a kernel never knows which of the two it was compiled against.
#pragma once
#include "common.cuh"

// Where a tensor lies, the box that one copy takes from it, and how the box is swizzled: CUtensorMap on a GPU, SimTensorMap
// (sim/async.h) in the simulator. Device.tensor_map() makes it; a kernel takes it as `BY_VALUE TensorMap map`.
struct alignas(64) TensorMap { uint64_t words[16]; };

#if defined(__CUDACC__)

// ---- loads and stores --------------------------------------------------------------------------------------------
// Weights: read once a token, so they take no room in L1.
DEVICE uint4 ld_stream_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// Data another thread of the same grid may just have written: never through the read-only path.
DEVICE uint4 ld_global_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE float2 ld_global_f2(const void* p) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE float4 ld_global_f4(const void* p) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
// Keys and values: read once, so keep them out of L1; written by an earlier kernel, so not through the read-only path.
DEVICE uint4 ld_once_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE uint2 ld_once_v2(const void* p) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE uint32_t ld_once_u32(const void* p) {
  uint32_t v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Ask for a stretch of memory to be brought into L2, without waiting and without a register: keeps HBM busy while a block waits for
// another kernel or GPU. p and bytes are multiples of 16. Nothing before sm_90, where it would only be a hint too.
DEVICE void prefetch_l2(const void* p, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}
// 16 bytes from global to shared memory without a register, past L1; the hint fetches the whole 128-byte line, of which a warp wants all.
// `there` false: zeros, and src is not read. The thread that asked may read them after cp_async_wait, others of its warp after a barrier too.
DEVICE void cp_async_v4(void* dst, const void* src, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(dst))), "l"(src), "r"(there ? 16 : 0) : "memory");
}
// Closes a group of copies; cp_async_wait<N> returns when all but the last N groups of this thread have arrived.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Polls and pushes between ranks: volatile is relaxed at system scope, and the compiler may neither drop nor merge it.
DEVICE uint32_t ld_volatile_u32(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void st_volatile_u32(uint32_t* p, uint32_t v) { asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE uint4 ld_volatile_v4(const void* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE void st_volatile_v4(void* p, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE uint2 ld_volatile_v2(const void* p) {
  uint2 v;
  asm volatile("ld.volatile.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE void st_volatile_v2(void* p, uint2 v) { asm volatile("st.volatile.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory"); }
DEVICE void st_volatile_u64(uint64_t* p, uint64_t v) { asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
// Flags between ranks: release publishes everything this thread has written or observed, acquire is its other half.
DEVICE void st_release_sys_u32(uint32_t* p, uint32_t v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE uint32_t ld_acquire_sys_u32(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// The host's id ring: one 8-byte store, so that the host never sees half a word.
DEVICE void st_release_sys_u64(uint64_t* p, uint64_t v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE void red_release_sys_add_u32(uint32_t* p, uint32_t v) { asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// Last-block combine: counts arrivals and wraps to 0 after `wrap` of them, so that the counter resets itself for the next replay;
// acq_rel at GPU scope orders the partials written before the block's barrier with the last block's reads after it.
DEVICE uint32_t atom_inc_acq_rel_gpu(uint32_t* p, uint32_t wrap) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(wrap) : "memory");
  return old;
}

// ---- programmatic dependent launch (sm_90+; elsewhere the launch is an ordinary one and there is nothing to wait for) -----
// Until this returns, nothing that the previous kernel in the stream wrote may be read.
DEVICE void griddep_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The same once `addresses`, or'ed, are in registers. ptxas moves the bare wait up and computes them behind it, on the way from the previous
// kernel's end to the first load; a wait that is predicated on them has to come after them. Not zero.
DEVICE void griddep_wait_with(uint64_t addresses) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %0, 0;\n@p griddepcontrol.wait;\n}" ::"l"(addresses) : "memory");
#endif
}
// Lets the next kernel's blocks start as soon as every block of this one has said so (or has ended).
DEVICE void griddep_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// The address, or number, is a value in a register of each thread from here on: neither recomputed where it is used, nor, where all threads' are equal,
// turned into a uniform one, which makes the thread wait for what it depends on.
template <class T>
DEVICE void settle(T*& p) { asm volatile("" : "+l"(p)); }
DEVICE void settle(int& x) { asm volatile("" : "+r"(x)); }

// ---- clusters (sm_90+): blocks of one launch that run together and push into each other's shared memory. Never called elsewhere. ----------
// This block's place in its cluster.
DEVICE uint32_t cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
// The cluster's barrier in two halves, for every thread that has not returned. Relaxed: an arrival that releases waits for all stores of the
// thread to be performed in L2, which takes longer than what it is for. It orders nothing but push_init.
DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// A push barrier (an mbarrier, used once) counts the bytes that arrive in its block. One thread makes it before it arrives at the cluster's
// barrier: nobody may push before that barrier is passed.
DEVICE void push_init(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(uint32_t(__cvta_generic_to_shared(barrier))) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// The same thread says how many bytes will come, at any time.
DEVICE void push_expect(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(uint32_t(__cvta_generic_to_shared(barrier))), "r"(bytes) : "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
// The address of the same place in the shared memory of the cluster's block `rank`.
static DEVICE uint32_t in_cluster(const void* p, uint32_t rank) {
  uint32_t to;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(uint32_t(__cvta_generic_to_shared(p))), "r"(rank));
  return to;
}
#endif
// *p = v in block `rank`, counted there: a store without an answer, a third of the latency of a store, a fence and a barrier.
DEVICE void push_f4(float4* p, uint32_t rank, float4 v, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(in_cluster(p, rank)), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w), "r"(in_cluster(barrier, rank))
               : "memory");
#endif
}
DEVICE void push_f2(float2* p, uint32_t rank, float2 v, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(in_cluster(p, rank)), "f"(v.x), "f"(v.y),
               "r"(in_cluster(barrier, rank))
               : "memory");
#endif
}
DEVICE void push_f1(float* p, uint32_t rank, float v, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(in_cluster(p, rank)), "f"(v), "r"(in_cluster(barrier, rank)) : "memory");
#endif
}
// Whether all expected bytes are there; if so, they are visible to this thread.
DEVICE bool push_arrived(uint64_t* barrier) {
  uint32_t done = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(uint32_t(__cvta_generic_to_shared(barrier)))
               : "memory");
#endif
  return done;
}

// ---- arithmetic ---------------------------------------------------------------------------------------------------
// 2^x in one MUFU; softmax folds log2(e) into its scale.
DEVICE float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1/x in one MUFU, within an ulp.
DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The two halves of a word: written so, what takes the upper one needs no shift.
DEVICE void split_halves(uint16_t& lo, uint16_t& hi, uint32_t w) { asm("mov.b32 {%0, %1}, %2;" : "=h"(lo), "=h"(hi) : "r"(w)); }
// Two floats → two f16 in a word, to nearest even, past ±65504 to that: one instruction, where clamping takes four more.
DEVICE uint32_t cvt_f16x2_sat(float lo, float hi) {
  uint32_t w;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
  return w;
}
// c[16×8] += a[16×16] · b[16×8], bf16 operands, fp32 accumulators. With g = lane/4, t = lane%4:
// a[0] = (g, 2t..2t+1), a[1] = (g+8, 2t..), a[2] = (g, 2t+8..), a[3] = (g+8, 2t+8..); b[0] = (2t..2t+1, g), b[1] = (2t+8.., g);
// c[0..1] = (g, 2t..2t+1), c[2..3] = (g+8, 2t..2t+1).
DEVICE void mma_bf16_16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same shape and layout with f16 operands.
DEVICE void mma_f16_16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- Hopper: barriers that count bytes, bulk tensor copies, warpgroup products. Other architectures get a trap: launchers choose. ----
#if __CUDA_ARCH__ >= 900
#define SM90_ASM(...) asm volatile(__VA_ARGS__)
#else
#define SM90_ASM(...) asm volatile("trap;")
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SM90A_ASM(...) asm volatile(__VA_ARGS__)
#else
#define SM90A_ASM(...) asm volatile("trap;")
#endif
// The 32-bit address that Hopper's instructions and descriptors take for shared memory.
DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
// An mbarrier's phase ends when `arrivals` threads have arrived and all bytes that were announced have landed. Then one thread of the
// block makes it known to the copy engine with mbarrier_init_fence, and a __syncthreads to the other threads.
DEVICE void mbarrier_init(uint64_t* bar, uint32_t arrivals) {
  SM90_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_init_fence() { SM90_ASM("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arriving releases what the thread has done, e.g. read a buffer that may now be overwritten.
DEVICE void mbarrier_arrive(uint64_t* bar) {
  SM90_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
// Arrives and announces `bytes` that copies will bring in this phase.
DEVICE void mbarrier_arrive_expect_tx(uint64_t* bar, uint32_t bytes) {
  SM90_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
// Whether the phase of this parity (0 for the first) has ended; sleeps a little in hardware before it says no.
DEVICE bool mbarrier_try_wait(uint64_t* bar, uint32_t parity) {
  uint32_t done = 0;
  SM90_ASM("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
           : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
  return done;
}
// One thread copies the map's box from coordinates (x innermost) into shared memory; its bytes, zeros outside the tensor included, are
// counted by `bar`. x begins a whole pack of 16 bytes; dst is 128-byte aligned, 1,024 with a 128-byte swizzle: 16-byte piece i of row r then lies at piece i ^ (r % 8).
DEVICE void tma_load_2d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y) {
  SM90_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
           ::"r"(shared_address(dst)), "l"(&map), "r"(x), "r"(y), "r"(shared_address(bar)) : "memory");
}
DEVICE void tma_load_3d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, int z) {
  SM90_ASM("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
           ::"r"(shared_address(dst)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(bar)) : "memory");
}
// Arrives at the barrier that lies at the same place in block `rank` of the cluster: a buffer of this block's may be overwritten. It publishes
// no ordinary stores to that block: a release at cluster scope waits for a fence.
DEVICE void mbarrier_arrive_at(uint64_t* bar, uint32_t rank) {
  SM90_ASM("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}"
           ::"r"(shared_address(bar)), "r"(rank) : "memory");
}
// One copy for several blocks of the cluster, read once: the box goes to the same place in each block of the mask, and each block's barrier at
// the place of `bar` counts it.
DEVICE void tma_multicast_2d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, uint16_t blocks) {
  SM90_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
           ::"r"(shared_address(dst)), "l"(&map), "r"(x), "r"(y), "r"(shared_address(bar)), "h"(blocks) : "memory");
}
// Fetches the map itself: the first copy that uses it waits for that otherwise.
DEVICE void tma_prefetch(const TensorMap& map) { SM90_ASM("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// One thread copies a box from shared memory (laid out as tma_load_2d does) into the tensor, or adds it to the tensor's fp32 elements; what
// lies behind the tensor is dropped; x, y >= 0. The thread commits, and waits until all but GROUPS groups have been read, before the box is reused.
DEVICE void tma_store_2d(const TensorMap& map, const void* src, int x, int y) {
  SM90_ASM("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x), "r"(y), "r"(shared_address(src)) : "memory");
}
DEVICE void tma_add_2d(const TensorMap& map, const void* src, int x, int y) {
  SM90_ASM("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
           ::"l"(&map), "r"(x), "r"(y), "r"(shared_address(src)) : "memory");
}
DEVICE void bulk_commit() { SM90_ASM("cp.async.bulk.commit_group;" ::: "memory"); }
template <int GROUPS>
DEVICE void bulk_wait_read() {
  SM90_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}
// Between a thread's ordinary stores to shared memory and the barrier behind which the copy engine reads them.
DEVICE void async_fence() { SM90_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }
// A barrier of `threads` (whole warps) of the block; ids 1 to 15, as 0 is __syncthreads.
DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Arrives there without waiting: this thread's part of a hand-over to those that wait.
DEVICE void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Moves registers between warpgroups: every warp of one asks for N a thread (8 to a step); needs a cap at the kernel's entry.
template <int N>
DEVICE void register_increase() {
  SM90A_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void register_decrease() {
  SM90A_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
// Adds two floats to memory without waiting for what was there; each element is added once, so the order is no matter. 8-byte aligned.
DEVICE void red_add_f32x2(float* p, float x, float y) {
  SM90_ASM("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
}
// Products of a warpgroup (4 consecutive warps from a multiple of 4 on): d[64×N] (+)= a[64×k]·b[N×k]ᵀ, both in shared memory, rows of
// 128 swizzled bytes, named by descriptors (include/wgmma.cuh); k is 32 bytes. The thread at lane 4g + t of warp w holds, for column
// tile j: d[4j], d[4j+1] = (16w + g, 8j + 2t), (…, 8j + 2t + 1); d[4j+2], d[4j+3] = the same of row 16w + g + 8. N = 2·REGS.
// Before the first product, and after other code has touched the sums: they are not in flight.
DEVICE void wgmma_fence() { SM90A_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
// What was issued since the last commit is one group.
DEVICE void wgmma_commit() { SM90A_ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when at most GROUPS groups are in flight: the others have read their operands and written their sums.
template <int GROUPS>
DEVICE void wgmma_wait() {
  SM90A_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// Keeps the compiler from moving uses of the sums above the wait.
template <int REGS>
DEVICE void wgmma_results(float (&d)[REGS]) {
#pragma unroll
  for (int i = 0; i < REGS; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Keeps what makes a product's operand in registers above the fence before the product.
template <int REGS>
DEVICE void wgmma_operand(uint32_t (&a)[REGS]) {
#pragma unroll
  for (int i = 0; i < REGS; i++) asm volatile("" : "+r"(a[i])::"memory");
}
#define SM90_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SM90_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SM90_D32(i) SM90_D8(i), SM90_D8(i + 8), SM90_D8(i + 16), SM90_D8(i + 24)
#define SM90_T4 "%0,%1,%2,%3"
#define SM90_T8 SM90_T4 ",%4,%5,%6,%7"
#define SM90_T16 SM90_T8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SM90_T32 SM90_T16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SM90_T56 SM90_T32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"
#define SM90_T64 SM90_T56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define SM90_T72 SM90_T64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define SM90_T80 SM90_T72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define SM90_T96 SM90_T64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SM90_T112 SM90_T96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define SM90_T128 SM90_T112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// The operands behind the sums are numbered from REGS on: a, b, and whether to add to d or to overwrite it.
#define SM90_WGMMA(n, type, tail, sums, a, b, add, ...)                                                                              \
  SM90A_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %" add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n type " {" sums "}, %" a ", %" b      \
            ", p, 1, 1" tail ";\n}"                                                                                                   \
            : __VA_ARGS__ : "l"(desc_a), "l"(desc_b), "r"(accumulate) : "memory")
#define SM90_WGMMA_ANY_N(type, tail)                                                                                                  \
  if constexpr (REGS == 4) SM90_WGMMA("8", type, tail, SM90_T4, "4", "5", "6", SM90_D4(0));                                           \
  else if constexpr (REGS == 8) SM90_WGMMA("16", type, tail, SM90_T8, "8", "9", "10", SM90_D8(0));                                    \
  else if constexpr (REGS == 16) SM90_WGMMA("32", type, tail, SM90_T16, "16", "17", "18", SM90_D8(0), SM90_D8(8));                    \
  else if constexpr (REGS == 32) SM90_WGMMA("64", type, tail, SM90_T32, "32", "33", "34", SM90_D32(0));                               \
  else if constexpr (REGS == 56) SM90_WGMMA("112", type, tail, SM90_T56, "56", "57", "58", SM90_D32(0), SM90_D8(32), SM90_D8(40), SM90_D8(48));\
  else if constexpr (REGS == 64) SM90_WGMMA("128", type, tail, SM90_T64, "64", "65", "66", SM90_D32(0), SM90_D32(32));                \
  else if constexpr (REGS == 72) SM90_WGMMA("144", type, tail, SM90_T72, "72", "73", "74", SM90_D32(0), SM90_D32(32), SM90_D8(64));    \
  else if constexpr (REGS == 80)                                                                                                      \
    SM90_WGMMA("160", type, tail, SM90_T80, "80", "81", "82", SM90_D32(0), SM90_D32(32), SM90_D8(64), SM90_D8(72));                   \
  else if constexpr (REGS == 96) SM90_WGMMA("192", type, tail, SM90_T96, "96", "97", "98", SM90_D32(0), SM90_D32(32), SM90_D32(64));  \
  else if constexpr (REGS == 112)                                                                                                     \
    SM90_WGMMA("224", type, tail, SM90_T112, "112", "113", "114", SM90_D32(0), SM90_D32(32), SM90_D32(64), SM90_D8(96), SM90_D8(104)); \
  else {                                                                                                                              \
    static_assert(REGS == 128, "N is 8, 16, 32, 64, 112, 128, 144, 160, 192, 224 or 256");                                                                  \
    SM90_WGMMA("256", type, tail, SM90_T128, "128", "129", "130", SM90_D32(0), SM90_D32(32), SM90_D32(64), SM90_D32(96));             \
  }
// k = 16 bf16.
template <int REGS>
DEVICE void wgmma_bf16(float (&d)[REGS], uint64_t desc_a, uint64_t desc_b, int accumulate) {
  SM90_WGMMA_ANY_N("k16.f32.bf16.bf16", ", 0, 0")
}
// k = 16 f16.
template <int REGS>
DEVICE void wgmma_f16(float (&d)[REGS], uint64_t desc_a, uint64_t desc_b, int accumulate) {
  SM90_WGMMA_ANY_N("k16.f32.f16.f16", ", 0, 0")
}
// k = 32 e4m3; the tensor core keeps about 14 bits of the sums' significand while it adds.
template <int REGS>
DEVICE void wgmma_e4m3(float (&d)[REGS], uint64_t desc_a, uint64_t desc_b, int accumulate) {
  SM90_WGMMA_ANY_N("k32.f32.e4m3.e4m3", "")
}
// d[64×N] += a[64×16]·b[16×N]: a in registers, as mma_bf16_16816 has the 16 rows of the warp, which stay as they are until the product has been waited for;
// b's rows lie along N (wgmma_columns). Products of what registers hold need no way through shared memory.
#define SM90_WGMMA_ROWS(n, sums, a0, a1, a2, a3, b, ...)                                                                             \
  SM90A_ASM("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" sums "}, {%" a0 ",%" a1 \
            ",%" a2 ",%" a3 "}, %" b ", p, 1, 1, 1;\n}"                                                                              \
            : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b) : "memory")
template <int REGS>
DEVICE void wgmma_bf16_rows(float (&d)[REGS], const uint32_t (&a)[4], uint64_t desc_b) {
  static_assert(REGS == 32 || REGS == 64, "N is 64 or 128");
  if constexpr (REGS == 32) SM90_WGMMA_ROWS("64", SM90_T32, "32", "33", "34", "35", "36", SM90_D32(0));
  else SM90_WGMMA_ROWS("128", SM90_T64, "64", "65", "66", "67", "68", SM90_D32(0), SM90_D32(32));
}
// Transposes an 8×8 matrix of 16-bit elements over the warp: lane 4g + t gives elements (g, 2t) and (g, 2t + 1), takes (2t, g) and (2t + 1, g).
DEVICE uint32_t movmatrix_trans(uint32_t v) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
// Four 8×8 matrices of 16-bit elements into shared memory: lane 8i + r names row r of matrix i, 16 bytes; lane 4g + t brings (g, 2t) and
// (g, 2t + 1) of matrix i in w[i]. A product's sums lie like that.
DEVICE void stmatrix_x4(void* row, const uint32_t (&w)[4]) {
  SM90_ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}

// ---- time and failure -----------------------------------------------------------------------------------------------
// Nanoseconds on a clock that all SMs share; ticks coarsely, good enough for a poll's deadline.
DEVICE uint64_t global_timer_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
// Ends the whole launch with an error the host sees: the answer to a poll that outlived its deadline.
DEVICE void trap() { asm volatile("trap;"); }

#else
#include "../sim/ptx_cpu.h"
#endif
