"""cuda_src/gemv_rows_bf16.cu: decode's products for 1 to 16 tokens with bf16 weights, the LM head among them."""

from qwen_raw.kernels.gemv_rows import GemvRows

GEMV_ROWS = GemvRows("gemv_rows_bf16", fp8=False)
