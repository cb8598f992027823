"""cuda_src/gemm_fp8.cu: prefill's matrix products with e4m3 weights and one scale a row."""

from qwen_raw.kernels.gemm import Gemm

GEMM = Gemm("gemm_fp8", fp8=True)
