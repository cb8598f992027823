"""cuda_src/gemv_fp8.cu: decode's layer products with e4m3 weights and one scale a row (no LM head: that stays bf16)."""

from qwen_raw.kernels.gemv import Gemv, Variants

GEMV = Gemv(
    "gemv_fp8",
    fp8=True,
    variants=Variants(
        pack=16,
        add_threads={"c1": 256, "c1w": 512, "c2": 640, "c4": 512},
        normed_threads={"c1": 224, "c1w": 512, "c2": 512},
    ),
)
