// gemv_exchange_fp8.cu - decode's row-parallel products with e4m3 weights, the sum over ranks inside. Protocol, PRECONDs: include/exchange.cuh.
//
// gemv_exchange_fp8  h[N] += Σ_r s_r[N]·(W_r[N,K]·x_r[K])   O-projection, down-projection
// Layout, grid, block, PRECONDs of the product, and its variants: gemv_fp8.cu. bytes moved: as there, and 4·N·(world - 1) over the
// link each way. minimum arch: sm_80
#include "include/exchange.cuh"
#include "include/gemv_diagonal.cuh"

// Where the compiler would spill, as in gemv_fp8.cu.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int C2_ROWS = 2, C4_ROWS = 2;
#else
constexpr int C2_ROWS = 4, C4_ROWS = 2;
#endif

#define GEMV_EXCHANGE(V, C, R, THREADS, BLOCKS)                                                        \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_exchange_fp8_##V(float* h,              /* [N] in place */ \
                                                          BY_VALUE Exchange end, /* this rank's */  \
                                                          int sum,               /* of the step */  \
                                                          BY_VALUE Ahead next,                      \
                                                          const bf16* x,         /* [K] */          \
                                                          const e4m3* w,         /* [N, K] */       \
                                                          const float* scale,    /* [N] */          \
                                                          int N, int K) {                           \
    DYN_SHARED(float, shared);                                                                      \
    gemv_exchange<Diagonal<MmaE4m3, C, R, false, THREADS / WARP>>(h, end, sum, next, x, w, scale, N, K, shared);      \
  }
GEMV_EXCHANGE(c1, 1, 8, 256, 2)
GEMV_EXCHANGE(c1w, 1, 8, 512, 1)
GEMV_EXCHANGE(c2, 2, C2_ROWS, 640, 1)
GEMV_EXCHANGE(c4, 4, C4_ROWS, 512, 1)
