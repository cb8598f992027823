"""cuda_src/allreduce_rows.cu: the sum of a chunk and the norm behind it, each row by the rank that owns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import BF16, E4M3, F16, U32, U64, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.allreduce_flag import STRUCT
from qwen_raw.kernels.gemm_sm90 import BOX_ROWS
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.peers import (
    MAX_RANKS,
    PACK,
    PollLimit,
    connect,
    launch_polling,
    peer_struct,
    polling_blocks,
    ranks_on_gpu,
    variant,
)

STEM = "allreduce_rows"
KINDS: dict[str, np.dtype[Any]] = {"f16": F16, "bf16": BF16, "e4m3": E4M3}  # what normed rows are
SPREAD = "h_f32"  # the entry point that spreads h
WARP, HELD = 32, 16  # elements of a row by a thread
MOST_THREADS = 512
LONGEST = HELD * MOST_THREADS  # elements of a row
OCCUPANCY = 2  # most blocks of a multiprocessor
BLOCKS = 132 * OCCUPANCY  # most of a launch: every block number has its flags


def takes(D: int) -> bool:
    """Whether rows of D elements can be summed so."""
    return D % PACK == 0 and D <= LONGEST


def in_boxes(T: int, world: int) -> bool:
    """Whether owners of T rows have whole boxes, as a product that pushes needs (include/gemm_out_sm90.cuh)."""
    return T // world >= BOX_ROWS


def rows_of_owner(T: int, world: int) -> int:
    """Rows of T that each rank owns, but for the last ones, which may own fewer or none."""
    part = -(-T // world)
    return -(-part // BOX_ROWS) * BOX_ROWS if in_boxes(T, world) else part


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """Where one rank has what its peers read and write; each for as many rows as a call may have."""

    kind: str  # of KINDS
    share: Buffer  # bf16 [rows·D]
    out: Buffer  # [rows·D] the normed rows; may be the share's memory
    scale: Buffer | None  # f32 [rows], of e4m3
    h: Buffer  # f32 [rows·D]
    received: Buffer | None = None  # bf16 [world · rows_of_owner · D]: what peers push of this rank's rows


@dataclass(frozen=True, slots=True)
class RowsWorkspace:
    """One rank's end of a communicator; for one stream. It must outlive graphs that use it, as all its peers' must."""

    dev: Device
    rank: int
    world: int
    sharing: int  # ranks on this GPU
    most_blocks: int  # that the launcher chooses where one fits a multiprocessor: the same on all ranks
    buffers: tuple[RowBuffers, ...]  # every rank's
    flags: tuple[Buffer, ...]  # every rank's: u32 [2, BLOCKS, 8], zero
    epochs: Buffer  # u32 [BLOCKS], zero
    limit: PollLimit

    @property
    def kind(self) -> str:
        """What normed rows are: of KINDS."""
        return self.buffers[self.rank].kind

    @property
    def capacity(self) -> int:
        """Packs a message."""
        return self.buffers[self.rank].share.nbytes // 16

    @property
    def struct(self) -> np.ndarray[Any, Any]:
        """struct Flags, for normed rows of shares that lie where they were made."""
        return self.flags_struct(self.shares, [b.out for b in self.buffers])

    @property
    def shares(self) -> np.ndarray[Any, Any]:
        """struct Peers."""
        return peer_struct([b.share for b in self.buffers])

    def arrived(self, T: int, D: int) -> np.ndarray[Any, Any]:
        """struct Peers for shares of T rows that were pushed here: of each source, where its row 0 would be."""
        received, part = self.buffers[self.rank].received, self.part(T)
        require(received is not None, "there is no room for shares that are pushed")
        assert received is not None
        bases = np.zeros(MAX_RANKS, U64)
        bases[: self.world] = [received.ptr + 2 * D * part * (source - self.rank) for source in range(self.world)]
        return bases

    def part(self, T: int) -> int:
        """See rows_of_owner."""
        return rows_of_owner(T, self.world)

    def takes_pushed(self, T: int) -> bool:
        """See in_boxes."""
        return in_boxes(T, self.world)

    def parts(self, T: int, D: int) -> list[Buffer]:
        """Where this rank's shares of T rows go, owner by owner: bf16 [rows, D]."""
        n, found = self.part(T), []
        for owner, own in enumerate(self.buffers):
            rows = min(n, T - owner * n)
            if rows > 0:
                require(own.received is not None, "there is no room for shares that are pushed")
                assert own.received is not None
                found.append(own.received.view((rows, D), self.rank * n * D))
        return found

    def flags_struct(self, shares: np.ndarray[Any, Any], results: Sequence[Buffer]) -> np.ndarray[Any, Any]:
        """struct Flags. `shares`: struct Peers; `results`: every rank's."""
        peers = (shares, peer_struct(results), peer_struct(self.flags))
        own = (self.epochs.ptr, self.limit.struct(), self.rank, self.world, self.capacity, BLOCKS)
        return np.array([(*peers, *own)], STRUCT)

    @property
    def scales(self) -> np.ndarray[Any, Any]:
        """struct Peers."""
        scales = [b.scale for b in self.buffers if b.scale is not None]
        return peer_struct(scales) if scales else np.zeros(MAX_RANKS, U64)

    @staticmethod
    def create(devices: Sequence[Device], buffers: Sequence[RowBuffers], *, limit_ns: int) -> list[RowsWorkspace]:
        """All ranks' ends, zeroed and synchronised; `buffers`: of each rank, alike."""
        kind = buffers[0].kind
        connect(devices, STEM, [f"allreduce_rows_{name}" for name in (kind, SPREAD)])
        for dev, own in zip(devices, buffers, strict=True):
            alike = all(a.nbytes == b.nbytes for a, b in zip(_parts(own), _parts(buffers[0]), strict=True))
            require(own.kind == kind and alike, "the ranks' buffers differ")
            require(own.kind in KINDS, f"normed rows of {own.kind}: the kernel makes {', '.join(KINDS)}")
            require((kind == "e4m3") == (own.scale is not None), "rows of e4m3, and no others, have scales")
            for part in _parts(own):
                require(dev.owns(part), f"{part!r} is not of {dev.name}'s stream")
        flags = tuple(dev.zeros((2, BLOCKS, MAX_RANKS), U32) for dev in devices)
        most = min(polling_blocks(devices, rank) for rank in range(len(devices)))
        ends = [
            RowsWorkspace(
                dev, rank, len(devices), ranks_on_gpu(devices, rank), most, tuple(buffers), flags,
                dev.zeros((BLOCKS,), U32), PollLimit.create(dev, limit_ns),
            )
            for rank, dev in enumerate(devices)
        ]  # fmt: skip
        for dev in devices:
            dev.synchronize()
        return ends


