"""cuda_src/attn_prefill.cu: causal attention of a chunk of new tokens to the cache."""

from __future__ import annotations

import math

import numpy as np

from qwen_raw.device import BF16, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.kv_cache import cache_args
from qwen_raw.kernels.linear import check_buffer, check_span

STEM = "attn_prefill"
ROWS, WARPS = 16, 4
HEAD_DIMS = (64, 128)


def attn_prefill(
    dev: Device, out: Buffer, q: Buffer, k_cache: Buffer, v_cache: Buffer, span: Buffer, *, fine: Buffer | None = None
) -> None:
    """out bf16 [rows, H, HD] from q bf16 [rows, H, HD] (rotated); caches [KV, max_len, HD].

    The caches are bf16, or e4m3 with `fine` (qwen_raw/kernels/kv_cache.py).

    span int32 [2]: {pos0, T}, T <= rows; rows from T on are left alone. The cache must already hold keys
    0 … pos0 + T - 1.
    """
    (rows, H, HD), (KV, max_len, _) = out.shape, k_cache.shape
    require(HD in HEAD_DIMS, f"head_dim {HD}: this kernel has {HEAD_DIMS}")
    require(H % KV == 0, f"{H} query heads do not divide among {KV} KV heads")
    check_buffer(q, (rows, H, HD), BF16, "q")
    check_buffer(out, (rows, H, HD), BF16, "out")
    cache = cache_args(k_cache, v_cache, fine, KV, max_len, HD)
    check_span(span)
    blocks = (rows + ROWS * WARPS - 1) // (ROWS * WARPS)
    kernel = dev.kernel(STEM, f"attn_prefill_{cache.name}_hd{HD}")
    dims = [np.int32(n) for n in (H, KV, max_len)]
    args: list[Arg] = [*cache.with_pointers(out, q), span, *dims, np.float32(math.log2(math.e) / math.sqrt(HD))]
    dev.launch(kernel, (blocks, H, 1), (WARPS * 32, 1, 1), args)
