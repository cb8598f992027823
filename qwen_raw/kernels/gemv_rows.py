"""Launchers of include/gemv_rows.cuh's kernels, shared by gemv_rows_bf16 and gemv_rows_fp8: 1 to 16 tokens at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from qwen_raw.device import BF16, F32, I32, U32, Arg, Buffer, Device
from qwen_raw.errors import QwenRawError, require
from qwen_raw.kernels.kv_cache import cache_args
from qwen_raw.kernels.linear import Linear, check_buffer, weight_args

WARP = 32
MAX_ROWS = 16
MAX_SPLITS = 16
MAX_RANGES = 1024
MAX_CLUSTER = 8  # blocks that share a range of rows and push to each other
# As in include/gemv_mma.cuh and gemv_rows.cuh.
RING_BYTES = 64  # of shared memory, a thread and stage
SUMS_PER_COLUMN = 20
TILE_ROWS = 16
X_SHARE = 1.5  # the least bytes of weights to a byte of x at which more blocks that read x are faster


@dataclass(frozen=True, slots=True)
class RowsWorkspace:
    """Where blocks that share a range of rows meet: for one launch at a time on one stream."""

    sums: Buffer  # f32
    counters: Buffer  # uint32, zero between launches

    @classmethod
    def create(cls, dev: Device, sums: int) -> RowsWorkspace:
        """`sums`: the largest S·M·N of the products to come."""
        return cls(dev.empty((sums + MAX_RANGES * MAX_SPLITS * MAX_ROWS,), F32), dev.zeros((MAX_RANGES,), U32))


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is divided: S splits of K_block, R ranges of rows, `warps` a block, groups of G tiles."""

    tokens: int
    S: int
    K_block: int
    warps: int
    R: int
    G: int
    smem: int
    together: bool  # the S blocks of a range are a cluster


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a variant's blocks."""

    warp_k: int  # K of a warp
    warps: int  # the most of a block
    ring: int  # stages
    clusters: bool  # splits may be clusters
    narrow: bool  # two blocks fit a multiprocessor


class NoRoomError(QwenRawError):
    """A product's blocks need more shared memory than a multiprocessor has."""


