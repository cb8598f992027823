"""cuda_src/gemv_rows_fp8.cu: decode's layer products for 1 to 16 tokens with e4m3 weights and one scale a row."""

from qwen_raw.kernels.gemv_rows import GemvRows

GEMV_ROWS = GemvRows("gemv_rows_fp8", fp8=True)
