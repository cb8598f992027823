"""cuda_src/qkv_finish.cu: bias, RoPE and the cache, behind a bare product of Q, K and V."""

from __future__ import annotations

import numpy as np

from qwen_raw.device import BF16, F32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.kv_cache import cache_args
from qwen_raw.kernels.linear import check_buffer, check_span

STEM = "qkv_finish"


def qkv_finish(
    dev: Device,
    q: Buffer,
    k_cache: Buffer,
    v_cache: Buffer,
    y: Buffer,
    bias: Buffer,
    rope: Buffer,
    span: Buffer,
    fine: Buffer | None = None,
    *,
    pdl: bool = False,
) -> None:
    """q bf16 [T, H, HD], and rows of both caches [KV, max_len, HD], from y bf16 [T, (H + 2·KV)·HD].

    bias f32 [N]; rope f32 [max_len, HD/2, 2]; span int32 [2]: {pos0, how many of the T rows are tokens}.
    """
    (T, H, HD), (KV, max_len, _) = q.shape, k_cache.shape
    N = (H + 2 * KV) * HD
    require(HD in (64, 128), f"head_dim {HD}: this kernel has 64 and 128")
    check_span(span)
    check_buffer(q, (T, H, HD), BF16, "q")
    check_buffer(y, (T, N), BF16, "y")
    check_buffer(bias, (N,), F32, "bias")
    check_buffer(rope, (max_len, HD // 2, 2), F32, "rope")
    cache = cache_args(k_cache, v_cache, fine, KV, max_len, HD)
    args: list[Arg] = [q, *cache.pointers, y, bias, rope, span]
    args += [np.int32(n) for n in (H, KV, HD // 2, max_len)]
    dev.launch(dev.kernel(STEM, "qkv_finish_bf16"), (T, 1, 1), (256, 1, 1), [*args, cache.e4m3], pdl=pdl)
