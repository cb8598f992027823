"""cuda_src/gemv_peers_bf16.cu: decode's products with the sums over ranks inside, bf16 weights. Launched by gemv.py."""

from qwen_raw.kernels.variants import Variants

PEERS = Variants(pack=8, add_threads={1: 512, 2: 512, 4: 640, 8: 512}, normed_threads={1: 512, 2: 512})
