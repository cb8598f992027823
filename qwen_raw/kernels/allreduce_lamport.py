"""cuda_src/allreduce_lamport.cu: the one-shot push, whose payload is its own flag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import I32, U32, U64, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.peers import (
    MAX_RANKS,
    PollLimit,
    check_message,
    connect,
    launch_polling,
    message_grid,
    peer_struct,
    polling_blocks,
    ranks_on_gpu,
)

STEM = "allreduce_lamport"
SENTINEL = 0x80000000
BUFFERS = 3
BLOCKS = 512  # most of a launch: every block number has its turn
# Packs from which blocks of a warp are faster, and the blocks up to which they are: at 7 KB few larger ones won, at
# 16 KB many small ones.
WARP, USUAL_THREADS = 32, 128
SMALL, SMALL_BLOCKS = 512, 32
STRUCT = np.dtype(
    [
        ("receive", U64, MAX_RANKS),
        ("turns", U64),
        ("limit", U64, 2),
        *((n, I32) for n in ("rank", "world", "capacity", "blocks")),
    ]
)


@dataclass(frozen=True, slots=True)
class LamportWorkspace:
    """One rank's end of a communicator; for one stream. It must outlive graphs that use it, as all its peers' must."""

    dev: Device
    rank: int
    world: int
    capacity: int  # packs a message
    sharing: int  # ranks on this GPU
    most_blocks: int  # that launchers choose by themselves
    receive: tuple[Buffer, ...]  # every rank's: u32 [3, world, capacity, 4], armed
    turns: Buffer  # u32 [BLOCKS, 4], zero
    limit: PollLimit

    @property
    def struct(self) -> np.ndarray[Any, Any]:
        """struct Lamport."""
        dims = (self.rank, self.world, self.capacity, BLOCKS)
        return np.array([(peer_struct(self.receive), self.turns.ptr, self.limit.struct(), *dims)], STRUCT)

    @staticmethod
    def create(devices: Sequence[Device], capacity: int, *, limit_ns: int) -> list[LamportWorkspace]:
        """All ranks' ends, armed and synchronised: no rank can store into memory that is not armed yet."""
        connect(devices, STEM, ["allreduce_lamport_bf16", "allreduce_lamport_add_bf16"])
        world = len(devices)
        armed = np.full((BUFFERS, world, capacity, 4), SENTINEL, np.uint32)
        receive = tuple(dev.array(armed) for dev in devices)
        ends = [
            LamportWorkspace(
                dev, rank, world, capacity, ranks_on_gpu(devices, rank), polling_blocks(devices, rank), receive,
                dev.zeros((BLOCKS, 4), U32), PollLimit.create(dev, limit_ns),
            )
            for rank, dev in enumerate(devices)
        ]  # fmt: skip
        for dev in devices:
            dev.synchronize()
        return ends


def allreduce_lamport(
    ws: LamportWorkspace,
    out: Buffer,
    inp: Buffer,
    *,
    add: bool = False,
    block: int | None = None,
    grid: int | None = None,
    pdl: bool = False,
) -> None:
    """out bf16 [n] = Σ over ranks of inp bf16 [n]; `add`: out f32 [n] += that sum, unrounded.

    Every rank must make the same calls in the same order, with the same n.
    """
    n = check_message(ws, out, inp, add)
    if block is None:
        block = WARP if SMALL < n <= WARP * min(SMALL_BLOCKS, ws.most_blocks) else USUAL_THREADS
    require(1 <= block <= 512, f"a block of {block} threads: 1 to 512")
    blocks = message_grid(ws, n, block) if grid is None else grid
    name = f"allreduce_lamport_{'add_' if add else ''}bf16"
    launch_polling(ws, STEM, name, (blocks, 1, 1), block, [out, inp, ws.struct, np.int32(n)], most=BLOCKS, pdl=pdl)
