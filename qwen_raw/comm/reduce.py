"""Sums over ranks: one `Reducer` a rank, whatever the path.

A reducer belongs to one device and its main stream. Every rank must make the same calls in the same order, and the host
must queue all ranks' calls before it waits for any: a rank's kernel waits, on the device, for what the others send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qwen_raw.device import Buffer, Device
from qwen_raw.errors import UsageError, require
from qwen_raw.kernels.allreduce_lamport import LamportWorkspace, allreduce_lamport
from qwen_raw.kernels.peers import MAX_RANKS, PACK

PATHS = ("lamport",)


class Reducer(Protocol):
    """One rank's end of a communicator, for the main stream of its device."""

    @property
    def path(self) -> str:
        """How: one of PATHS."""

    def add(self, h: Buffer, partial: Buffer, *, pdl: bool = False) -> None:
        """Queue h f32 [n] += Σ over ranks, in rank order, of partial bf16 [n]; n a multiple of 8.

        Every rank's h ends with the same bits where it began with the same. Captured like any launch, but for path
        "host". `pdl`: as a dependent launch; an ordinary one where ranks share a GPU.
        """

    def fault(self) -> str | None:
        """After a launch has failed: which rank gave up waiting for which, if this rank did."""


def create_reducers(devices: Sequence[Device], *, path: str, elements: int, limit_ns: int) -> list[Reducer]:
    """A communicator: every rank's end, in rank order; synchronises all devices.

    `devices`: one a rank; ranks may share a GPU. `path`: one of PATHS, or "auto". `elements`: of the longest message;
    shorter ones may follow each other in any order. `limit_ns`: a rank that waits longer for another ends its launch
    with an error; 0: never. Raises UsageError for a path that there is not, QwenRawError for GPUs without a peer path.
    """
    require(1 <= len(devices) <= MAX_RANKS, f"{len(devices)} ranks: the kernels take 1 to {MAX_RANKS}")
    require(elements > 0, f"messages of {elements} elements")
    if path not in (*PATHS, "auto"):
        raise UsageError(f"there is no path {path!r} for sums over ranks: choose auto, {', '.join(PATHS)}")
    packs = -(-elements // PACK)
    ends = LamportWorkspace.create(devices, packs, limit_ns=limit_ns)
    return [Lamport(end) for end in ends]


@dataclass(frozen=True, slots=True)
class Lamport:
    """One-shot push (cuda_src/allreduce_lamport.cu)."""

    end: LamportWorkspace
    path = "lamport"

    def add(self, h: Buffer, partial: Buffer, *, pdl: bool = False) -> None:
        """See Reducer."""
        allreduce_lamport(self.end, h, partial, add=True, pdl=pdl)

    def fault(self) -> str | None:
        """See Reducer."""
        return self.end.limit.fault()
