"""What the launchers of kernels that talk to a peer share: the by-value structs of include/lamport.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import BF16, F32, U64, Buffer, Device, HostRing
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

MAX_RANKS = 8
SENTINEL = 0x80000000
PACK = 8  # bf16 in 16 bytes


@dataclass(frozen=True, slots=True)
class PollLimit:
    """A kernel that polls longer than `ns` nanoseconds writes the ring's first two words and traps; 0: never."""

    ns: int
    ring: HostRing  # u64 [2]

    def struct(self) -> np.ndarray[Any, Any]:
        return np.array([self.ns, self.ring.buffer.ptr], U64)

    @staticmethod
    def create(dev: Device, ns: int) -> PollLimit:
        return PollLimit(ns, dev.host_ring(2))

    def fault(self) -> str | None:
        """Which rank gave up on which peer, in which call; None if none did."""
        low, high = (int(w) for w in self.ring.words[:2])
        if low & 0xFFFFFFFF == 0:
            return None
        waiting, peer, call = (low & 0xFFFFFFFF) - 1, (low >> 32) - 1, high & 0xFFFFFFFF
        return f"rank {waiting} waited {self.ns / 1e6:g} ms for rank {peer} in call {call}"


def peer_struct(buffers: Sequence[Buffer]) -> np.ndarray[Any, Any]:
    """struct Peers: the buffers' addresses by rank."""
    require(1 <= len(buffers) <= MAX_RANKS, f"{len(buffers)} ranks: the kernels take 1 to {MAX_RANKS}")
    struct = np.zeros(MAX_RANKS, U64)
    struct[: len(buffers)] = [b.ptr for b in buffers]
    return struct


def check_message(out: Buffer, inp: Buffer, capacity: int, add: bool) -> int:
    """PRECONDs of every all-reduce. Returns the message's length in packs."""
    n = inp.shape[0]
    require(n > 0 and n % PACK == 0, f"a message of {n} elements is not whole packs of {PACK}")
    require(n // PACK <= capacity, f"a message of {n} elements, the workspace takes {capacity * PACK}")
    check_buffer(inp, (n,), BF16, "in")
    check_buffer(out, (n,), F32 if add else BF16, "h" if add else "out")
    return n // PACK


def message_grid(dev: Device, n: int, block: int, most: int) -> int:
    """Blocks for a message of n packs, one pack a thread, no more than `most`."""
    return max(1, min((n + block - 1) // block, most, dev.sm_count))


def load_everywhere(devices: Sequence[Device], stem: str, names: Sequence[str]) -> None:
    """Load kernels that wait for each other on every device now: loading one may wait for what runs, for ever."""
    for dev in devices:
        for name in names:
            dev.kernel(stem, name)


def ranks_on_gpu(devices: Sequence[Device], rank: int) -> int:
    """How many ranks share the GPU of `rank`, itself included."""
    return sum(dev.ordinal == devices[rank].ordinal for dev in devices)


def polling_blocks(dev: Device, ranks: int) -> int:
    """Most blocks of a kernel that polls on a GPU that so many ranks share.

    All ranks' polling blocks together take half of the multiprocessors at most: the rest is left to the rank that the
    others wait for, whatever it has to compute first.
    """
    return dev.sm_count if ranks == 1 else max(1, dev.sm_count // (2 * ranks))
