"""cuda_src/gemv_bf16.cu: decode's matrix-vector products with bf16 weights, the LM head among them."""

from qwen_raw.kernels.gemv import Gemv

GEMV = Gemv("gemv_bf16", fp8=False, blocks_per_sm=4)