@dataclass(frozen=True, slots=True)
class GemvRows:
    """One weight type's kernels."""

    stem: str
    fp8: bool

    def tokens(self, M: int, normed: bool) -> int:
        """The smallest variant for M rows."""
        require(1 <= M <= MAX_ROWS, f"{M} rows: these kernels take 1 to {MAX_ROWS}")
        return next(t for t in ((4, 8, 16) if normed and not self.fp8 else (8, 16)) if t >= M)

    def plan(
        self,
        dev: Device,
        kernel: object,
        units: int,
        rows_per_unit: int,
        K: int,
        tokens: int,
        normed: bool,
        R: int | None,
        constants: int = 2,
    ) -> Plan:
        """The division of a product over the device, as measured; `constants`: floats that a block keeps a row."""
        hopper = dev.arch in ("sm_90a", "sim")  # ROWS_HOPPER
        shape = self._shape(tokens, normed, hopper)
        least = -(-K // (shape.warp_k * shape.warps))
        S, K_block = self._splits(K, least)
        even = 1 << (least - 1).bit_length()
        together = shape.clusters and even <= MAX_CLUSTER
        together = together and dev.resident_clusters(kernel, WARP, 0, 2) > 0  # type: ignore[arg-type]
        if together:
            # Of a plain product two narrow blocks of half the row are faster than one of the whole.
            half = shape.narrow and even == 1 and not normed and shape.warp_k * shape.warps < 2 * K
            S, K_block = self._splits(K, 2 if half else even)
        require(S <= MAX_SPLITS, f"rows of {K} weights need {S} splits, at most {MAX_SPLITS} are possible")
        warps = -(-K_block // shape.warp_k)
        per_sm = max(1, shape.warps // warps)
        # Twice as many narrow blocks hide more latency, but all of them read x.
        x = 2 * per_sm * tokens * K_block * (4 if normed else 2)
        if together and shape.narrow and X_SHARE * x * dev.sm_count <= units * rows_per_unit * K:
            per_sm *= 2
        ring = shape.ring * RING_BYTES * WARP * warps
        whole = warps * WARP, dev.smem_per_block  # a multiprocessor each
        together = together and S > 1 and dev.resident_clusters(kernel, *whole, S) > 0  # type: ignore[arg-type]

        def room(ranges: int, G: int, per_sm: int) -> tuple[int, int, int]:
            """(bytes of shared memory, ranges that fit the device at once, tiles of a group)."""
            rows = -(-units // ranges) * rows_per_unit
            tiles = -(-rows // TILE_ROWS)
            G = min(G, tiles)
            floats = (2 if tiles > G else 1) * warps * G * tokens * SUMS_PER_COLUMN + (warps + 1) * MAX_ROWS
            floats += constants * rows
            if together:
                floats += 4 + S * (-(-4 * tiles // S) * tokens * 4 + 2 * MAX_ROWS)
            smem = ring + (2 * K_block if normed else 0) + 4 * floats
            if not together:
                resident = dev.resident_blocks(kernel, warps * WARP, smem)  # type: ignore[arg-type]
                return smem, max(min(1, resident), resident * dev.sm_count // S), G  # no split waits for another
            if S > 2 or not shape.narrow:  # no more blocks on a multiprocessor than are wanted: others would have none
                smem = max(smem, dev.smem_per_block // (per_sm + 1) // 16 * 16 + 16)
            return smem, dev.resident_clusters(kernel, warps * WARP, smem, S), G  # type: ignore[arg-type]

        for waves, blocks, most in itertools.product((1, 2, 4, 8, 16), range(per_sm, 0, -1), (4, 2, 1)):
            ranges = min(units, MAX_RANGES, R or max(1, dev.sm_count * blocks // S * waves))
            for _ in range(3):  # clusters do not fill all multiprocessors: fewer ranges, which take more memory
                smem, at_once, G = room(ranges, most, blocks)
                if at_once and (R or at_once * waves >= ranges):
                    return Plan(tokens, S, K_block, warps, ranges, G, smem, together)
                if at_once * S <= dev.sm_count * (blocks - 1) or not together:
                    break
                ranges = at_once * waves
        raise NoRoomError(f"{self.stem}: {units} units, rows of {K}: no block fits a multiprocessor")

    def _splits(self, K: int, S: int) -> tuple[int, int]:
        """(splits, their K): S of them, or fewer, of whole lines."""
        line = 128 // (1 if self.fp8 else 2)
        K_block = -(-K // (S * line)) * line
        return -(-K // K_block), K_block

    def _shape(self, tokens: int, normed: bool, hopper: bool) -> Shape:
        """A variant's, as RowsMma has it."""
        if self.fp8 and tokens == 8:
            return Shape(256 if normed else 512, 8, 4, True, True)
        if hopper and (not normed or (not self.fp8 and tokens < 16)):
            return Shape(128 if normed else 256, 16, 4, True, False)
        warp_k = (64 if tokens == 4 else 128) * 64 // (tokens * (2 if normed else 1))
        return Shape(warp_k, 8, 8, hopper and self.fp8, False)

    def _launch(
        self,
        dev: Device,
        op: str,
        M: int,
        units: int,
        rows_per_unit: int,
        K: int,
        args: list[Arg],
        dims: list[Arg],
        ws: RowsWorkspace,
        pdl: bool,
        R: int | None,
    ) -> None:
        normed = op in ("swiglu", "qkv", "logits")
        tokens = self.tokens(M, normed)
        kernel = dev.kernel(self.stem, f"gemv_rows_{op}_{'fp8' if self.fp8 else 'bf16'}_m{tokens}")
        p = self.plan(dev, kernel, units, rows_per_unit, K, tokens, normed, R, constants=2 if op == "qkv" else 1)
        need = p.S * (M * units * rows_per_unit + p.R * MAX_ROWS) if p.S > 1 and not p.together else 0
        have = ws.sums.shape[0]
        require(need <= have, f"gemv_rows_{op}: a workspace of {have} floats, {need} are needed")
        division: list[Arg] = [ws.sums, ws.counters, *(np.int32(n) for n in (p.S, p.K_block, p.G, p.together))]
        grid, block = (p.R * p.S, 1, 1), (p.warps * WARP, 1, 1)
        dev.launch(
            kernel,
            grid,
            block,
            [*args, *division, *dims],
            smem=p.smem,
            pdl=pdl,
            cluster=(p.S, 1, 1) if p.together else None,
        )

    def add(
        self,
        dev: Device,
        h: Buffer,
        x: Buffer,
        w: Linear,
        ws: RowsWorkspace,
        *,
        pdl: bool = False,
        R: int | None = None,
    ) -> None:
        """h f32 [M, N] += X·Wᵀ, x bf16 [M, K]."""
        M = x.shape[0]
        check_buffer(h, (M, w.N), F32, "h")
        check_buffer(x, (M, w.K), BF16, "x")
        dims: list[Arg] = [np.int32(n) for n in (w.N, M, w.K)]
        self._launch(dev, "add", M, w.N, 1, w.K, [h, x, *weight_args(self.fp8, w)], dims, ws, pdl, R)

    def store(
        self,
        dev: Device,
        y: Buffer,
        x: Buffer,
        w: Linear,
        ws: RowsWorkspace,
        *,
        pdl: bool = False,
        R: int | None = None,
    ) -> None:
        """y bf16 [M, N] = X·Wᵀ, x bf16 [M, K]: one rank's share of a row-parallel product."""
        M = x.shape[0]
        check_buffer(y, (M, w.N), BF16, "y")
        check_buffer(x, (M, w.K), BF16, "x")
        dims: list[Arg] = [np.int32(n) for n in (w.N, M, w.K)]
        self._launch(dev, "store", M, w.N, 1, w.K, [y, x, *weight_args(self.fp8, w)], dims, ws, pdl, R)

    def swiglu(
        self,
        dev: Device,
        act: Buffer,
        h: Buffer,
        g: Buffer,
        gate: Linear,
        up: Linear,
        eps: float,
        ws: RowsWorkspace,
        *,
        pdl: bool = False,
        R: int | None = None,
    ) -> None:
        """act bf16 [M, I] = silu(X̂·Wgᵀ)·(X̂·Wuᵀ), X̂ = RMSNorm(h f32 [M, K], g bf16 [K])."""
        require((gate.N, gate.K) == (up.N, up.K), f"gate is {gate.weight.shape}, up is {up.weight.shape}")
        M = h.shape[0]
        check_buffer(act, (M, gate.N), BF16, "act")
        check_buffer(h, (M, gate.K), F32, "h")
        check_buffer(g, (gate.K,), BF16, "g")
        dims: list[Arg] = [np.int32(gate.N), np.int32(M), np.int32(gate.K), np.float32(eps)]
        self._launch(
            dev, "swiglu", M, gate.N, 2, gate.K, [act, h, g, *weight_args(self.fp8, gate, up)], dims, ws, pdl, R
        )

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
        ws: RowsWorkspace,
        *,
        fine: Buffer | None = None,
        pdl: bool = False,
        R: int | None = None,
    ) -> None:
        """q bf16 [M, H, HD], and rows pos … pos + M - 1 of both caches [KV, max_len, HD], from h f32 [M, K].

        Caches are bf16, or e4m3 with `fine` (qwen_raw/kernels/kv_cache.py).
        bias f32 [N]; rope f32 [max_len, HD/2, 2], {cos, sin}; pos int32 [1] on the device, pos + M at most max_len.
        """
        (M, H, HD), (KV, max_len, _) = q.shape, k_cache.shape
        require(
            w.N == (H + 2 * KV) * HD, f"QKV weight has {w.N} rows, {H} + 2·{KV} heads of {HD} need {(H + 2 * KV) * HD}"
        )
        require(HD >= 2 and HD & (HD - 1) == 0, f"head_dim {HD} is not a power of two")
        require(max_len >= M, f"{M} rows, the cache holds {max_len}")
        check_buffer(q, (M, H, HD), BF16, "q")
        cache = cache_args(k_cache, v_cache, fine, KV, max_len, HD)
        check_buffer(h, (M, w.K), F32, "h")
        check_buffer(g, (w.K,), BF16, "g")
        check_buffer(bias, (w.N,), F32, "bias")
        check_buffer(rope, (max_len, HD // 2, 2), F32, "rope")
        require(pos.shape == (1,) and pos.dtype == I32, f"pos is {pos.dtype}{list(pos.shape)}, expected int32[1]")
        args = [*cache.with_pointers(q), h, g, *weight_args(self.fp8, w), bias, rope, pos]
        dims: list[Arg] = [np.int32(n) for n in (H, KV, HD.bit_length() - 2, max_len, cache.e4m3, M, w.K)]
        self._launch(dev, "qkv", M, w.N // 2, 2, w.K, args, [*dims, np.float32(eps)], ws, pdl, R)

    def logits(
        self,
        dev: Device,
        out: Buffer,
        h: Buffer,
        g: Buffer,
        w: Linear,
        eps: float,
        ws: RowsWorkspace,
        *,
        pdl: bool = False,
        R: int | None = None,
    ) -> None:
        """out f32 [M, V] = RMSNorm(h f32 [M, K], g bf16 [K])·Wᵀ."""
        M = h.shape[0]
        check_buffer(out, (M, w.N), F32, "logits")
        check_buffer(h, (M, w.K), F32, "h")
        check_buffer(g, (w.K,), BF16, "g")
        dims: list[Arg] = [np.int32(w.N), np.int32(M), np.int32(w.K), np.float32(eps)]
        self._launch(dev, "logits", M, w.N, 1, w.K, [out, h, g, *weight_args(self.fp8, w)], dims, ws, pdl, R)
