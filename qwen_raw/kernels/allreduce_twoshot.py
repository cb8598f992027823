"""cuda_src/allreduce_twoshot.cu: reduce-scatter and all-gather in one kernel, for large messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import U32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.peers import MAX_RANKS, PollLimit, check_message, load_everywhere, message_grid, peer_struct

STEM = "allreduce_twoshot"
BLOCKS = 64  # flag words are laid out for this many blocks


@dataclass(frozen=True, slots=True)
class TwoShotWorkspace:
    """One rank's end of a communicator; for one stream. All ranks use the same grids."""

    dev: Device
    rank: int
    world: int
    capacity: int  # packs a message
    payload: Buffer  # u32 [2, capacity, 4]
    results: Buffer  # u32 [2, capacity, 4]
    flags: Buffer  # u32 [2, BLOCKS, 8], zero
    control: Buffer  # u32 [2]: calls, arrived
    data_peers: np.ndarray[Any, Any]
    result_peers: np.ndarray[Any, Any]
    flag_peers: np.ndarray[Any, Any]
    limit: PollLimit

    @staticmethod
    def create(devices: Sequence[Device], capacity: int, *, limit_ns: int) -> list[TwoShotWorkspace]:
        """All ranks' ends, zeroed and synchronised."""
        payload = [dev.empty((2, capacity, 4), U32) for dev in devices]
        results = [dev.empty((2, capacity, 4), U32) for dev in devices]
        flags = [dev.zeros((2, BLOCKS, MAX_RANKS), U32) for dev in devices]
        control = [dev.zeros((2,), U32) for dev in devices]
        load_everywhere(devices, STEM, [f"allreduce_twoshot_{add}bf16" for add in ("", "add_")])
        for dev in devices:
            dev.synchronize()
        peers = (peer_struct(payload), peer_struct(results), peer_struct(flags))
        return [
            TwoShotWorkspace(
                dev, r, len(devices), capacity, payload[r], results[r], flags[r], control[r], *peers,
                PollLimit.create(dev, limit_ns),
            )
            for r, dev in enumerate(devices)
        ]  # fmt: skip


def allreduce_twoshot(
    ws: TwoShotWorkspace,
    out: Buffer,
    inp: Buffer,
    *,
    add: bool = False,
    block: int = 512,
    grid: int | None = None,
    pdl: bool = False,
) -> None:
    """out bf16 [n] = Σ over ranks of inp bf16 [n]; `add`: out f32 [n] += that sum rounded to bf16. out may not be inp.

    Every rank must make the same calls in the same order, with the same n, block and grid.
    """
    n = check_message(out, inp, ws.capacity, add)
    blocks = grid or message_grid(ws.dev, n, block, BLOCKS)
    require(blocks <= BLOCKS, f"{blocks} blocks, the flags are laid out for {BLOCKS}")
    require(block >= ws.world, f"a block of {block} threads cannot signal {ws.world} ranks")
    kernel = ws.dev.kernel(STEM, f"allreduce_twoshot_{'add_' if add else ''}bf16")
    dims = [np.int32(x) for x in (ws.rank, ws.world, n, ws.capacity, BLOCKS)]
    peers = [ws.data_peers, ws.result_peers, ws.flag_peers]
    args: list[Arg] = [out, inp, *peers, ws.control, *dims, ws.limit.struct()]
    ws.dev.launch(kernel, (blocks, 1, 1), (block, 1, 1), args, pdl=pdl)
