"""One rank's end of the sums over ranks that are inside of products (include/gemv_peers.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import I32, U64, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.allreduce_lamport import SENTINEL
from qwen_raw.kernels.peers import MAX_RANKS, PollLimit, connect_devices, peer_struct, ranks_on_gpu

STRUCT = np.dtype(
    [
        ("receive", U64, MAX_RANKS),
        ("hidden", U64),
        ("limit", U64, 2),
        *((n, I32) for n in ("rank", "world", "D", "log_lanes")),
    ]
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's end; for one stream. It must outlive graphs that use it, as all its peers' must.

    `first` is where the embedding leaves h before a step's first sum, and where the last sum of a step leaves it.
    """

    dev: Device
    rank: int
    world: int
    D: int
    sharing: int  # ranks on this GPU
    receive: tuple[Buffer, ...]  # every rank's: f32 [2, world, D], armed
    hidden: Buffer  # f32 [2, D]; half 1 armed
    limit: PollLimit

    @property
    def first(self) -> Buffer:
        """f32 [D]."""
        return self.hidden.view((self.D,))

    @property
    def struct(self) -> np.ndarray[Any, Any]:
        """struct Exchange."""
        own = (self.hidden.ptr, self.limit.struct(), self.rank, self.world, self.D, (self.world - 1).bit_length())
        return np.array([(peer_struct(self.receive), *own)], STRUCT)

    @staticmethod
    def create(devices: Sequence[Device], D: int, *, limit_ns: int) -> list[Exchange]:
        """All ranks' ends, armed and synchronised. D: elements of the residual stream, a multiple of 4."""
        connect_devices(devices)
        require(D > 0 and D % 4 == 0, f"a residual stream of {D} elements is not whole packs of 4")
        world, word = len(devices), np.array(SENTINEL, np.uint32).view(np.float32)
        receive = tuple(dev.array(np.full((2, world, D), word, np.float32)) for dev in devices)
        ends = [
            Exchange(
                dev, rank, world, D, ranks_on_gpu(devices, rank), receive, dev.array(np.full((2, D), word, np.float32)),
                PollLimit.create(dev, limit_ns),
            )
            for rank, dev in enumerate(devices)
        ]  # fmt: skip
        for dev in devices:
            dev.synchronize()
        return ends


@dataclass(frozen=True, slots=True)
class PeerSum:
    """One of a layer's two sums: what O or down pushes into, and what the product after it takes h from."""

    end: Exchange
    half: int  # of the memory: 1 after O, 0 after down
    first: bool  # of a step: h before it was left by the embedding

    def args(self) -> list[Arg]:
        """The kernels' arguments."""
        return [self.end.struct, np.int32(self.half | 2 * self.first)]

    def check(self, dev: Device, n: int) -> None:
        """PRECONDs: this rank's device, its residual stream's length."""
        require(dev is self.end.dev, f"the sum is of rank {self.end.rank}, not of {dev.name}")
        require(n == self.end.D, f"a sum of {self.end.D} elements, the product has {n}")
        require(self.half in (0, 1), f"a sum has half 0 or 1, not {self.half}")

    def most_blocks(self, per_sm: int) -> int:
        """Blocks of a product that waits for the sum, `per_sm` a multiprocessor; each owns an element of h.

        On a GPU that ranks share they leave half of it to the rank that the others wait for.
        """
        sharing = self.end.sharing
        blocks = self.end.dev.sm_count * per_sm
        return max(1, min(self.end.D, blocks if sharing == 1 else blocks // (2 * sharing)))

    def check_blocks(self, blocks: int, per_sm: int) -> None:
        """PRECONDs of a product that waits for the sum: an element of h a block, and all can be resident."""
        require(blocks <= self.end.D, f"{blocks} blocks share {self.end.D} elements of h: at least one each")
        room = per_sm * self.end.dev.sm_count // self.end.sharing
        require(blocks <= room, f"{blocks} blocks wait for each other, {self.end.dev.name} holds {room} at once")
