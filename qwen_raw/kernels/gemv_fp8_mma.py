"""cuda_src/gemv_fp8_mma.cu: decode's layer products with e4m3 weights on tensor cores."""

from qwen_raw.kernels.gemv import Gemv, MmaEngine

GEMV = Gemv("gemv_fp8_mma", fp8=True, engines=MmaEngine(threads=256), blocks_per_sm=2)
