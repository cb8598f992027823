// gemv_exchange_bf16.cu - decode's row-parallel products with bf16 weights, the sum over ranks inside. Protocol, PRECONDs: include/exchange.cuh.
//
// gemv_exchange_bf16  h[N] += Σ_r W_r[N,K]·x_r[K]   O-projection, down-projection
// Layout, grid, block, PRECONDs of the product: gemv_bf16.cu, and its variants by C but for _c8, whose rows no model has at two ranks. bytes moved: as there, and 4·N·(world - 1) over the
// link each way. minimum arch: sm_80
#include "include/exchange.cuh"
#include "include/gemv_fma.cuh"

// Where the compiler would spill, as in gemv_bf16.cu.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 890 || __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200)
constexpr int C1_ROWS = 4;
#else
constexpr int C1_ROWS = 8;
#endif

#define GEMV_EXCHANGE(C, R, THREADS, BLOCKS)                                                         \
  KERNEL_OCC(THREADS, BLOCKS) void gemv_exchange_bf16_c##C(float* h,              /* [N] in place */ \
                                                           BY_VALUE Exchange end, /* this rank's */  \
                                                           int sum,               /* of the step */  \
                                                           BY_VALUE Ahead next,                      \
                                                           const bf16* x,         /* [K] */          \
                                                           const bf16* w,         /* [N, K] */       \
                                                           int N, int K) {                           \
    DYN_SHARED(float, shared);                                                                       \
    gemv_exchange<Fma<WeightBf16, C, R, false, THREADS / WARP>>(h, end, sum, next, x, w, nullptr, N, K, shared);     \
  }
GEMV_EXCHANGE(1, C1_ROWS, 512, 2)
GEMV_EXCHANGE(2, 4, 512, 1)
GEMV_EXCHANGE(4, 2, 640, 1)
