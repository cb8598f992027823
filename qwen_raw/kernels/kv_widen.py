"""cuda_src/kv_widen.cu: one layer's e4m3 cache as bf16."""

from __future__ import annotations

import numpy as np

from qwen_raw.device import BF16, E4M3, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.kv_cache import cache_args
from qwen_raw.kernels.linear import check_buffer, check_span

STEM = "kv_widen"
THREADS, BLOCKS_PER_SM = 256, 8


def kv_widen(
    dev: Device, k: Buffer, v: Buffer, k_codes: Buffer, v_codes: Buffer, span: Buffer, *, fine: Buffer
) -> None:
    """k, v bf16 [KV, max_len, HD]: keys 0 … pos0 + T - 1 of an e4m3 cache; later rows are left alone.

    k_codes, v_codes e4m3 [KV, max_len, HD] and `fine`: qwen_raw/kernels/kv_cache.py. span int32 [2]: {pos0, T}.
    """
    KV, max_len, HD = k_codes.shape
    require(HD % 16 == 0, f"head_dim {HD} is not a multiple of 16")
    require(max_len * HD < 1 << 31, f"{max_len} keys of {HD} dimensions: a head has 2^31 values at most")
    check_buffer(k_codes, (KV, max_len, HD), E4M3, "k_codes")
    cache = cache_args(k_codes, v_codes, fine, KV, max_len, HD)
    check_buffer(k, (KV, max_len, HD), BF16, "k")
    check_buffer(v, (KV, max_len, HD), BF16, "v")
    check_span(span)
    blocks = min(-(-max_len * HD // 8 // THREADS), max(1, BLOCKS_PER_SM * dev.sm_count // (2 * KV)))
    dims = [np.int32(n) for n in (KV, max_len, HD)]
    kernel = dev.kernel(STEM, "kv_widen_e4m3")
    dev.launch(kernel, (blocks, 2 * KV, 1), (THREADS, 1, 1), [*cache.with_pointers(k, v), span, *dims])
