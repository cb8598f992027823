"""cuda_src/gemv_exchange_bf16.cu: O and down with bf16 weights, the sum over ranks inside (gemv_exchange.py)."""

from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.gemv_exchange import GemvExchange

EXCHANGE = GemvExchange("gemv_exchange_bf16", GEMV)
