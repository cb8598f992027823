"""cuda_src/allreduce_lamport.cu: the one-shot push, whose payload is its own flag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import U32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.peers import (
    MAX_RANKS,
    SENTINEL,
    PollLimit,
    check_message,
    load_everywhere,
    message_grid,
    peer_struct,
    polling_blocks,
    ranks_on_gpu,
)

STEM = "allreduce_lamport"
BUFFERS = 3


@dataclass(frozen=True, slots=True)
class LamportWorkspace:
    """One rank's end of a communicator; for one stream."""

    dev: Device
    rank: int
    world: int
    capacity: int  # packs a message
    receive: Buffer  # u32 [3, world, capacity, 4], armed
    control: Buffer  # u32 [6]: rotation, arrived, length of each buffer, calls
    peers: np.ndarray[Any, Any]  # struct Peers
    limit: PollLimit
    most_blocks: int  # of a launch

    @staticmethod
    def create(devices: Sequence[Device], capacity: int, *, limit_ns: int) -> list[LamportWorkspace]:
        """All ranks' ends, armed and synchronised: no rank can store into memory that is not armed yet."""
        world = len(devices)
        require(1 <= world <= MAX_RANKS, f"{world} ranks: the kernels take 1 to {MAX_RANKS}")
        receive = [dev.array(np.full((BUFFERS, world, capacity, 4), SENTINEL, np.uint32)) for dev in devices]
        control = [dev.zeros((6,), U32) for dev in devices]
        load_everywhere(devices, STEM, [f"allreduce_lamport_{add}bf16" for add in ("", "add_")])
        for dev in devices:
            dev.synchronize()
        peers = peer_struct(receive)
        return [
            LamportWorkspace(
                dev, rank, world, capacity, receive[rank], control[rank], peers, PollLimit.create(dev, limit_ns),
                polling_blocks(dev, ranks_on_gpu(devices, rank)),
            )
            for rank, dev in enumerate(devices)
        ]  # fmt: skip


def allreduce_lamport(
    ws: LamportWorkspace,
    out: Buffer,
    inp: Buffer,
    *,
    add: bool = False,
    block: int = 128,
    grid: int | None = None,
    pdl: bool = False,
) -> None:
    """out bf16 [n] = Σ over ranks of inp bf16 [n]; `add`: out f32 [n] += that sum, unrounded. out may not be inp.

    Every rank must make the same calls in the same order, with the same n.
    """
    n = check_message(out, inp, ws.capacity, add)
    kernel = ws.dev.kernel(STEM, f"allreduce_lamport_{'add_' if add else ''}bf16")
    dims = [np.int32(x) for x in (ws.rank, ws.world, n, ws.capacity)]
    args: list[Arg] = [out, inp, ws.peers, ws.control, *dims, ws.limit.struct()]
    blocks = grid or message_grid(ws.dev, n, block, ws.most_blocks)
    ws.dev.launch(kernel, (blocks, 1, 1), (block, 1, 1), args, pdl=pdl)
