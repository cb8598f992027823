"""cuda_src/gemv_bf16.cu: decode's matrix-vector products with bf16 weights, the LM head among them."""

from qwen_raw.kernels.gemv import Gemv, Variants

GEMV = Gemv(
    "gemv_bf16",
    fp8=False,
    variants=Variants(pack=8, add_threads={1: 512, 2: 512, 4: 640, 8: 512}, normed_threads={1: 448, 2: 512}),
)
