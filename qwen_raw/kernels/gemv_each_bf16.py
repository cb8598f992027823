"""cuda_src/gemv_each_bf16.cu: decode's products with bf16 weights for every row of a pass, the LM head among them."""

from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.gemv_each import GemvEach

GEMV_EACH = GemvEach(
    GEMV,
    threads={
        "plain": {1: 512, 2: 512, 4: 608, 8: 512},
        "exchange": {1: 512, 2: 512, 4: 512},
        "normed": {1: 448, 2: 512},
    },
)
