"""cuda_src/gemv_fp8.cu: decode's layer products with e4m3 weights and one scale a row (no LM head: that stays bf16)."""

from qwen_raw.kernels.gemv import Gemv

GEMV = Gemv("gemv_fp8", fp8=True, blocks_per_sm=3)
