// ptx.cuh - all inline PTX of the project, one wrapper per instruction, one line of why. sim/ptx_cpu.h holds the CPU twins:
// the same names and signatures, so a kernel never knows which of the two it was compiled against.
#pragma once
#include "common.cuh"
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
DEVICE float4 ld_global_f4(const void* p) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
// Ask for a stretch of memory to be brought into L2, without waiting and without a register: keeps HBM busy while a kernel waits for the
// previous one. p and bytes are multiples of 16. Nothing before sm_90, where it would only be a hint too.
DEVICE void prefetch_l2(const void* p, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
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
// Lets the next kernel's blocks start as soon as every block of this one has said so (or has ended).
DEVICE void griddep_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- arithmetic ---------------------------------------------------------------------------------------------------
// 2^x in one MUFU; softmax folds log2(e) into its scale.
DEVICE float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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
