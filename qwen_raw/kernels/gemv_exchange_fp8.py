"""cuda_src/gemv_exchange_fp8.cu: O and down with e4m3 weights, the sum over ranks inside (gemv_exchange.py)."""

from qwen_raw.kernels.gemv_exchange import GemvExchange
from qwen_raw.kernels.gemv_fp8 import GEMV

EXCHANGE = GemvExchange("gemv_exchange_fp8", GEMV)
