"""Launchers of include/gemv.cuh's kernels, shared by gemv_bf16 and gemv_fp8: the two differ in the weight type only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_raw.device import BF16, F32, I32, Arg, Buffer, Device, Kernel
from qwen_raw.errors import QwenRawError, require
from qwen_raw.kernels.kv_cache import cache_args
from qwen_raw.kernels.linear import Linear, check_buffer, weight_args
from qwen_raw.kernels.sample import SLOTS, Sampler, sample

WARP = 32
PACKS = 8  # that a thread has in flight


def packs_of(variant: str) -> int:
    """C, the packs of a row that one thread of the variant holds."""
    return int(variant[1])


@dataclass(frozen=True, slots=True)
class Variants:
    """A weight type's kernels: c and the packs of a row that a thread holds (gemv_fma.cuh), w: wide blocks."""

    pack: int  # weights in 16 bytes
    add_threads: dict[str, int]  # variant → its largest block, plain x
    normed_threads: dict[str, int]  # the same for the kernels that normalise

    def choose(self, op: str, K: int) -> tuple[str, int, int]:
        """(variant, threads, the most of that variant): the first of which whole warps can cover K."""
        table = self.add_threads if op in ("add", "store") else self.normed_threads
        for variant, most in table.items():
            threads = -(-(K // self.pack) // (packs_of(variant) * WARP)) * WARP
            if threads <= most:
                return variant, threads, most
        raise QwenRawError(f"gemv_{op}: rows of {K} weights, the longest variant takes {self.longest(table)}")

    def longest(self, table: dict[str, int]) -> int:
        """The most weights that a row may have."""
        return max(packs_of(variant) * most for variant, most in table.items()) * self.pack


@dataclass(frozen=True, slots=True)
class Gemv:
    """One weight type's kernels."""

    stem: str
    fp8: bool
    variants: Variants
    blocks_per_sm: int | None = None  # at most; None: most_blocks' rule

    def most_blocks(self, dev: Device, threads: int, C: int, rows: int) -> int:
        """Blocks a multiprocessor, at most: two, filling the registers (docs/decode.md says why); where rows are short
        and many as many as do, each with twice the rows that it keeps in flight."""
        if self.blocks_per_sm is not None:
            return self.blocks_per_sm
        return max(2, min(1024 // threads, rows * C // (2 * PACKS * dev.sm_count)))

    def _geometry(
        self, dev: Device, op: str, units: int, rows_per_unit: int, K: int, grid: int | None
    ) -> tuple[Kernel, int, int, int]:
        """The kernel of a product, its blocks, threads and bytes of shared memory."""
        variant, threads, largest = self.variants.choose(op, K)
        kernel = dev.kernel(self.stem, f"gemv_{op}_{'fp8' if self.fp8 else 'bf16'}_{variant}")
        blocks = smem = resident = 0
        # One wave: what a multiprocessor holds, at most so many. Fewer blocks need more memory each.
        for per_sm in range(self.most_blocks(dev, threads, packs_of(variant), units * rows_per_unit), 0, -1):
            blocks = min(units, grid or dev.sm_count * per_sm)
            smem = shared_bytes(units, blocks, rows_per_unit, largest)
            resident = dev.resident_blocks(kernel, threads, smem)
            if resident >= per_sm or (grid and resident):
                break
        # Many rows on few multiprocessors: one wave's sums do not fit, several waves of smaller blocks do.
        while not resident and grid is None and blocks < units:
            blocks = min(2 * blocks, units)
            smem = shared_bytes(units, blocks, rows_per_unit, largest)
            resident = dev.resident_blocks(kernel, threads, smem)
        require(resident > 0, f"gemv_{op}: {units} units in {blocks} blocks need {smem} bytes of shared memory each")
        return kernel, blocks, threads, smem

    def _launch(
        self, dev: Device, op: str, units: int, rows_per_unit: int, K: int, args: list[Arg], pdl: bool, grid: int | None
    ) -> None:
        kernel, blocks, threads, smem = self._geometry(dev, op, units, rows_per_unit, K, grid)
        dev.launch(kernel, (blocks, 1, 1), (threads, 1, 1), args, smem=smem, pdl=pdl)

    def blocks(self, dev: Device, op: str, units: int, rows_per_unit: int, K: int) -> int:
        """That a product is spread over where nobody asks for another number."""
        return self._geometry(dev, op, units, rows_per_unit, K, None)[1]

    def add(self, dev: Device, h: Buffer, x: Buffer, w: Linear, *, pdl: bool = False, grid: int | None = None) -> None:
        """h f32 [N] += W·x, x bf16 [K]."""
        check_buffer(h, (w.N,), F32, "h")
        check_buffer(x, (w.K,), BF16, "x")
        args = [h, x, *weight_args(self.fp8, w), np.int32(w.N), np.int32(w.K)]
        self._launch(dev, "add", w.N, 1, w.K, args, pdl, grid)

    def store(
        self, dev: Device, y: Buffer, x: Buffer, w: Linear, *, pdl: bool = False, grid: int | None = None
    ) -> None:
        """y bf16 [N] = W·x, x bf16 [K]: a rank's share of a row-parallel product."""
        check_buffer(y, (w.N,), BF16, "y")
        check_buffer(x, (w.K,), BF16, "x")
        args = [y, x, *weight_args(self.fp8, w), np.int32(w.N), np.int32(w.K)]
        self._launch(dev, "store", w.N, 1, w.K, args, pdl, grid)

    def swiglu(
        self,
        dev: Device,
        act: Buffer,
        h: Buffer,
        g: Buffer,
        gate: Linear,
        up: Linear,
        eps: float,
        *,
        pdl: bool = False,
        grid: int | None = None,
    ) -> None:
        """act bf16 [I] = silu(Wg·n)·(Wu·n), n = RMSNorm(h f32 [K], g bf16 [K])."""
        require((gate.N, gate.K) == (up.N, up.K), f"gate is {gate.weight.shape}, up is {up.weight.shape}")
        check_buffer(act, (gate.N,), BF16, "act")
        check_buffer(h, (gate.K,), F32, "h")
        check_buffer(g, (gate.K,), BF16, "g")
        args = [act, h, g, *weight_args(self.fp8, gate, up), np.int32(gate.N), np.int32(gate.K), np.float32(eps)]
        self._launch(dev, "swiglu", gate.N, 2, gate.K, args, pdl, grid)

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
        grid: int | None = None,
    ) -> None:
        """q bf16 [H, HD], and row `pos` of both caches [KV, max_len, HD], from h f32 [K].

        Caches are bf16, or e4m3 with `fine` (qwen_raw/kernels/kv_cache.py).
        bias f32 [N]; rope f32 [max_len, HD/2, 2], {cos, sin}; pos int32 [1] on the device, below max_len,
        written before the last ordinary launch.
        """
        (H, HD), (KV, max_len, _) = q.shape, k_cache.shape
        require(
            w.N == (H + 2 * KV) * HD, f"QKV weight has {w.N} rows, {H} + 2·{KV} heads of {HD} need {(H + 2 * KV) * HD}"
        )
        require(HD >= 2 and HD & (HD - 1) == 0, f"head_dim {HD} is not a power of two")
        check_buffer(q, (H, HD), BF16, "q")
        cache = cache_args(k_cache, v_cache, fine, KV, max_len, HD)
        check_buffer(h, (w.K,), F32, "h")
        check_buffer(g, (w.K,), BF16, "g")
        check_buffer(bias, (w.N,), F32, "bias")
        check_buffer(rope, (max_len, HD // 2, 2), F32, "rope")
        require(pos.shape == (1,) and pos.dtype == I32, f"pos is {pos.dtype}{list(pos.shape)}, expected int32[1]")
        dims = [np.int32(n) for n in (H, KV, HD.bit_length() - 2, max_len, cache.e4m3, w.K)]
        args = [*cache.with_pointers(q), h, g, *weight_args(self.fp8, w), bias, rope, pos, *dims, np.float32(eps)]
        self._launch(dev, "qkv", w.N // 2, 2, w.K, args, pdl, grid)

    def logits(
        self,
        dev: Device,
        out: Buffer,
        h: Buffer,
        g: Buffer,
        w: Linear,
        eps: float,
        *,
        pdl: bool = False,
        grid: int | None = None,
    ) -> None:
        """out f32 [V] = W·RMSNorm(h f32 [K], g bf16 [K])."""
        check_buffer(out, (w.N,), F32, "logits")
        check_buffer(h, (w.K,), F32, "h")
        check_buffer(g, (w.K,), BF16, "g")
        args = [out, h, g, *weight_args(self.fp8, w), np.int32(w.N), np.int32(w.K), np.float32(eps)]
        self._launch(dev, "logits", w.N, 1, w.K, args, pdl, grid)

    def choose(
        self,
        dev: Device,
        out: Buffer,
        h: Buffer,
        g: Buffer,
        w: Linear,
        eps: float,
        s: Sampler,
        *,
        pdl: bool = False,
        grid: int | None = None,
    ) -> None:
        """`logits`, and in the same launch what `sample` does with them. For a sampler that holds all rows.

        Where the scratch of `s` is too small for this many blocks (few multiprocessors, many rows) it is two launches.
        """
        require(s.meeting is None and len(s.rows) == w.N, f"the sampler holds {s.rows}, the LM head {w.N} rows")
        kernel, blocks, threads, smem = self._geometry(dev, "choose", w.N, 1, w.K, grid)
        if blocks > s.best.shape[0]:
            self.logits(dev, out, h, g, w, eps, pdl=pdl, grid=grid)
            sample(dev, out, s, pdl=pdl)
            return
        check_buffer(out, (w.N,), F32, "logits")
        check_buffer(h, (w.K,), F32, "h")
        check_buffer(g, (w.K,), BF16, "g")
        args = [out, h, g, *weight_args(self.fp8, w), np.int32(w.N), np.int32(w.K), np.float32(eps)]
        args += [s.state, s.params, s.best, s.counter, s.ring.buffer, np.int32(SLOTS)]
        dev.launch(kernel, (blocks, 1, 1), (threads, 1, 1), args, smem=smem, pdl=pdl)


def shared_bytes(units: int, blocks: int, rows_per_unit: int, most: int) -> int:
    """Of the block with the most rows: a sum a row and warp of the largest block, one row more, a constant a row."""
    rows = -(-units // blocks) * rows_per_unit
    return (-(-most // (4 * WARP)) * 4 * (rows + 1) + rows) * 4
