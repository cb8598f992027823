"""cuda_src/gemv_exchange_bf16.cu: O and down with bf16 weights, the sum over ranks inside (gemv_exchange.py)."""

from dataclasses import replace

from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.gemv_exchange import GemvExchange

VARIANTS = replace(GEMV.variants, add_threads={v: GEMV.variants.add_threads[v] for v in ("c1", "c2", "c4")})
EXCHANGE = GemvExchange("gemv_exchange_bf16", replace(GEMV, variants=VARIANTS))
