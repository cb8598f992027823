"""cuda_src/loop.cu: whether a graph repeats its pass once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import I32, U32, Arg, Buffer, Device, HostRing
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.peers import PollLimit, peer_struct

STEM = "loop"


LOG = 8  # replays whose passes are remembered
MOST = (1 << 31) - 1
END, ROOM = 0, 1  # words of what the host asks


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """One rank's end of graphs that loop, of which one runs at a time."""

    rank: int
    world: int
    state: Buffer  # u32 [4]: number of the replay, its passes, calls
    asked: HostRing  # u64 [2], rank 0's: the last replay that is to end; the step number that there is room up to
    told: HostRing  # u64 [1 + LOG]: the last replay that has ended, and its passes at 1 + number % LOG
    mailbox: Buffer  # u32 [1]
    peers: np.ndarray[Any, Any]  # struct Peers: all mailboxes
    limit: PollLimit

    @staticmethod
    def create_ranks(devices: Sequence[Device], limits: Sequence[PollLimit]) -> list[LoopEnd]:
        """All ranks' ends, synchronised. `limits`: how long each waits. Ranks are peers already.

        Raises UnavailableError where a device has no loops.
        """
        for dev in devices:
            dev.require_loops()
        mailboxes = [dev.zeros((1,), U32) for dev in devices]
        peers = peer_struct(mailboxes)
        ends = []
        for rank, (dev, mailbox, limit) in enumerate(zip(devices, mailboxes, limits, strict=True)):
            state, asked, told = dev.zeros((4,), U32), dev.host_ring(2), dev.host_ring(1 + LOG)
            ends.append(LoopEnd(rank, len(devices), state, asked, told, mailbox, peers, limit))
        for dev in devices:
            for name in (
                "loop_begin",
                "loop_again",
            ):  # before ranks wait for each other: loading may wait for what runs
                dev.kernel(STEM, name)
            dev.synchronize()
        return ends


def loop_begin(dev: Device, end: LoopEnd, handle: np.ndarray[Any, Any], state: Buffer, limit: Buffer) -> None:
    """Before the loop: set `handle`, which the capture gave, unless state i32 [4] has as many ids as limit u32 [1]."""
    _check(state, limit)
    args: list[Arg] = [handle, state, limit, end.state, end.told.buffer]
    dev.launch(dev.kernel(STEM, "loop_begin"), (1, 1, 1), (32, 1, 1), args)


def loop_again(
    dev: Device,
    end: LoopEnd,
    handle: np.ndarray[Any, Any],
    state: Buffer,
    limit: Buffer,
    rows: int,
    *,
    most: int = MOST,
    pdl: bool = False,
) -> None:
    """At the end of the loop's body, which posts up to `rows` ids: the same, for up to `most` passes a replay.

    And until the host asks for the end, or its ring is full. Every rank launches this; between two calls all ranks must
    have met, as they do in `accept`.
    """
    require(most > 0 and rows > 0, f"a loop of {most} passes of {rows} rows")
    _check(state, limit)
    args: list[Arg] = [handle, state, limit, end.state, end.asked.buffer, end.told.buffer]
    args += [np.int32(most), np.int32(rows), end.peers, np.int32(end.rank), np.int32(end.world), end.limit.struct()]
    dev.launch(dev.kernel(STEM, "loop_again"), (1, 1, 1), (32, 1, 1), args, pdl=pdl)


def _check(state: Buffer, limit: Buffer) -> None:
    check_buffer(state, (4,), I32, "state")
    check_buffer(limit, (1,), U32, "limit")
