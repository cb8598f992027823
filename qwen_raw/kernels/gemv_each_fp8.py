"""cuda_src/gemv_each_fp8.cu: decode's layer products with e4m3 weights for every row of a pass."""

from qwen_raw.kernels.gemv_each import GemvEach
from qwen_raw.kernels.gemv_fp8 import GEMV

GEMV_EACH = GemvEach(
    GEMV,
    threads={
        "plain": {"c1": 256, "c1w": 512, "c2": 608, "c4": 512},
        "exchange": {"c1": 256, "c1w": 512, "c2": 512, "c4": 512},
        "normed": {"c1": 224, "c1w": 512, "c2": 384},
    },
)
