"""cuda_src/gemv_peers_fp8.cu: decode's products with the sums over ranks inside, fp8 weights. Launched by gemv.py."""

from qwen_raw.kernels.variants import Variants

PEERS = Variants(pack=16, add_threads={1: 256, 2: 640, 4: 512}, normed_threads={1: 224, 2: 512})