def _parts(buffers: RowBuffers) -> list[Buffer]:
    every = (buffers.share, buffers.out, buffers.scale, buffers.h, buffers.received)
    return [part for part in every if part is not None]


def allreduce_rows(
    ws: RowsWorkspace,
    T: int,
    D: int,
    g: Buffer | None,
    eps: float,
    *,
    block: int | None = None,
    grid: int | None = None,
    pdl: bool = False,
    pushed: bool = False,
) -> None:
    """T rows of D: h += Σ over ranks of their shares, kept by a row's owner; out = RMSNorm(h)·g bf16 [D] on all ranks.

    Without `g` all ranks get h of all rows, and no norm. `pushed`: the shares were pushed to the rows' owners
    (RowsWorkspace.parts), else they lie where this rank has made them. Every rank must make the same calls in the same
    order, with the same T, D, block, grid and `pushed`.
    """
    own = ws.buffers[ws.rank]
    kind = own.kind
    multiple = 16 if kind == "e4m3" else PACK
    require(T > 0 and D > 0 and D % multiple == 0, f"{T} rows of {D} elements: need multiples of {multiple}")
    require(D <= LONGEST, f"rows of {D} elements, the kernel takes {LONGEST}")
    for buffer, itemsize in ((own.share, 2), (own.out, KINDS[kind].itemsize), (own.h, 4)):
        require(T * D * itemsize <= buffer.nbytes, f"{T} rows of {D} elements, {buffer!r} is smaller")
    if own.scale is not None:
        require(own.scale.nbytes >= 4 * T, f"{T} rows, there are scales of {own.scale.nbytes // 4}")
    if g is not None:
        check_buffer(g, (D,), BF16, "g")
    threads = block or max(WARP, -(-D // (WARP * HELD)) * WARP)
    require(
        WARP <= threads <= MOST_THREADS and threads % WARP == 0 and HELD * threads >= D,
        f"a block of {threads} threads for rows of {D} elements: whole warps, up to {MOST_THREADS}, {HELD} a thread",
    )
    name = f"allreduce_rows_{SPREAD if g is None else kind}"
    results = [b.h if g is None else b.out for b in ws.buffers]
    end = ws.flags_struct(ws.arrived(T, D) if pushed else ws.shares, results)
    blocks = grid or _blocks(ws, name, threads, ws.part(T))
    args: list[Arg] = [
        own.h,
        own.share if g is None else g,
        end,
        ws.scales,
        np.int32(T),
        np.int32(ws.part(T)),
        np.int32(D),
        np.float32(eps),
    ]
    launch_polling(ws, STEM, name, (blocks, 1, 1), threads, args, most=BLOCKS, pdl=pdl)


def _blocks(ws: RowsWorkspace, name: str, threads: int, rows: int) -> int:
    """As many as there is room for: the ranks' GPUs are alike. Where ranks share one, they leave each other room."""
    each = 1
    if ws.sharing == 1:
        kernel = ws.dev.kernel(STEM, f"{name}_r{variant(ws.world)}")
        each = max(1, min(OCCUPANCY, ws.dev.resident_blocks(kernel, threads, 0)))
    return max(1, min(rows, ws.most_blocks * each, BLOCKS))
