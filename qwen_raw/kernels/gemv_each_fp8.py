"""cuda_src/gemv_each_fp8.cu: decode's layer products with e4m3 weights for every row of a pass."""

from qwen_raw.kernels.gemv_each import GemvEach
from qwen_raw.kernels.gemv_fp8 import GEMV

GEMV_EACH = GemvEach(
    GEMV,
    threads={
        "plain": {1: 256, 2: 608, 4: 512},
        "exchange": {1: 256, 2: 512, 4: 512},
        "normed": {1: 224, 2: 384},
    },
)
