"""cuda_src/allreduce_flag.cu: a flag barrier, then peer reads."""

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
    Workspace,
    check_message,
    connect,
    launch_polling,
    message_grid,
    peer_struct,
    polling_blocks,
    ranks_on_gpu,
)

STEM = "allreduce_flag"
BLOCKS = 132  # most of a launch: every block number has its flags
STRUCT = np.dtype(
    [
        *((n, U64, MAX_RANKS) for n in ("data", "results", "flags")),
        ("epochs", U64),
        ("limit", U64, 2),
        *((n, I32) for n in ("rank", "world", "capacity", "blocks")),
    ]
)


@dataclass(frozen=True, slots=True)
class FlagWorkspace:
    """One rank's end of a communicator; for one stream. It must outlive graphs that use it, as all its peers' must."""

    dev: Device
    rank: int
    world: int
    capacity: int  # packs a message
    sharing: int  # ranks on this GPU
    most_blocks: int  # that launchers choose by themselves: the same on all ranks
    data: tuple[Buffer, ...]  # every rank's: u32 [2, capacity, 4]
    results: tuple[Buffer, ...]  # the same, of allreduce_twoshot
    flags: tuple[Buffer, ...]  # every rank's: u32 [2, BLOCKS, 8], zero
    epochs: Buffer  # u32 [BLOCKS], zero
    limit: PollLimit

    @property
    def struct(self) -> np.ndarray[Any, Any]:
        """struct Flags."""
        results = peer_struct(self.results) if self.results else np.zeros(MAX_RANKS, U64)
        peers = (peer_struct(self.data), results, peer_struct(self.flags))
        own = (self.epochs.ptr, self.limit.struct(), self.rank, self.world, self.capacity, BLOCKS)
        return np.array([(*peers, *own)], STRUCT)

    @staticmethod
    def create(devices: Sequence[Device], capacity: int, *, limit_ns: int) -> list[FlagWorkspace]:
        """All ranks' ends, zeroed and synchronised."""
        connect(devices, STEM, ["allreduce_flag_bf16", "allreduce_flag_add_bf16"])
        return create_ends(devices, capacity, limit_ns, results=False)


def create_ends(devices: Sequence[Device], capacity: int, limit_ns: int, *, results: bool) -> list[FlagWorkspace]:
    """All ranks' ends, zeroed and synchronised."""
    memory = [[dev.empty((2, capacity, 4), U32) for dev in devices] for _ in range(1 + results)]
    flags = tuple(dev.zeros((2, BLOCKS, MAX_RANKS), U32) for dev in devices)
    most = min(BLOCKS, *(polling_blocks(devices, rank) for rank in range(len(devices))))
    ends = [
        FlagWorkspace(
            dev, rank, len(devices), capacity, ranks_on_gpu(devices, rank), most, tuple(memory[0]),
            tuple(memory[1]) if results else (), flags, dev.zeros((BLOCKS,), U32), PollLimit.create(dev, limit_ns),
        )
        for rank, dev in enumerate(devices)
    ]  # fmt: skip
    for dev in devices:
        dev.synchronize()
    return ends


def check_block(ws: Workspace, block: int) -> None:
    """PRECOND: a thread to signal each peer."""
    require(
        ws.world <= block <= 512, f"a block of {block} threads: at least one for each of {ws.world} ranks, up to 512"
    )


def allreduce_flag(
    ws: FlagWorkspace,
    out: Buffer,
    inp: Buffer,
    *,
    add: bool = False,
    block: int = 128,
    grid: int | None = None,
    pdl: bool = False,
) -> None:
    """out bf16 [n] = Σ over ranks of inp bf16 [n]; `add`: out f32 [n] += that sum, unrounded.

    Every rank must make the same calls in the same order, with the same n, block and grid.
    """
    n = check_message(ws, out, inp, add)
    check_block(ws, block)
    blocks = message_grid(ws, n, block) if grid is None else grid
    name = f"allreduce_flag_{'add_' if add else ''}bf16"
    launch_polling(ws, STEM, name, (blocks, 1, 1), block, [out, inp, ws.struct, np.int32(n)], most=BLOCKS, pdl=pdl)
