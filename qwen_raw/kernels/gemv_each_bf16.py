"""cuda_src/gemv_each_bf16.cu: decode's products with bf16 weights for every row of a pass, the LM head among them."""

from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.gemv_each import GemvEach

GEMV_EACH = GemvEach(
    GEMV,
    threads={
        "plain": {"c1": 512, "c2": 512, "c4": 608, "c8": 512},
        "exchange": {"c1": 512, "c2": 512, "c4": 512},
        "normed": {"c1": 448, "c2": 512},
    },
)
