"""cuda_src/gemv_bf16.cu: decode's matrix-vector products with bf16 weights, the LM head among them."""

from qwen_raw.kernels.gemv import Gemv, Variants

GEMV = Gemv(
    "gemv_bf16",
    fp8=False,
    variants=Variants(
        pack=8, add_threads={"c1": 512, "c2": 512, "c4": 640, "c8": 512}, normed_threads={"c1": 448, "c2": 512}
    ),
)
