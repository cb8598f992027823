"""cuda_src/rope.cu: prefill's rotation of Q in place and of K, with V, into the cache."""

import numpy as np

from qwen_raw.device import BF16, F32, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

STEM = "rope"


def rope_append(dev: Device, qkv: Buffer, k_cache: Buffer, v_cache: Buffer, rope: Buffer, H: int, pos0: int) -> None:
    """qkv bf16 [T, (H + 2·KV)·HD]: Q rotated in place, K and V to rows pos0 … of caches [KV, max_len, HD]."""
    T, (KV, max_len, HD) = qkv.shape[0], k_cache.shape
    require(pos0 >= 0 and pos0 + T <= max_len, f"positions {pos0} … {pos0 + T - 1} do not fit a cache of {max_len}")
    check_buffer(qkv, (T, (H + 2 * KV) * HD), BF16, "qkv")
    check_buffer(k_cache, (KV, max_len, HD), BF16, "k_cache")
    check_buffer(v_cache, (KV, max_len, HD), BF16, "v_cache")
    check_buffer(rope, (max_len, HD // 2, 2), F32, "rope")
    dims = [np.int32(n) for n in (H, KV, HD, pos0, max_len)]
    block = min(128, HD // 2)
    dev.launch(
        dev.kernel(STEM, "rope_append_bf16"), (T, H + 2 * KV, 1), (block, 1, 1), [qkv, k_cache, v_cache, rope, *dims]
    )
