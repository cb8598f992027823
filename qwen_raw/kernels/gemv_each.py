"""Launchers of include/gemv_each.cuh's kernels, shared by gemv_each_bf16 and gemv_each_fp8: M rows, the bits of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qwen_raw.device import BF16, F32, I32, Arg, Buffer, Device, Kernel
from qwen_raw.errors import require
from qwen_raw.kernels.gemv import WARP, Gemv, packs_of
from qwen_raw.kernels.gemv_exchange import Exchange
from qwen_raw.kernels.gemv_rows import NoRoomError
from qwen_raw.kernels.kv_cache import cache_args
from qwen_raw.kernels.linear import Linear, check_buffer, weight_args

MAX_ROWS = 16
CHUNK = 64  # rows of W whose sums a block has at a time
FEW = 4  # rows of the pass a block, where weights are small
BUSY = 512  # threads of a multiprocessor
MOST_INPUT = 160 << 10  # bytes of x a block


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a launch: `group` rows of the pass a block, `parts` blocks share the rows of W."""

    kernel: Kernel
    threads: int
    group: int
    parts: int
    chunk: int  # rows of W whose sums a block has at a time
    smem: int

    def grid(self, M: int) -> tuple[int, int, int]:
        return self.parts, -(-M // self.group), 1


@dataclass(frozen=True)
class GemvEach:
    """One weight type's kernels."""

    gemv: Gemv  # the products of one token, whose bits these have: the same variants
    threads: dict[str, dict[str, int]]  # the largest block by variant: "plain", "exchange", "normed"

    small = 8 << 20  # bytes of weights that are read once for FEW rows rather than for all

    @cached_property
    def name(self) -> str:
        """Of the weight type."""
        return "fp8" if self.gemv.fp8 else "bf16"

    def _variant(self, op: str, K: int) -> tuple[str, int, int]:
        """(its name, threads, the most of the one-token variant): that one's, which the bits follow from."""
        normed = op in ("swiglu", "qkv", "logits")
        variant, threads, largest = self.gemv.variants.choose(op if normed else "store", K)
        most = self.threads["normed" if normed else op if op == "exchange" else "plain"].get(variant, 0)
        if threads > most:
            raise NoRoomError(f"gemv_each_{op}: rows of {K} weights take {threads} threads, the variant has {most}")
        return variant, threads, largest

    def shape(self, dev: Device, op: str, units: int, per_unit: int, K: int, M: int, room: int | None = None) -> Shape:
        """One wave, and as many rows of the pass a block as memory holds; weights that are small are read more often.

        `room`: no more blocks than so many. Only the time depends on any of it: the bits are those of any other shape.
        """
        require(1 <= M <= MAX_ROWS, f"{M} rows: 1 to {MAX_ROWS} are possible")
        variant, threads, largest = self._variant(op, K)
        kernel = dev.kernel(f"gemv_each_{self.name}", f"gemv_each_{op}_{self.name}_{variant}")
        wide = op in ("swiglu", "qkv", "logits") and not self.gemv.fp8  # fp32; else 16 bits
        x = threads * packs_of(variant) * self.gemv.variants.pack * (4 if wide else 2)
        width, smem = -(-largest // (4 * WARP)) * 16, 0
        small = units * per_unit * K * (16 // self.gemv.variants.pack) <= self.small
        for groups in range(-(-M // FEW) if small else 1, M + 1):
            group = -(-M // groups)
            for per_sm in range(max(1, BUSY // threads), 0, -1):
                parts = max(1, min(units, (dev.sm_count * per_sm if room is None else room) // groups))
                rows = -(-units // parts) * per_unit
                chunk = -(-(rows if room is not None else min(rows, CHUNK)) // 8) * 8
                smem = group * (x + (chunk + 1) * width)
                resident = dev.resident_blocks(kernel, threads, smem) if group == 1 or group * x <= MOST_INPUT else 0
                if resident >= per_sm or (room is not None and resident and parts * groups <= resident * dev.sm_count):
                    return Shape(kernel, threads, group, parts, chunk, smem)
        raise NoRoomError(f"gemv_each_{op}: rows of {K} weights need {smem} bytes of shared memory a block")

    def _launch(self, dev: Device, shape: Shape, M: int, args: list[Arg], pdl: bool) -> None:
        args = [*args, np.int32(M), np.int32(shape.group), np.int32(shape.chunk)]
        dev.launch(shape.kernel, shape.grid(M), (shape.threads, 1, 1), args, smem=shape.smem, pdl=pdl)

    def add(self, dev: Device, h: Buffer, x: Buffer, w: Linear, *, pdl: bool = False) -> None:
        """h f32 [M, N] += x·Wᵀ, x bf16 [M, K]."""
        M = h.shape[0]
        check_buffer(h, (M, w.N), F32, "h")
        check_buffer(x, (M, w.K), BF16, "x")
        args = [h, x, *weight_args(self.gemv.fp8, w), np.int32(w.N), np.int32(w.K)]
        self._launch(dev, self.shape(dev, "add", w.N, 1, w.K, M), M, args, pdl)

    def store(self, dev: Device, y: Buffer, x: Buffer, w: Linear, *, pdl: bool = False) -> None:
        """y bf16 [M, N] = x·Wᵀ: a rank's share of a row-parallel product."""
        M = y.shape[0]
        check_buffer(y, (M, w.N), BF16, "y")
        check_buffer(x, (M, w.K), BF16, "x")
        args = [y, x, *weight_args(self.gemv.fp8, w), np.int32(w.N), np.int32(w.K)]
        self._launch(dev, self.shape(dev, "store", w.N, 1, w.K, M), M, args, pdl)

    def exchange(self, end: Exchange, number: int, h: Buffer, x: Buffer, w: Linear, *, pdl: bool = False) -> None:
        """h f32 [M, N] += Σ over ranks of x·Wᵀ: sum `number` of the pass, as of a step (GemvExchange.add).

        `end`: for at least M·N elements.
        """
        dev, M = end.dev, h.shape[0]
        require(M * w.N <= end.D, f"{M} rows of {w.N}, the ranks exchange {end.D} elements")
        check_buffer(h, (M, w.N), F32, "h")
        check_buffer(x, (M, w.K), BF16, "x")
        require(dev.owns(h) and dev.owns(x), f"h or x is not of {dev.name}'s stream, which rank {end.rank} belongs to")
        room = dev.sm_count if end.sharing == 1 else max(1, dev.sm_count // (2 * end.sharing))
        shape = self.shape(dev, "exchange", w.N, 1, w.K, M, room)
        args = [h, end.struct, np.int32(number), x, *weight_args(self.gemv.fp8, w), np.int32(w.N), np.int32(w.K)]
        self._launch(dev, shape, M, args, pdl and end.sharing == 1)

    def swiglu(
        self, dev: Device, act: Buffer, h: Buffer, g: Buffer, gate: Linear, up: Linear, eps: float, *, pdl: bool = False
    ) -> None:
        """act bf16 [M, I] = silu(Wg·n)·(Wu·n), n = RMSNorm(h f32 [M, K], g bf16 [K])."""
        M = h.shape[0]
        require((gate.N, gate.K) == (up.N, up.K), f"gate is {gate.weight.shape}, up is {up.weight.shape}")
        check_buffer(act, (M, gate.N), BF16, "act")
        check_buffer(h, (M, gate.K), F32, "h")
        check_buffer(g, (gate.K,), BF16, "g")
        args = [act, h, g, *weight_args(self.gemv.fp8, gate, up), np.int32(gate.N), np.int32(gate.K), np.float32(eps)]
        self._launch(dev, self.shape(dev, "swiglu", gate.N, 2, gate.K, M), M, args, pdl)

    def qkv(
        self,
        dev: Device,
        q: Buffer,
        k_cache: Buffer,
        v_cache: Buffer,
        h: Buffer,
        g: Buffer,
        w: Linear,
        bias: Buffer,
        rope: Buffer,
        pos: Buffer,
        eps: float,
        *,
        fine: Buffer | None = None,
        pdl: bool = False,
    ) -> None:
        """q bf16 [M, H, HD], and rows pos … pos + M - 1 of both caches, from h f32 [M, K]: see Gemv.qkv."""
        (M, H, HD), (KV, max_len, _) = q.shape, k_cache.shape
        require(w.N == (H + 2 * KV) * HD, f"QKV weight has {w.N} rows, {H} + 2·{KV} heads of {HD}")
        require(HD >= 2 and HD & (HD - 1) == 0, f"head_dim {HD} is not a power of two")
        check_buffer(q, (M, H, HD), BF16, "q")
        cache = cache_args(k_cache, v_cache, fine, KV, max_len, HD)
        check_buffer(h, (M, w.K), F32, "h")
        check_buffer(g, (w.K,), BF16, "g")
        check_buffer(bias, (w.N,), F32, "bias")
        check_buffer(rope, (max_len, HD // 2, 2), F32, "rope")
        require(pos.shape == (1,) and pos.dtype == I32, f"pos is {pos.dtype}{list(pos.shape)}, expected int32[1]")
        dims = [np.int32(n) for n in (H, KV, HD.bit_length() - 2, max_len, cache.e4m3, w.K)]
        args = [*cache.with_pointers(q), h, g, *weight_args(self.gemv.fp8, w), bias, rope, pos, *dims, np.float32(eps)]
        self._launch(dev, self.shape(dev, "qkv", w.N // 2, 2, w.K, M), M, args, pdl)

    def logits(
        self, dev: Device, out: Buffer, h: Buffer, g: Buffer, w: Linear, eps: float, *, pdl: bool = False
    ) -> None:
        """out f32 [M, V] = W·RMSNorm(h f32 [M, K], g bf16 [K])."""
        M = h.shape[0]
        check_buffer(out, (M, w.N), F32, "logits")
        check_buffer(h, (M, w.K), F32, "h")
        check_buffer(g, (w.K,), BF16, "g")
        args = [out, h, g, *weight_args(self.gemv.fp8, w), np.int32(w.N), np.int32(w.K), np.float32(eps)]
        self._launch(dev, self.shape(dev, "logits", w.N, 1, w.K, M), M, args, pdl)
