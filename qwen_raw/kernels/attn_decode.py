"""cuda_src/attn_decode.cu: attention of one new token, or a few, split over the keys and merged in the same launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qwen_raw.device import BF16, F32, I32, U32, Arg, Buffer, Device, Kernel
from qwen_raw.errors import require
from qwen_raw.kernels.kv_cache import cache_args
from qwen_raw.kernels.linear import check_buffer

STEM = "attn_decode"
WARPS, KEYS = 8, 16
HEAD_DIMS = (64, 128)
MAX_CLUSTER = 8  # blocks
MIN_SPLIT = WARPS * KEYS  # keys: one step of a block
LOG_FULL = 11  # of the keys that a block has before blocks by themselves join the clusters
ENOUGH = 0.6  # of the multiprocessors: larger clusters are preferred as long as this share of them has a block
BUSY = 0.8  # of the clusters that a device holds: the next launch's blocks find room while the last of these finish
FULL_SPLIT = 2 * MIN_SPLIT  # keys a block before another cluster joins: what a block has in flight at once


@dataclass(frozen=True, slots=True)
class Split:
    """How the keys of a tile (a KV head, or some of its rows) are split among blocks, at most.

    `clusters` of 1 << log_cluster blocks, one more each 1 << log_keys keys; `singles`, blocks by themselves, join when
    each block of the clusters has 1 << log_full keys.
    """

    log_cluster: int
    clusters: int
    log_keys: int
    singles: int = 0
    log_full: int = LOG_FULL

    @property
    def cluster(self) -> int:
        return 1 << self.log_cluster

    @property
    def blocks(self) -> int:
        """Of a tile."""
        return (self.clusters << self.log_cluster) + self.singles

    @property
    def meeting(self) -> int:
        """Clusters and singles: what meets in global memory."""
        return self.clusters + self.singles

    def grid(self, tiles: int) -> int:
        """Blocks of a launch: whole clusters."""
        return -(-tiles * self.blocks >> self.log_cluster) << self.log_cluster


def block_rows(T: int, G: int) -> int:
    """Rows (token, head of a group) of a block: the kernel with 8 takes one token."""
    return 8 if T == 1 and G <= 8 else 16


def smem_bytes(R: int, HD: int) -> int:
    """sizeof(Shared) of attn_decode.cu."""
    return (WARPS + 1) * R * (HD + 2) * 4 + 16


def _kernel(dev: Device, R: int, HD: int, cache: str = "bf16") -> Kernel:
    return dev.kernel(STEM, f"attn_decode_{cache}_hd{HD}_n{R // 8}")


def candidates(dev: Device, R: int, HD: int, tiles: int, max_len: int, full: int = FULL_SPLIT) -> list[Split]:
    """With each cluster size as many clusters as the device holds at once, for `tiles` KV heads times blocks of rows.

    The clusters that are left when all tiles have the same number are divided among them block by block.
    `full`: keys that each block of the clusters at work has before another one joins, a power of two.
    """
    kernel, smem, found = _kernel(dev, R, HD), smem_bytes(R, HD), []
    for log in range(MAX_CLUSTER.bit_length()):
        at_once = dev.resident_clusters(kernel, WARPS * 32, smem, 1 << log) if log else dev.sm_count
        log_keys = full.bit_length() - 1 + log
        at_once = min(at_once, dev.sm_count >> log)
        most, useful = max(int(at_once * BUSY), min(at_once, tiles)) // tiles, -(-max_len >> log_keys)
        singles = ((at_once - most * tiles) << log) // tiles if log and max_len > most << (log + LOG_FULL) else 0
        if log == 0 or (most and MIN_SPLIT << (log - 1) < max_len):
            found.append(Split(log, max(min(most, useful), 1), log_keys, singles))
    return found


def choose_split(dev: Device, R: int, HD: int, tiles: int, max_len: int) -> Split:
    """The largest cluster with which ENOUGH of the device has work at max_len.

    Within a cluster partial results meet in a third of the time that they take between clusters, but clusters leave
    multiprocessors of a device without work.
    """
    found = candidates(dev, R, HD, tiles, max_len)
    enough = min(max(s.clusters << s.log_cluster for s in found), ENOUGH * dev.sm_count / tiles)
    return next(s for s in reversed(found) if s.clusters << s.log_cluster >= enough)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where clusters meet, in launches of one stream with T tokens each; never shared by launches that overlap."""

    part: Buffer  # f32 [tiles, clusters and singles, R, HD], every bit set between launches
    part_ml: Buffer  # f32 [tiles, clusters and singles, R, 2], likewise
    arrivals: Buffer  # u32 [tiles, R], zero between launches
    T: int
    split: Split
    each: int | None = None  # launches are of so many tokens, each by itself: `attn_decode_each`; tiles are all theirs

    @staticmethod
    def create(
        dev: Device,
        H: int,
        KV: int,
        HD: int,
        max_len: int,
        *,
        T: int = 1,
        split: Split | None = None,
        each: int | None = None,
    ) -> Workspace:
        """For H query and KV key heads (of one rank) of HD dimensions; `split`: not the one that choose_split gives."""
        _check_heads(H, KV, HD)
        R = block_rows(T, H // KV)
        tiles = KV * -(-T * (H // KV) // R)
        s = split or choose_split(dev, R, HD, tiles, max_len)
        tiles *= each or 1
        part, part_ml = dev.empty((tiles, s.meeting, R, HD), F32), dev.empty((tiles, s.meeting, R, 2), F32)
        for buffer in (part, part_ml):
            buffer.fill(0xFF)
        return Workspace(part, part_ml, dev.zeros((tiles, R), U32), T, s, each)


def _check_heads(H: int, KV: int, HD: int) -> None:
    require(HD in HEAD_DIMS, f"head_dim {HD}: this kernel has {HEAD_DIMS}")
    require(H % KV == 0, f"{H} query heads do not divide among {KV} KV heads")


def attn_decode(
    dev: Device,
    out: Buffer,
    q: Buffer,
    k_cache: Buffer,
    v_cache: Buffer,
    pos: Buffer,
    ws: Workspace,
    *,
    fine: Buffer | None = None,
    pdl: bool = False,
) -> None:
    """out bf16 [T, H, HD] from q bf16 [T, H, HD] and caches [KV, max_len, HD]; [H, HD] is one token.

    The caches are bf16, or e4m3 with `fine` (qwen_raw/kernels/kv_cache.py).

    Token t sees keys 0 … pos + t; pos is a device int32 [1]. It, and the keys before it, must be older than the last
    launch that was not a dependent one (`pdl`): the kernel reads them before it waits for its predecessor.
    """
    T = q.shape[0] if len(q.shape) == 3 else 1
    require(ws.T == T and ws.each is None, f"the workspace is for {ws.T} tokens at a time, q has {T}")
    _launch(dev, out, q, k_cache, v_cache, pos, ws, fine, pdl)


def attn_decode_each(
    dev: Device,
    out: Buffer,
    q: Buffer,
    k_cache: Buffer,
    v_cache: Buffer,
    pos: Buffer,
    ws: Workspace,
    *,
    fine: Buffer | None = None,
    pdl: bool = False,
) -> None:
    """The same of M tokens, each with the bits that it has by itself, with the split of `ws`, in one launch.

    `ws`: made with `each` = M. PRECOND: a KV head has at most 8 query heads (`takes_each`).
    """
    M = q.shape[0]
    require(ws.each == M, f"the workspace is for {ws.each} tokens by themselves, q has {M}")
    require(takes_each(q.shape[1], k_cache.shape[0]), "tokens by themselves: at most 8 query heads a KV head")
    _launch(dev, out, q, k_cache, v_cache, pos, ws, fine, pdl)


def takes_each(H: int, KV: int) -> bool:
    """Whether `attn_decode_each` is for such heads."""
    return block_rows(1, H // KV) == 8


def _launch(
    dev: Device,
    out: Buffer,
    q: Buffer,
    k_cache: Buffer,
    v_cache: Buffer,
    pos: Buffer,
    ws: Workspace,
    fine: Buffer | None,
    pdl: bool,
) -> None:
    (H, HD), (KV, max_len, _) = q.shape[-2:], k_cache.shape
    _check_heads(H, KV, HD)
    for buffer, shape, name in (
        (out, q.shape, "out"),
        (q, q.shape, "q"),
    ):
        check_buffer(buffer, shape, BF16, name)
    cache = cache_args(k_cache, v_cache, fine, KV, max_len, HD)
    require(pos.shape == (1,) and pos.dtype == I32, f"pos is {pos.dtype}{list(pos.shape)}, expected int32[1]")
    T, G, R, s, each = ws.T, H // KV, block_rows(ws.T, H // KV), ws.split, ws.each or 1
    tiles = KV * -(-T * G // R)
    check_buffer(ws.part, (tiles * each, s.meeting, R, HD), F32, "workspace")
    dims = [np.int32(n) for n in (T, G, KV, max_len, s.clusters, s.singles, s.log_cluster, s.log_keys, s.log_full)]
    dims += [np.int32(-(-(1 << 16) // max(n, 1))) for n in (s.clusters, s.singles)]
    args: list[Arg] = [
        *cache.with_pointers(out, q),
        ws.part,
        ws.part_ml,
        ws.arrivals,
        pos,
        *dims,
        np.float32(math.log2(math.e) / math.sqrt(HD)),
    ]
    dev.launch(
        _kernel(dev, R, HD, cache.name) if ws.each is None else dev.kernel(STEM, f"{STEM}_{cache.name}_hd{HD}_each"),
        (s.grid(tiles), each, 1),
        (WARPS * 32, 1, 1),
        args,
        smem=smem_bytes(R, HD),
        pdl=pdl,
        cluster=(s.cluster, 1, 1) if s.log_cluster else None,
    )
