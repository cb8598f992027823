"""cuda_src/gemm_bf16.cu: prefill's matrix products with bf16 weights."""

from qwen_raw.kernels.gemm import Gemm

GEMM = Gemm("gemm_bf16", fp8=False)
