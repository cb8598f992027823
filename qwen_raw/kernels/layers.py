"""cuda_src/layers_{bf16,fp8}.cu: all layers of one token's decode step in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from qwen_raw.config import ModelConfig
from qwen_raw.device import BF16, F32, I32, U32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.attn_decode import ROWS, WARPS, head_blocks
from qwen_raw.kernels.linear import Linear, check_buffer, check_linear
from qwen_raw.kernels.peers import PollLimit

WARP = 32
STAGE = 30 << 10  # bytes of a stage, about
MOST_STAGES = 8
BARRIERS = 2 * MOST_STAGES * 8  # bytes
WORDS = 16  # of struct LayerAddresses
POLL_NS = 2_000_000_000  # a barrier between blocks of one launch takes microseconds


class LayerLike(Protocol):
    """What of a layer the kernel reads (`qwen_raw.model.weights.Layer`)."""

    norm1: Buffer
    qkv: Linear
    qkv_bias: Buffer
    o: Linear
    norm2: Buffer
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Variant:
    """One instance: packs a thread of rows of D (and H·HD) weights, of rows of I weights; head_dim; threads."""

    CD: int
    CI: int
    HD: int
    threads: int  # that multiply; one more warp fetches

    def fits(self, c: ModelConfig, pack: int) -> bool:
        most = self.threads // WARP
        rows = ((c.D, self.CD), (c.H * c.HD, self.CD), (c.I, self.CI))
        return c.HD == self.HD and all(warps(K, C, pack) <= most for K, C in rows)


VARIANTS = {
    "bf16": (Variant(1, 2, 64, 512), Variant(1, 6, 128, 448), Variant(2, 4, 128, 512)),
    "fp8": (Variant(1, 2, 64, 512), Variant(1, 3, 128, 448), Variant(1, 4, 128, 512)),
}
PACK = {"bf16": 8, "fp8": 16}


def warps(K: int, C: int, pack: int) -> int:
    """Warps that share a row of K weights, C packs a thread."""
    return -(-K // (C * WARP * pack))


def choose(c: ModelConfig, dtype: str) -> Variant | None:
    """The first variant whose blocks cover every row of the model; None if there is none."""
    return next((v for v in VARIANTS[dtype] if v.fits(c, PACK[dtype])), None)


@dataclass(frozen=True, slots=True)
class LayersStep:
    """A model's layers, ready to launch: addresses on the device, workspace of one stream."""

    dev: Device
    config: ModelConfig
    dtype: str
    variant: Variant
    addresses: Buffer  # u64 [L, 16]
    keep: tuple[object, ...]  # what the addresses point into
    part: Buffer  # f32 [tiles, splits, 16, HD + 4]
    counters: Buffer  # u32 [tiles]
    arrivals: Buffer  # u32 [1]
    limit: PollLimit
    max_len: int

    @staticmethod
    def create(
        dev: Device,
        c: ModelConfig,
        layers: Sequence[LayerLike],
        k_caches: Sequence[Buffer],
        v_caches: Sequence[Buffer],
        *,
        fp8: bool,
    ) -> LayersStep | None:
        """None where no variant takes the model's shapes."""
        dtype = "fp8" if fp8 else "bf16"
        variant = choose(c, dtype)
        if variant is None:
            return None
        max_len = k_caches[0].shape[1]
        table = np.zeros((c.L, WORDS), np.uint64)
        for row, layer, k, v in zip(table, layers, k_caches, v_caches, strict=True):
            row[:15] = _addresses(c, layer, k, v, fp8)
        tiles = head_blocks(c.H, c.KV)
        splits = max(1, dev.sm_count // tiles)
        return LayersStep(
            dev,
            c,
            dtype,
            variant,
            dev.array(table),
            (tuple(layers), tuple(k_caches), tuple(v_caches)),
            dev.empty((tiles, splits, ROWS, c.HD + 4), F32),
            dev.zeros((tiles,), U32),
            dev.zeros((1,), U32),
            PollLimit.create(dev, POLL_NS),
            max_len,
        )

    def launch(self, h: Buffer, q: Buffer, attn: Buffer, act: Buffer, rope: Buffer, pos: Buffer, *, pdl: bool) -> None:
        """h f32 [D] through all layers, in place; K and V of the token at `pos` (int32 [1]) appended.

        q bf16 [H, HD], attn bf16 [H·HD] and act bf16 [I] are work space.
        """
        c, v = self.config, self.variant
        check_buffer(h, (c.D,), F32, "h")
        check_buffer(q, (c.H, c.HD), BF16, "q")
        check_buffer(attn, (c.H * c.HD,), BF16, "attn")
        check_buffer(act, (c.I,), BF16, "act")
        check_buffer(rope, (self.max_len, c.HD // 2, 2), F32, "rope")
        require(pos.shape == (1,) and pos.dtype == I32, f"pos is {pos.dtype}{list(pos.shape)}, expected int32[1]")
        stem = f"layers_{self.dtype}"
        kernel = self.dev.kernel(stem, f"{stem}_d{v.CD}i{v.CI}_hd{v.HD}")
        grid, scratch = self.dev.sm_count, self._scratch(self.dev.sm_count)
        each_d, each_o, each_i, stage = self._stage()
        stages = min(MOST_STAGES, (self.dev.smem_per_block - scratch - BARRIERS) // stage)
        require(stages >= 2, f"{stem}: stages of {stage} bytes do not fit {self.dev.smem_per_block} bytes of shared memory")
        smem = stages * stage + BARRIERS + scratch
        # All blocks must be on the device at once: they wait for each other.
        require(self.dev.resident_blocks(kernel, v.threads + WARP, smem) > 0, f"{stem}: {smem} bytes of shared memory a block")
        args: list[Arg] = [h, q, attn, act, self.part, self.counters, self.arrivals, self.addresses, rope, pos]
        args += [self._shape(stage, stages, each_d, each_o, each_i), self.limit.struct()]
        self.dev.launch(kernel, (grid, 1, 1), (v.threads + WARP, 1, 1), args, smem=smem, pdl=pdl)

    def _stage(self) -> tuple[int, int, int, int]:
        """(rows of D weights, of H·HD, of I weights in a stage; bytes of a stage)."""
        c, v, pack = self.config, self.variant, PACK[self.dtype]

        def rows(K: int, C: int) -> tuple[int, int]:
            """Rows that all teams take at once, as often as they fit; bytes."""
            together = max(1, v.threads // WARP // warps(K, C, pack)) * {1: 4, 2: 2}.get(C, 1)
            nbytes = K * 16 // pack
            n = max(together, STAGE // nbytes // together * together) if together * nbytes <= STAGE else max(1, STAGE // nbytes)
            return min(n, WARP), nbytes

        ds = [rows(K, C) for K, C in ((c.D, v.CD), (c.H * c.HD, v.CD), (c.I, v.CI))]
        return ds[0][0], ds[1][0], ds[2][0], max(n * nbytes for n, nbytes in ds)

    def _scratch(self, grid: int) -> int:
        """Bytes of shared memory after the ring: a product's sums, or attention's partials of eight warps."""
        c, v, pack = self.config, self.variant, PACK[self.dtype]

        def sums(rows: int, K: int, C: int) -> int:
            return warps(K, C, pack) * (rows + 1) * 4

        def share(units: int) -> int:
            return -(-units // grid)

        return max(
            sums(2 * share((c.H + 2 * c.KV) * c.HD // 2), c.D, v.CD),
            sums(share(c.D), c.H * c.HD, v.CD),
            sums(2 * share(c.I), c.D, v.CD),
            sums(share(c.D), c.I, v.CI),
            WARPS * ROWS * (c.HD + 2) * 4 + 16,
        )

    def _shape(self, *ring: int) -> np.ndarray[Any, Any]:
        c = self.config
        ints = np.array([c.L, c.D, c.H, c.KV, c.HD.bit_length() - 2, c.I, self.max_len, *ring], np.int32)
        floats = np.array([c.rms_eps, math.log2(math.e) / math.sqrt(c.HD)], np.float32)
        return np.concatenate([ints.view(np.uint8), floats.view(np.uint8)])


def _addresses(c: ModelConfig, x: LayerLike, k: Buffer, v: Buffer, fp8: bool) -> list[int]:
    """struct LayerAddresses of one layer, every PRECOND on it checked."""
    N = (c.H + 2 * c.KV) * c.HD
    shapes = ((x.qkv, N, c.D), (x.o, c.D, c.H * c.HD), (x.gate, c.I, c.D), (x.up, c.I, c.D), (x.down, c.D, c.I))
    for linear, rows, K in shapes:
        check_linear(linear, fp8)
        require((linear.N, linear.K) == (rows, K), f"a weight is {linear.weight.shape}, expected {(rows, K)}")
    check_buffer(x.norm1, (c.D,), BF16, "norm1")
    check_buffer(x.norm2, (c.D,), BF16, "norm2")
    check_buffer(x.qkv_bias, (N,), F32, "qkv_bias")
    for cache in (k, v):
        check_buffer(cache, (c.KV, k.shape[1], c.HD), BF16, "cache")

    def both(w: Linear) -> tuple[int, int]:
        return w.weight.ptr, w.scale.ptr if w.scale is not None else 0

    qkv, o, gate, up, down = (both(w) for w in (x.qkv, x.o, x.gate, x.up, x.down))
    head = [x.norm1.ptr, *qkv, x.qkv_bias.ptr, *o, x.norm2.ptr]
    return [*head, *gate, *up, *down, k.ptr, v.ptr]


