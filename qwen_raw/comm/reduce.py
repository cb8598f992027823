"""Sums over ranks: one `Reducer` a rank, whatever the path.

A reducer belongs to one device and its main stream. Every rank must make the same calls in the same order, and the host
must queue all ranks' calls before it waits for any: a rank's kernel waits, on the device, for what the others send.
Reducers must live as long as the graphs that their calls were captured in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qwen_raw.comm.host import Host
from qwen_raw.comm.topology import require_links
from qwen_raw.device import Buffer, Device
from qwen_raw.errors import UsageError, require
from qwen_raw.kernels.allreduce_flag import FlagWorkspace, allreduce_flag
from qwen_raw.kernels.allreduce_lamport import LamportWorkspace, allreduce_lamport
from qwen_raw.kernels.allreduce_norm import allreduce_norm
from qwen_raw.kernels.allreduce_twoshot import TwoShotWorkspace, allreduce_twoshot
from qwen_raw.kernels.peers import PACK

PATHS = ("lamport", "flag", "twoshot", "host")
# Bytes from which reading and writing each element twice over the link, a share a rank, beats pushing all to all.
ONE_SHOT_BYTES = 512 << 10


def usual_path(elements: int) -> str:
    """The path for messages of `elements` bf16 where none was measured (qwen_raw/comm/measure.py)."""
    return "lamport" if 2 * elements < ONE_SHOT_BYTES else "twoshot"


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

    `devices`: one a rank; ranks may share a GPU. `path`: one of PATHS. `elements`: of the longest message;
    shorter ones may follow each other in any order. `limit_ns`: a rank that waits longer for another ends its launch
    with an error; 0: never. Raises UsageError for a path that there is not, QwenRawError for GPUs without a peer path,
    or with one that loses what crosses it.
    """
    require(elements > 0, f"messages of {elements} elements")
    if all(dev.kind == "cuda" for dev in devices):
        require_links(devices)
    packs = -(-elements // PACK)
    match path:
        case "lamport":
            return [Lamport(end) for end in LamportWorkspace.create(devices, packs, limit_ns=limit_ns)]
        case "flag":
            return [Flag(end) for end in FlagWorkspace.create(devices, packs, limit_ns=limit_ns)]
        case "twoshot":
            return [TwoShot(end) for end in TwoShotWorkspace.create(devices, packs, limit_ns=limit_ns)]
        case "host":
            return list(Host.create(devices))
    raise UsageError(f"there is no path {path!r} for sums over ranks: choose {', '.join(PATHS)}")


@dataclass(frozen=True, slots=True)
class Lamport:
    """One-shot push (cuda_src/allreduce_lamport.cu)."""

    end: LamportWorkspace
    path = "lamport"

    def add(self, h: Buffer, partial: Buffer, *, pdl: bool = False) -> None:
        """See Reducer."""
        allreduce_lamport(self.end, h, partial, add=True, pdl=pdl)

    def add_and_norm(
        self, total: Buffer, out: Buffer, h: Buffer, partial: Buffer, g: Buffer, eps: float, *, pdl: bool = False
    ) -> None:
        """Queue total f32 [T, D] = h + Σ partial bf16 [T, D], and out bf16 [T, D] = RMSNorm(total)·g, in one launch."""
        allreduce_norm(self.end, total, out, h, partial, g, eps, pdl=pdl)

    def fault(self) -> str | None:
        """See Reducer."""
        return self.end.limit.fault()


@dataclass(frozen=True, slots=True)
class Flag:
    """Flag barrier and peer reads (cuda_src/allreduce_flag.cu)."""

    end: FlagWorkspace
    path = "flag"

    def add(self, h: Buffer, partial: Buffer, *, pdl: bool = False) -> None:
        """See Reducer."""
        allreduce_flag(self.end, h, partial, add=True, pdl=pdl)

    def fault(self) -> str | None:
        """See Reducer."""
        return self.end.limit.fault()


@dataclass(frozen=True, slots=True)
class TwoShot:
    """Reduce-scatter and all-gather (cuda_src/allreduce_twoshot.cu): the sum is rounded to bf16 before it is added."""

    end: FlagWorkspace
    path = "twoshot"

    def add(self, h: Buffer, partial: Buffer, *, pdl: bool = False) -> None:
        """See Reducer."""
        allreduce_twoshot(self.end, h, partial, add=True, pdl=pdl)

    def fault(self) -> str | None:
        """See Reducer."""
        return self.end.limit.fault()
