"""Launchers of include/gemv.cuh's kernels, shared by gemv_bf16 and gemv_fp8: the two differ in the weight type only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwen_raw.device import BF16, F32, I32, Arg, Buffer, Device, Kernel
from qwen_raw.errors import require
from qwen_raw.kernels.exchange import PeerSum
from qwen_raw.kernels.linear import Linear, check_buffer, check_linear
from qwen_raw.kernels.sample import SLOTS, Sampler, sample
from qwen_raw.kernels.variants import WARP, Variants


@dataclass(frozen=True, slots=True)
class Gemv:
    """One weight type's kernels."""

    stem: str
    fp8: bool
    variants: Variants
    blocks_per_sm: int  # at most; docs/decode.md says why two, filling the registers
    swiglu_blocks_per_sm: int  # the same for gate and up
    peers: Variants | None = None  # of gemv_peers_*: products that push to the ranks, or begin with what ranks pushed

    @property
    def dtype(self) -> str:
        """As the kernels' names have it."""
        return "fp8" if self.fp8 else "bf16"

    def _choose(self, op: str, K: int, *, peers: bool) -> tuple[str, str, int]:
        """(kernel file, entry point, threads)."""
        if not peers:
            C, threads = self.variants.choose(op, K)
            return self.stem, f"gemv_{op}_{self.dtype}_c{C}", threads
        assert self.peers is not None
        C, threads = self.peers.choose(op, K)
        name = "gemv_push" if op == "push" else f"gemv_peers_{op}"
        return f"gemv_peers_{self.dtype}", f"{name}_{self.dtype}_c{C}", threads

    def load_peers(self, devices: Sequence[Device], *, D: int, widths: Sequence[int]) -> None:
        """Load what `push` of rows of `widths`, and products of a PeerSum of `D` elements, launch.

        Before any of them runs: loading one later may wait, for ever, for one that waits for it.
        """
        normed = ("swiglu", "qkv") if self.fp8 else ("swiglu", "qkv", "logits")
        wanted = {self._choose(op, D, peers=True)[:2] for op in normed}
        wanted |= {self._choose("push", K, peers=True)[:2] for K in widths}
        for dev in devices:
            for stem, name in sorted(wanted):
                dev.kernel(stem, name)

    def _geometry(
        self,
        dev: Device,
        op: str,
        units: int,
        rows_per_unit: int,
        K: int,
        grid: int | None,
        peers: PeerSum | None = None,
    ) -> tuple[Kernel, int, int, int]:
        """The kernel of a product, its blocks, threads and bytes of shared memory."""
        stem, name, threads = self._choose(op, K, peers=peers is not None or op == "push")
        kernel = dev.kernel(stem, name)
        blocks = smem = resident = 0
        # One wave: what a multiprocessor holds, at most so many. Fewer blocks need more memory each.
        most = self.swiglu_blocks_per_sm if op == "swiglu" else self.blocks_per_sm
        for per_sm in range(most, 0, -1):
            blocks = min(units, grid or (dev.sm_count * per_sm if peers is None else peers.most_blocks(per_sm)))
            smem = _shared_bytes(units, blocks, rows_per_unit, threads)
            resident = dev.resident_blocks(kernel, threads, smem)
            if resident >= per_sm or (grid and resident):
                break
        # Many rows on few multiprocessors: one wave's sums do not fit, several waves of smaller blocks do.
        while not resident and grid is None and peers is None and blocks < units:
            blocks = min(2 * blocks, units)
            smem = _shared_bytes(units, blocks, rows_per_unit, threads)
            resident = dev.resident_blocks(kernel, threads, smem)
        require(resident > 0, f"gemv_{op}: {units} units in {blocks} blocks need {smem} bytes of shared memory each")
        if peers is not None:
            peers.check_blocks(blocks, resident)
        return kernel, blocks, threads, smem

    def _launch(
        self,
        dev: Device,
        op: str,
        units: int,
        rows_per_unit: int,
        K: int,
        args: list[Arg],
        pdl: bool,
        grid: int | None,
        peers: PeerSum | None = None,
    ) -> None:
        kernel, blocks, threads, smem = self._geometry(dev, op, units, rows_per_unit, K, grid, peers)
        pdl = pdl and (peers is None or peers.end.sharing == 1)
        dev.launch(kernel, (blocks, 1, 1), (threads, 1, 1), args, smem=smem, pdl=pdl)

    def _weights(self, *linears: Linear) -> list[Arg]:
        """Kernel arguments of the weights: each followed by its scale when the type has one."""
        args: list[Arg] = []
        for w in linears:
            check_linear(w, self.fp8)
            args.append(w.weight)
            if w.scale is not None:
                args.append(w.scale)
        return args

    def add(self, dev: Device, h: Buffer, x: Buffer, w: Linear, *, pdl: bool = False, grid: int | None = None) -> None:
        """h f32 [N] += W·x, x bf16 [K]."""
        check_buffer(h, (w.N,), F32, "h")
        check_buffer(x, (w.K,), BF16, "x")
        args = [h, x, *self._weights(w), np.int32(w.N), np.int32(w.K)]
        self._launch(dev, "add", w.N, 1, w.K, args, pdl, grid)

    def store(
        self, dev: Device, y: Buffer, x: Buffer, w: Linear, *, pdl: bool = False, grid: int | None = None
    ) -> None:
        """y bf16 [N] = W·x, x bf16 [K]: a rank's share of a row-parallel product."""
        check_buffer(y, (w.N,), BF16, "y")
        check_buffer(x, (w.K,), BF16, "x")
        args = [y, x, *self._weights(w), np.int32(w.N), np.int32(w.K)]
        self._launch(dev, "store", w.N, 1, w.K, args, pdl, grid)

    def push(
        self, dev: Device, to: PeerSum, x: Buffer, w: Linear, *, pdl: bool = False, grid: int | None = None
    ) -> None:
        """W·x in fp32, x bf16 [K], to every rank: what the next product, given `to` for h, adds to h."""
        to.check(dev, w.N)
        check_buffer(x, (w.K,), BF16, "x")
        args = [*to.args(), x, *self._weights(w), np.int32(w.N), np.int32(w.K)]
        self._launch(dev, "push", w.N, 1, w.K, args, pdl and to.end.sharing == 1, grid)

    def swiglu(
        self,
        dev: Device,
        act: Buffer,
        h: Buffer | PeerSum,
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
        check_buffer(g, (gate.K,), BF16, "g")
        args = [
            act,
            *_hidden(dev, h, gate.K),
            g,
            *self._weights(gate, up),
            np.int32(gate.N),
            np.int32(gate.K),
            np.float32(eps),
        ]
        self._launch(dev, "swiglu", gate.N, 2, gate.K, args, pdl, grid, _sum(h))

    def qkv(
        self,
        dev: Device,
        q: Buffer,
        k_cache: Buffer,
        v_cache: Buffer,
        h: Buffer | PeerSum,
        g: Buffer,
        w: Linear,
        bias: Buffer,
        rope: Buffer,
        pos: Buffer,
        eps: float,
        *,
        pdl: bool = False,
        grid: int | None = None,
    ) -> None:
        """q bf16 [H, HD], and row `pos` of both caches [KV, max_len, HD], from h f32 [K].

        bias f32 [N]; rope f32 [max_len, HD/2, 2], {cos, sin}; pos int32 [1] on the device, below max_len.
        """
        (H, HD), (KV, max_len, _) = q.shape, k_cache.shape
        require(
            w.N == (H + 2 * KV) * HD, f"QKV weight has {w.N} rows, {H} + 2·{KV} heads of {HD} need {(H + 2 * KV) * HD}"
        )
        require(HD >= 2 and HD & (HD - 1) == 0, f"head_dim {HD} is not a power of two")
        check_buffer(q, (H, HD), BF16, "q")
        check_buffer(k_cache, (KV, max_len, HD), BF16, "k_cache")
        check_buffer(v_cache, (KV, max_len, HD), BF16, "v_cache")
        check_buffer(g, (w.K,), BF16, "g")
        check_buffer(bias, (w.N,), F32, "bias")
        check_buffer(rope, (max_len, HD // 2, 2), F32, "rope")
        require(pos.shape == (1,) and pos.dtype == I32, f"pos is {pos.dtype}{list(pos.shape)}, expected int32[1]")
        dims = [np.int32(n) for n in (H, KV, HD.bit_length() - 2, max_len, w.K)]
        args = [
            q,
            k_cache,
            v_cache,
            *_hidden(dev, h, w.K),
            g,
            *self._weights(w),
            bias,
            rope,
            pos,
            *dims,
            np.float32(eps),
        ]
        self._launch(dev, "qkv", w.N // 2, 2, w.K, args, pdl, grid, _sum(h))

    def logits(
        self,
        dev: Device,
        out: Buffer,
        h: Buffer | PeerSum,
        g: Buffer,
        w: Linear,
        eps: float,
        *,
        pdl: bool = False,
        grid: int | None = None,
    ) -> None:
        """out f32 [V] = W·RMSNorm(h f32 [K], g bf16 [K])."""
        check_buffer(out, (w.N,), F32, "logits")
        check_buffer(g, (w.K,), BF16, "g")
        args = [out, *_hidden(dev, h, w.K), g, *self._weights(w), np.int32(w.N), np.int32(w.K), np.float32(eps)]
        self._launch(dev, "logits", w.N, 1, w.K, args, pdl, grid, _sum(h))

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
        args = [out, h, g, *self._weights(w), np.int32(w.N), np.int32(w.K), np.float32(eps)]
        args += [s.state, s.params, s.best, s.counter, s.ring.buffer, np.int32(SLOTS)]
        dev.launch(kernel, (blocks, 1, 1), (threads, 1, 1), args, smem=smem, pdl=pdl)


def _sum(h: Buffer | PeerSum) -> PeerSum | None:
    return h if isinstance(h, PeerSum) else None


def _hidden(dev: Device, h: Buffer | PeerSum, K: int) -> list[Arg]:
    """Kernel arguments for where h [K] is: in memory, or still on its way from the ranks."""
    if isinstance(h, PeerSum):
        h.check(dev, K)
        return h.args()
    check_buffer(h, (K,), F32, "h")
    return [h]


def _shared_bytes(units: int, blocks: int, rows_per_unit: int, threads: int) -> int:
    """Of the block with the most rows: a sum a warp and row, one more a warp, two constants a row (gemv.cuh)."""
    rows = -(-units // blocks) * rows_per_unit
    return (threads // WARP * (rows + 1) + 2 * rows) * 4
