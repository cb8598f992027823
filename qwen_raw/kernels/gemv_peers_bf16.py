"""cuda_src/gemv_peers_bf16.cu: decode's products with bf16 weights, with the sums over ranks inside."""

from qwen_raw.kernels.gemv import Gemv, Variants

GEMV = Gemv(
    "gemv_peers_bf16",
    fp8=False,
    variants=Variants(pack=8, add_threads={1: 512, 2: 512, 4: 640, 8: 512}, normed_threads={1: 512, 2: 512}),
    blocks_per_sm=2,
    swiglu_blocks_per_sm=2,
)
