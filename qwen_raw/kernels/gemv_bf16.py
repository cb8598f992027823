"""cuda_src/gemv_bf16.cu: decode's matrix-vector products with bf16 weights, the LM head among them."""

from qwen_raw.kernels.gemv import Gemv
from qwen_raw.kernels.gemv_peers_bf16 import PEERS
from qwen_raw.kernels.variants import Variants

GEMV = Gemv(
    "gemv_bf16",
    fp8=False,
    variants=Variants(pack=8, add_threads={1: 512, 2: 512, 4: 640, 8: 512}, normed_threads={1: 512, 2: 512}),
    blocks_per_sm=2,
    swiglu_blocks_per_sm=2,
    peers=PEERS,
)
