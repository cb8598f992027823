"""cuda_src/attn_decode.cu: one new token's attention, split over the keys, merged by the last block to arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qwen_raw.device import BF16, F32, I32, U32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

STEM = "attn_decode"
ROWS, WARPS, KEYS = 16, 8, 16
HEAD_DIMS = (64, 128)
MIN_SPLIT = WARPS * KEYS  # keys


def head_blocks(H: int, KV: int) -> int:
    """grid.y: one block row for each KV head and each 16 query heads that share it."""
    return KV * ((H // KV + ROWS - 1) // ROWS)


def max_splits(sm_count: int, H: int, KV: int, max_len: int) -> int:
    """grid.x: one block a multiprocessor, no split shorter than a block's step; the kernel uses what it needs."""
    return max(1, min(sm_count // head_blocks(H, KV), (max_len + MIN_SPLIT - 1) // MIN_SPLIT))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partials and arrival counters of one stream; never shared by two launches that may overlap."""

    part: Buffer  # f32 [grid.y, grid.x, 16, HD + 4]
    counters: Buffer  # u32 [grid.y], zero between launches
    splits: int

    @staticmethod
    def create(dev: Device, H: int, KV: int, HD: int, max_len: int, splits: int | None = None) -> Workspace:
        n = splits or max_splits(dev.sm_count, H, KV, max_len)
        rows = head_blocks(H, KV)
        return Workspace(dev.empty((rows, n, ROWS, HD + 4), F32), dev.zeros((rows,), U32), n)


def attn_decode(
    dev: Device,
    out: Buffer,
    q: Buffer,
    k_cache: Buffer,
    v_cache: Buffer,
    pos: Buffer,
    ws: Workspace,
    *,
    pdl: bool = False,
) -> None:
    """out bf16 [H, HD] from q bf16 [H, HD] and caches bf16 [KV, max_len, HD], keys 0 … pos (device int32 [1])."""
    (H, HD), (KV, max_len, _) = q.shape, k_cache.shape
    require(HD in HEAD_DIMS, f"head_dim {HD}: this kernel has {HEAD_DIMS}")
    require(H % KV == 0, f"{H} query heads do not divide among {KV} KV heads")
    for buffer, shape, name in (
        (out, (H, HD), "out"),
        (q, (H, HD), "q"),
        (k_cache, (KV, max_len, HD), "k_cache"),
        (v_cache, (KV, max_len, HD), "v_cache"),
    ):
        check_buffer(buffer, shape, BF16, name)
    require(pos.shape == (1,) and pos.dtype == I32, f"pos is {pos.dtype}{list(pos.shape)}, expected int32[1]")
    rows = head_blocks(H, KV)
    check_buffer(ws.part, (rows, ws.splits, ROWS, HD + 4), F32, "workspace")
    kernel = dev.kernel(STEM, f"attn_decode_bf16_hd{HD}")
    dims = [np.int32(n) for n in (H, KV, max_len)]
    args: list[Arg] = [
        out,
        q,
        k_cache,
        v_cache,
        ws.part,
        ws.counters,
        pos,
        *dims,
        np.float32(math.log2(math.e) / math.sqrt(HD)),
    ]
    dev.launch(kernel, (ws.splits, rows, 1), (WARPS * 32, 1, 1), args, smem=WARPS * ROWS * (HD + 2) * 4, pdl=pdl)
