"""Launchers of include/exchange.cuh's kernels, shared by gemv_exchange_bf16 and gemv_exchange_fp8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import BF16, F32, I32, U64, Buffer, Device, Kernel
from qwen_raw.errors import require
from qwen_raw.kernels.allreduce_lamport import SENTINEL
from qwen_raw.kernels.gemv import Gemv, shared_bytes
from qwen_raw.kernels.linear import Linear, check_buffer, weight_args
from qwen_raw.kernels.peers import MAX_RANKS, PollLimit, connect_devices, peer_struct, ranks_on_gpu

STRUCT = np.dtype(
    [("receive", U64, MAX_RANKS), ("limit", U64, 2), *((n, I32) for n in ("rank", "world", "D", "log_lanes"))]
)
AHEAD_STRUCT = np.dtype(
    [*((n, U64) for n in ("first", "second", "row")), *((n, I32) for n in ("units", "blocks", "log_half", "rows"))]
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's end of the sums inside of products; for one stream. It must outlive graphs that use it, as its peers'.

    Sums are numbered from 0 in each step: even after O, odd after down, none left out.
    """

    dev: Device
    rank: int
    world: int
    D: int
    sharing: int  # ranks on this GPU
    receive: tuple[Buffer, ...]  # every rank's: u32 [2, world, D], armed
    limit: PollLimit

    @property
    def struct(self) -> np.ndarray[Any, Any]:
        """struct Exchange."""
        dims = (self.rank, self.world, self.D, (self.world - 1).bit_length())
        return np.array([(peer_struct(self.receive), self.limit.struct(), *dims)], STRUCT)

    @staticmethod
    def create(devices: Sequence[Device], D: int, *, limit_ns: int) -> list[Exchange]:
        """All ranks' ends, armed and synchronised. D: elements of the residual stream."""
        connect_devices(devices)
        require(D > 0, f"a residual stream of {D} elements")
        world = len(devices)
        receive = tuple(dev.array(np.full((2, world, D), SENTINEL, np.uint32)) for dev in devices)
        ends = [
            Exchange(dev, rank, world, D, ranks_on_gpu(devices, rank), receive, PollLimit.create(dev, limit_ns))
            for rank, dev in enumerate(devices)
        ]
        for dev in devices:
            dev.synchronize()
        return ends


@dataclass(frozen=True, slots=True)
class Next:
    """The product that follows: its weights' beginning is fetched into L2 while ranks wait for each other.

    `op`, `linears`: "swiglu" of gate and up, "qkv" or "logits" of one matrix; `half`: "qkv": dimensions of half a head.
    """

    gemv: Gemv
    op: str
    linears: tuple[Linear, ...]
    half: int = 0

    def struct(self, dev: Device, nbytes: int) -> np.ndarray[Any, Any]:
        """struct Ahead: about `nbytes` of what each of its blocks reads first."""
        w, paired = self.linears[0], self.op != "logits"
        row, units = w.row_bytes, w.N // 2 if self.op == "qkv" else w.N
        second = 0
        if self.op == "swiglu":
            second = self.linears[1].weight.ptr
        elif self.op == "qkv":
            second = w.weight.ptr + self.half * row
        blocks = self.gemv.blocks(dev, self.op, units, 2 if paired else 1, w.K)
        log_half = self.half.bit_length() - 1 if self.op == "qkv" else 31
        rows = nbytes // (row * (2 if paired else 1))
        return np.array([(w.weight.ptr, second, row, units, blocks, log_half, rows)], AHEAD_STRUCT)


NOTHING = np.zeros(1, AHEAD_STRUCT)


@dataclass(frozen=True, slots=True)
class GemvExchange:
    """One weight type's kernels."""

    stem: str
    gemv: Gemv  # the products without ranks: the same variants and geometry

    def load(self, devices: Sequence[Device], widths: Sequence[int]) -> None:
        """Load what products of rows of `widths` launch, before any of them runs.

        Loading one later may wait, for ever, for one that waits for it.
        """
        for dev in devices:
            for K in widths:
                self._kernel(dev, K)

    def takes(self, K: int) -> bool:
        """Whether there is a variant for rows of K weights."""
        return self.gemv.variants.longest(self.gemv.variants.add_threads) >= K

    def _kernel(self, dev: Device, K: int) -> tuple[Kernel, int, int]:
        variant, threads, largest = self.gemv.variants.choose("store", K)
        return dev.kernel(self.stem, f"{self.stem}_{variant}"), threads, largest

    def add(
        self,
        end: Exchange,
        number: int,
        h: Buffer,
        x: Buffer,
        w: Linear,
        *,
        ahead: np.ndarray[Any, Any] = NOTHING,
        pdl: bool = False,
        grid: int | None = None,
    ) -> None:
        """h f32 [N] += Σ over ranks of W·x, x bf16 [K]: sum `number` of the step. Every rank must queue the same sums.

        `ahead`: Next.struct(). `pdl`: an ordinary launch where ranks share a GPU.
        """
        dev = end.dev
        require(w.N == end.D, f"a product of {w.N} rows, the ranks exchange {end.D}")
        check_buffer(h, (w.N,), F32, "h")
        check_buffer(x, (w.K,), BF16, "x")
        require(dev.owns(h) and dev.owns(x), f"h or x is not of {dev.name}'s stream, which rank {end.rank} belongs to")
        kernel, threads, largest = self._kernel(dev, w.K)
        # One wave, because blocks wait for other ranks'. Where ranks share a GPU: of half of it.
        blocks = smem = resident = 0
        for per_sm in range(self.gemv.blocks_per_sm or 2, 0, -1):
            room = dev.sm_count * per_sm
            blocks = min(w.N, grid or (room if end.sharing == 1 else max(1, room // (2 * end.sharing))))
            smem = shared_bytes(w.N, blocks, 1, largest)
            resident = dev.resident_blocks(kernel, threads, smem)
            if resident >= per_sm or (grid and resident):
                break
        require(resident > 0, f"{self.stem}: {w.N} rows in {blocks} blocks need {smem} bytes of shared memory each")
        room = resident * dev.sm_count // end.sharing
        require(blocks <= room, f"{self.stem}: {blocks} blocks wait for each other, {dev.name} holds {room} at once")
        dims = (np.int32(w.N), np.int32(w.K))
        args = [h, end.struct, np.int32(number), ahead, x, *weight_args(self.gemv.fp8, w), *dims]
        dev.launch(kernel, (blocks, 1, 1), (threads, 1, 1), args, smem=smem, pdl=pdl and end.sharing == 1)
