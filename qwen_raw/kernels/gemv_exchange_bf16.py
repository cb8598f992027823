"""cuda_src/gemv_exchange_bf16.cu: O and down with bf16 weights, the sum over ranks inside (gemv_exchange.py)."""

from dataclasses import replace

from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.gemv_exchange import GemvExchange

VARIANTS = replace(GEMV.variants, add_threads={C: GEMV.variants.add_threads[C] for C in (1, 2, 4)})
EXCHANGE = GemvExchange("gemv_exchange_bf16", replace(GEMV, variants=VARIANTS))
