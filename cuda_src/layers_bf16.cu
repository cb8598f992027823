// layers_bf16.cu - all layers of one token's decode step in one launch, bf16 weights. Body and layout: include/layers.cuh.
//
// Variants layers_bf16_d{CD}i{CI}_hd{HD}: CD packs a thread of a row of [.., D] (QKV, O, gate, up), CI of a row of [.., I] (down); head_dim.
// minimum arch: sm_90
#include "include/layers.cuh"

#define LAYERS(CD, CI, HD, THREADS)                                                                                            \
  KERNEL(THREADS) void layers_bf16_d##CD##i##CI##_hd##HD(float* h,                     /* [D] residual stream */                  \
                                                     bf16* q,                      /* [H, HD] */                              \
                                                     bf16* attn,                   /* [H, HD] */                              \
                                                     bf16* act,                    /* [I] */                                  \
                                                     float* part,                  /* [tiles, splits, 16, HD + 4] */          \
                                                     uint32_t* counters,           /* [tiles] */                              \
                                                     uint32_t* arrivals,           /* [1] zero */                             \
                                                     const uint64_t* layers,       /* [L, 16] addresses, LayerAddresses */    \
                                                     const float2* rope,           /* [max_len, HD/2] */                      \
                                                     const int32_t* pos,           /* [1] the token's position, < max_len */  \
                                                     BY_VALUE LayersShape shape, BY_VALUE PollLimit limit) {                  \
    DYN_SHARED(unsigned char, shared);                                                                                        \
    using Body = Layers<WeightBf16, CD, CI, HD>;                                                                              \
    layers_run<Body>({h, q, attn, act, part, counters, rope, 0}, pos, arrivals, layers, shape, limit, shared);                 \
  }
LAYERS(1, 2, 64, 544)
LAYERS(1, 6, 128, 480)
LAYERS(2, 4, 128, 544)
