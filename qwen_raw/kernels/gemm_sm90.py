"""Launchers of include/gemm_sm90.cuh's kernels, Hopper's prefill products: for gemm_bf16_sm90 and gemm_fp8_sm90."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import BF16, E4M3, F32, U8, U32, Arg, BoxShape, Buffer, Device, TensorMap
from qwen_raw.errors import QwenRawError, require
from qwen_raw.kernels.kv_cache import cache_args
from qwen_raw.kernels.linear import Linear, check_buffer, check_linear, check_span

P_ROWS, ROW_BYTES, BOX_ROWS = 128, 128, 64  # as in include/gemm_sm90.cuh
MAX_SPLIT_TILES, MOST_PIECES = 4096, 16
ARCH = "sm_90a"


@dataclass(frozen=True, slots=True)
class Variant:
    """One instance of the kernel. `few`: for at most BN tokens, the weights are the rows of a tile."""

    name: str
    few: bool
    BN: int
    stages: int
    blocks: int  # a multiprocessor holds
    cluster: int = 1  # blocks that share slices; 0: a cluster of as many blocks as a tile has pieces, which it cuts
    slice_us: float = 0.0  # that a tile's slice takes where all multiprocessors are busy, on an H200

    @property
    def heads_of_128(self) -> bool:
        """Whether its tiles of Q, K and V are of heads of 128 dimensions: those that are cut or mix heads."""
        return not self.cluster or (not self.few and self.BN % P_ROWS > 0)

    @property
    def threads(self) -> int:
        """Of a block: two warpgroups multiply; the producers are two warps where clusters cut tiles."""
        return 384 if self.cluster else 320

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: the ring, its barriers, what outputs need, a tile's sums where it is cut."""
        sums = 0 if self.cluster else P_ROWS * self.BN * 4
        outputs = -(-16 * self.BN // 1024) * 1024
        return self.stages * (P_ROWS + self.BN) * ROW_BYTES + 1024 + outputs + sums

    def _tiles(self, T: int, rows: int) -> tuple[int, int]:
        """Tiles of P with a cluster's as one, times tiles of Q; and the other way round."""
        p, q = (rows, T) if self.few else (T, rows)
        p, q = -(-p // P_ROWS), -(-q // self.BN)
        n = self.cluster or 1
        return -(-p // n) * q, p * -(-q // n)

    def tiles(self, T: int, rows: int) -> int:
        """A cluster's tiles in a product of T tokens with `rows` rows of weights (pairs counted twice)."""
        return min(self._tiles(T, rows))

    def share_p(self, T: int, rows: int) -> bool:
        """Whether a cluster's blocks are neighbours along Q and share P's slices: where that leaves fewer tiles."""
        along_p, along_q = self._tiles(T, rows)
        return along_q < along_p

    def clusters(self, sm_count: int) -> int:
        """That are on the device together."""
        return self.blocks * sm_count // (self.cluster or 1)


VARIANTS = {
    v.name: v
    for v in (
        Variant("few16", True, 16, 6, 2),
        Variant("few64", True, 64, 4, 2),
        Variant("cut128", False, 128, 5, 1, 0, 0.42),
        Variant("many112", False, 112, 7, 1, 2, 0.37),
        Variant("many128", False, 128, 6, 1, 2, 0.385),
        Variant("many144", False, 144, 6, 1, 2, 0.42),
        Variant("many160", False, 160, 6, 1, 2, 0.46),
        Variant("many192", False, 192, 5, 1, 2, 0.555),
        Variant("many224", False, 224, 5, 1, 2, 0.655),
        Variant("many256", False, 256, 4, 1, 2, 0.73),
    )
}
MAX_OWNERS = 8
# Which of them an operation has.
FEW = ("few16", "few64")
LONG = 8  # waves from which on the last one is left as it is
CUT_CLUSTERS = {2: 66, 3: 36, 4: 28}  # of so many blocks, that an H200 is known to hold together
CUTS = tuple(CUT_CLUSTERS)
_EVERYWHERE = (*FEW, "many128", "many256")
OPERATIONS = {
    "qkv": (*FEW, "many128", "many144", "many160", "many192", "many256", "cut128"),
    "add": (*_EVERYWHERE, "many112", "many192", "many224", "cut128"),
    "store": (*_EVERYWHERE, "many112", "many144", "many160", "many192", "many224", "cut128"),
    "swiglu": (*_EVERYWHERE, "many144", "many192", "many224"),
    # Of tokens with a scale for each slice.
    "add_blocks": ("many128", "many192", "many224", "many256"),
}
# Rows that are dealt out to their owners go through trays.
DEALT = tuple(n for n in OPERATIONS["store"] if not VARIANTS[n].few and VARIANTS[n].cluster)


def most_pieces(rest: int, clusters: int, slices: int) -> int:
    """Into how many pieces the tiles that do not fill a wave of clusters can be cut, so that no cluster has two."""
    return max(1, min(clusters // rest, slices, MOST_PIECES)) if rest else 1


@dataclass(frozen=True, slots=True)
class Choice:
    """How to run one product: the kernel, and into how many pieces along K it may cut tiles that do not fill a wave."""

    variant: Variant
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial sums of tiles that several blocks share. One stream may use it at a time."""

    partials: Buffer  # f32
    counters: Buffer  # u32 [MAX_SPLIT_TILES], zero between launches

    @staticmethod
    def create(dev: Device) -> Workspace:
        """For every variant on this device."""
        most = max(v.blocks * dev.sm_count * P_ROWS * v.BN for v in VARIANTS.values())
        return Workspace(dev.empty((most,), F32), dev.zeros((MAX_SPLIT_TILES,), U32))


def cut_pieces(tiles: int, slices: int) -> int:
    """Into how many pieces clusters can cut all tiles and be on the device together; 1: they cannot."""
    return max((n for n, most in CUT_CLUSTERS.items() if tiles <= most and n <= slices), default=1)


def choose(op: str, T: int, rows: int, slices: int, sm_count: int, HD: int = 128, dealt: bool = False) -> Choice:
    """The fastest by a model of times measured on an H200 (docs/prefill.md); few tokens take the narrowest tile.

    `rows`: of weights, pairs counted twice; `slices`: of 128 bytes in K; HD: of heads, where they matter; `dealt`: c's
    rows go to several owners.
    """
    few = [VARIANTS[name] for name in OPERATIONS[op] if name in FEW and VARIANTS[name].BN >= T]
    if few:
        return Choice(few[0], MOST_PIECES)
    end = 5.0 if op.startswith("add") else 3.0  # what becomes of a tile's sums

    def us(choice: Choice) -> float:
        v = choice.variant
        # One tile of tokens: weights come no faster than memory gives them.
        slice_us = v.slice_us if T > P_ROWS else max(v.slice_us, v.BN * ROW_BYTES * sm_count / 4.2e6)
        if not v.cluster:
            return slices / choice.pieces * slice_us + end + 2
        waves, rest = divmod(v.tiles(T, rows), v.clusters(sm_count))
        time = waves * (slices * slice_us + end)
        if rest:
            time += slices / choice.pieces * slice_us + end
        if choice.pieces > 1:
            time += 4 + choice.pieces * v.BN / 64  # partial sums to memory and back
        return time

    candidates = []
    for name in DEALT if dealt else OPERATIONS[op]:
        v = VARIANTS[name]
        tiles, clusters = v.tiles(T, rows), v.clusters(sm_count)
        if op == "qkv" and v.heads_of_128 and HD != P_ROWS:
            continue
        if not v.cluster:
            pieces = cut_pieces(tiles, slices)
            if pieces > 1:
                candidates.append(Choice(v, pieces))
        elif name not in FEW:
            most = most_pieces(tiles % clusters, clusters, slices) if tiles < LONG * clusters else 1
            candidates += [Choice(v, n) for n in sorted({1, most})]
    return min(candidates, key=us)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens' operand: x [T, K] bf16, or e4m3 with one fp32 scale a token, or with one for each of its slices."""

    values: Buffer  # [T, K]
    scale: Buffer | None = None  # [T], e4m3 only
    exponents: Buffer | None = None  # u8 [T, exponent_row(K)], e4m3 only (include/block_scale.cuh)


def exponent_row(K: int) -> int:
    """Bytes of the exponents of K columns: one for each 128, in whole packs of 16."""
    return -(-K // (ROW_BYTES * 16)) * 16


@dataclass(frozen=True, slots=True)
class GemmSm90:
    """One weight type's kernels: C = x·Wᵀ, x [T, K] of the weights' type."""

    stem: str
    fp8: bool
    workspace: Workspace
    pdl: bool = True  # dependent launches: not where ranks share a GPU

    def qkv(
        self,
        dev: Device,
        q: Buffer,
        k_cache: Buffer,
        v_cache: Buffer,
        x: Tokens,
        w: Linear,
        bias: Buffer,
        rope: Buffer,
        span: Buffer,
        choice: Choice | None = None,
        fine: Buffer | None = None,
    ) -> None:
        """q bf16 [T, H, HD], and rows pos0 … of both caches [KV, max_len, HD], from x [T, K].

        Caches are bf16, or e4m3 with `fine` (qwen_raw/kernels/kv_cache.py).
        bias f32 [N]; rope f32 [max_len, HD/2, 2], {cos, sin}; span int32 [2]: {pos0, how many of the T rows are
        tokens}; the others are written nowhere.
        """
        (_, H, HD), (KV, max_len, _) = q.shape, k_cache.shape
        heads = H + 2 * KV
        require(heads * HD == w.N, f"QKV weight has {w.N} rows, {H} + 2·{KV} heads of {HD} are {heads * HD}")
        require(HD in (64, 128), f"head_dim {HD}: this kernel has 64 and 128")
        check_span(span)
        check_buffer(q, (x.values.shape[0], H, HD), BF16, "q")
        cache = cache_args(k_cache, v_cache, fine, KV, max_len, HD)
        check_buffer(bias, (w.N,), F32, "bias")
        check_buffer(rope, (max_len, HD // 2, 2), F32, "rope")
        dims = [H, KV, (HD // 2).bit_length() - 1, max_len, int(cache.e4m3)]
        self._launch(dev, "qkv", choice, [q, *cache.pointers], x, [w], [bias, rope, span], dims)

    def swiglu(
        self, dev: Device, act: Buffer, x: Tokens, gate: Linear, up: Linear, choice: Choice | None = None
    ) -> None:
        """act bf16 [T, I] = silu(x·Wgᵀ)·(x·Wuᵀ); in memory `up` follows `gate`."""
        require((gate.N, gate.K) == (up.N, up.K), f"gate is {gate.weight.shape}, up is {up.weight.shape}")
        require(gate.N % 8 == 0, f"{gate.N} intermediate columns are not a multiple of 8")
        T = x.values.shape[0]
        check_buffer(act, (T, gate.N), BF16, "act")
        behind = up.weight.ptr == gate.weight.ptr + gate.weight.nbytes
        require(behind, "the up-projection's weight does not lie behind the gate's: load both as one")
        self._launch(dev, "swiglu", choice, [act], x, [gate, up], [], [gate.N])

    def _exponents(self, x: Tokens) -> Buffer:
        (T, K) = x.values.shape
        require(x.exponents is not None and self.fp8, "tokens without a scale for each slice")
        assert x.exponents is not None
        check_buffer(x.exponents, (T, exponent_row(K)), U8, "exponents")
        return x.exponents

    def add(self, dev: Device, h: Buffer, x: Tokens, w: Linear, choice: Choice | None = None) -> None:
        """h f32 [T, N] += x·Wᵀ."""
        T = x.values.shape[0]
        check_buffer(h, (T, w.N), F32, "h")
        self._launch(dev, "add" if x.exponents is None else "add_blocks", choice, [h], x, [w], [], [w.N])

    def store(self, dev: Device, c: Buffer, x: Tokens, w: Linear, choice: Choice | None = None) -> None:
        """c bf16 [T, N] = x·Wᵀ; no x with exponents."""
        T = x.values.shape[0]
        check_buffer(c, (T, w.N), BF16, "c")
        self._launch(dev, "store", choice, [c], x, [w], [], [w.N])

    def push(self, dev: Device, parts: Sequence[Buffer], x: Tokens, w: Linear, choice: Choice | None = None) -> None:
        """The rows of `store`'s c, dealt out: bf16 [n, N] each, n the same but for the last, whole boxes; also of
        devices that are peers. More than P_ROWS tokens."""
        T, n = x.values.shape[0], parts[0].shape[0]
        require(T > P_ROWS, f"{T} tokens: rows are dealt out from {P_ROWS + 1} on")
        require(len(parts) <= MAX_OWNERS, f"{len(parts)} owners of rows: the kernel takes {MAX_OWNERS}")
        require(-(-T // n) == len(parts), f"{T} rows are not {len(parts)} parts of {n}")
        require(n % BOX_ROWS == 0 or n == T, f"parts of {n} rows: an owner has whole boxes of {BOX_ROWS}")
        for i, part in enumerate(parts):
            check_buffer(part, (min(n, T - i * n), w.N), BF16, "c")
        self._launch(dev, "store", choice, list(parts), x, [w], [], [w.N])

    def _launch(
        self,
        dev: Device,
        op: str,
        choice: Choice | None,
        outputs: list[Buffer],
        x: Tokens,
        weights: list[Linear],
        more: list[Arg],
        dims: list[int],
    ) -> None:
        """`weights`: one behind the other in memory; `more` and `dims`: behind the maps."""
        (T, K), first = x.values.shape, weights[0]
        rows = sum(w.N for w in weights)
        for w in weights:
            check_linear(w, self.fp8)
        require(first.N % 8 == 0, f"{first.N} rows of weights are not a multiple of 8")
        check_buffer(x.values, (T, first.K), E4M3 if self.fp8 else BF16, "x")
        scales: list[Buffer] = []
        if x.exponents is not None:
            scales = [self._exponents(x), *(w.scale for w in weights if w.scale is not None)]
        elif self.fp8:
            require(x.scale is not None, "e4m3 tokens without scales")
            scales = [b for b in (x.scale, *(w.scale for w in weights)) if b is not None]
            check_buffer(scales[0], (T,), F32, "the tokens' scale")
        slices = -(-K * x.values.dtype.itemsize // ROW_BYTES)
        HD = outputs[0].shape[2] if op == "qkv" else 128
        dealt = op == "store" and len(outputs) > 1
        choice = choice or choose(op, T, rows, slices, dev.sm_count, HD, dealt)
        v, clusters = choice.variant, choice.variant.clusters(dev.sm_count)
        if v.name not in (DEALT if dealt else OPERATIONS[op]) or (v.few and T > v.BN):
            raise QwenRawError(f"gemm_{op} for {T} tokens does not have the variant {v.name}")
        tiles, share_p = v.tiles(T, rows), v.share_p(T, rows)
        if v.cluster:
            rest = tiles % clusters
            pieces = min(choice.pieces, most_pieces(rest, clusters, slices))
            split = rest if pieces > 1 and rest * v.cluster <= MAX_SPLIT_TILES else 0
            grid = v.cluster * min(clusters, tiles - split + split * pieces)
        else:
            legal = choice.pieces in CUTS and choice.pieces <= slices
            require(legal, f"{v.name} in {choice.pieces} pieces of {slices} slices: a cluster cuts a tile in {CUTS}")
            pieces, split, grid = choice.pieces, tiles, tiles * choice.pieces
        w_box, x_box = (P_ROWS, v.BN) if v.few else (v.BN, P_ROWS)
        if op == "swiglu":
            w_box //= 2
        elif op == "qkv":
            require(HD == P_ROWS or not v.heads_of_128, f"{v.name} takes heads of {P_ROWS} dimensions")
            w_box = HD // 2 if v.cluster else HD
        elif v.cluster > 1 and not share_p:
            w_box //= v.cluster
        if share_p:
            x_box //= v.cluster
        x_map = _rows(dev, [x.values], x_box)
        w_map = _rows(dev, [w.weight for w in weights], w_box)
        y_map = w_map  # not looked at
        if op == "qkv" and v.heads_of_128 and v.cluster:
            y_map = _rows(dev, [w.weight for w in weights], v.BN // 2 - w_box)  # the weights' smaller boxes
        elif op != "qkv" and not v.few and v.cluster:
            y_map = _rows(dev, outputs[:1], BOX_ROWS)
        workspace = self.workspace
        if op == "store":
            more = [
                *more,
                _owners([y_map, *(_rows(dev, [part], BOX_ROWS) for part in outputs[1:])], outputs[0].shape[0]),
            ]
            outputs = outputs[:1]
        args: list[Arg] = [*outputs, x_map, w_map, y_map, workspace.partials, workspace.counters, *scales, *more]
        args += [np.int32(n) for n in (*dims, T, K, split, pieces, share_p)]
        kernel = dev.kernel(self.stem, f"gemm_{op}_{'fp8' if self.fp8 else 'bf16'}_{v.name}")
        size = v.cluster or pieces
        cluster = (size, 1, 1) if size > 1 else None
        dev.launch(kernel, (grid, 1, 1), (v.threads, 1, 1), args, smem=v.smem, pdl=self.pdl, cluster=cluster)


def _owners(maps: Sequence[TensorMap], part: int) -> np.ndarray[Any, Any]:
    """struct RowOwners. What the maps reach into must outlive graphs with it; the first is an argument besides."""
    words = np.zeros(16 * MAX_OWNERS + 8, np.uint64)
    words[: 16 * len(maps)] = np.concatenate([m.words for m in maps])
    words[16 * MAX_OWNERS] = part
    return words


def _rows(dev: Device, matrices: list[Buffer], box: int) -> TensorMap:
    """Boxes of 128 bytes of `box` rows, of matrices that follow each other in memory."""
    K, item = matrices[0].shape[1], matrices[0].dtype.itemsize
    shape = BoxShape((K, sum(m.shape[0] for m in matrices)), (K * item,), (ROW_BYTES // item, box))
    return dev.tensor_map(matrices, shape)
