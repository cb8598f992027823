"""cuda_src/attn_prefill_sm90.cu: causal attention of a chunk of new tokens to the cache, on Hopper."""

from __future__ import annotations

import math

import numpy as np

from qwen_raw.device import BF16, E4M3, U8, Arg, BoxShape, Buffer, Device, TensorMap
from qwen_raw.errors import QwenRawError, require
from qwen_raw.kernels.gemm_sm90 import Tokens, exponent_row
from qwen_raw.kernels.linear import check_buffer, check_span

STEM, ARCH = "attn_prefill_sm90", "sm_90a"
ROWS, KEYS, SLAB, THREADS = 128, 128, 64, 384  # as in include/attn_sm90.cuh
STAGES = {64: 8, 128: 4}  # by head dim
BLOCK_HD = 128  # heads that have a scale of their own in an e4m3 output


def attn_prefill_sm90(
    dev: Device,
    out: Buffer | Tokens,
    q: Buffer,
    k_cache: Buffer,
    v_cache: Buffer,
    span: Buffer,
) -> None:
    """out from q bf16 [rows, H, HD] (rotated); caches bf16 [KV, max_len, HD].

    out: bf16 [rows, H, HD], or e4m3 [rows, H·HD] with exponents.
    span int32 [2]: {pos0, T}, T <= rows; rows from T on are left alone. The cache must already hold keys
    0 … pos0 + T - 1; what lies behind them is not read."""
    (rows, H, HD), (KV, max_len, _) = q.shape, k_cache.shape
    require(HD in STAGES, f"head_dim {HD}: this kernel has {tuple(STAGES)}")
    require(H % KV == 0, f"{H} query heads do not divide among {KV} KV heads")
    check_buffer(q, (rows, H, HD), BF16, "q")
    outputs, kind = _outputs(out, rows, H, HD)
    check_buffer(k_cache, (KV, max_len, HD), BF16, "k_cache")
    check_buffer(v_cache, (KV, max_len, HD), BF16, "v_cache")
    check_span(span)
    maps = [_tokens(dev, q), _keys(dev, k_cache), _keys(dev, v_cache)]
    args: list[Arg] = [*outputs, *maps, span, np.int32(H), np.int32(KV)]
    args.append(np.float32(math.log2(math.e) / math.sqrt(HD)))
    kernel, tiles = dev.kernel(STEM, f"attn_prefill_sm90_{kind}_hd{HD}"), -(-rows // ROWS) * H
    smem = (ROWS + STAGES[HD] * KEYS) * 2 * HD + 1024  # Q, the ring, and a kilobyte with the barriers
    dev.launch(kernel, (min(tiles, dev.sm_count), 1, 1), (THREADS, 1, 1), args, smem=smem)


def _outputs(out: Buffer | Tokens, rows: int, H: int, HD: int) -> tuple[list[Buffer], str]:
    """The kernel's first arguments, and the type in its name."""
    if not isinstance(out, Tokens):
        check_buffer(out, (rows, H, HD), BF16, "out")
        return [out], "bf16"
    require(HD == BLOCK_HD, f"head_dim {HD}: e4m3 has a scale for each {BLOCK_HD} columns")
    if out.exponents is None:
        raise QwenRawError("attention's output as e4m3 has exponents")
    check_buffer(out.values, (rows, H * HD), E4M3, "out")
    check_buffer(out.exponents, (rows, exponent_row(H * HD)), U8, "exponents")
    return [out.values, out.exponents], "e4m3"


def _tokens(dev: Device, q: Buffer) -> TensorMap:
    """Boxes of ROWS tokens and 64 dimensions of a head, of q [rows, H, HD]."""
    rows, H, HD = q.shape
    return dev.tensor_map([q], BoxShape((HD, H, rows), (2 * HD, 2 * H * HD), (SLAB, 1, ROWS)))


def _keys(dev: Device, cache: Buffer) -> TensorMap:
    """Boxes of KEYS keys and 64 dimensions, of a cache [KV, max_len, HD]."""
    KV, max_len, HD = cache.shape
    return dev.tensor_map([cache], BoxShape((HD, max_len, KV), (2 * HD, 2 * max_len * HD), (SLAB, KEYS, 1)))
