"""What the launchers of kernels that talk to a peer share: by-value structs, PRECONDs, geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from qwen_raw.device import BF16, F32, U64, Arg, Buffer, Device, Dim, HostRing
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

MAX_RANKS = 8
PACK = 8  # bf16 in 16 bytes
VARIANTS = (2, 4, 8)  # kernels _r2, _r4, _r8: for up to that many ranks


@dataclass(frozen=True, slots=True)
class PollLimit:
    """A kernel that polls longer than `ns` nanoseconds writes the ring's first two words and traps; 0: never."""

    ns: int
    ring: HostRing  # u64 [2]

    def struct(self) -> np.ndarray[Any, Any]:
        """struct PollLimit."""
        return np.array([self.ns, self.ring.buffer.ptr], U64)

    @staticmethod
    def create(dev: Device, ns: int) -> PollLimit:
        """With a ring of its own, that says nothing yet."""
        return PollLimit(ns, dev.host_ring(2))

    def fault(self) -> str | None:
        """Which rank gave up on which peer, in which call; None if none did."""
        low, high = (int(w) for w in self.ring.words[:2])
        if low & 0xFFFFFFFF == 0:
            return None
        waiting, peer, call = (low & 0xFFFFFFFF) - 1, (low >> 32) - 1, high & 0xFFFFFFFF
        return f"rank {waiting} waited {self.ns / 1e6:g} ms for rank {peer} in call {call}"


class Workspace(Protocol):
    """One rank's end of a communicator, for the main stream of its device."""

    @property
    def dev(self) -> Device: ...

    @property
    def world(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Packs a message."""

    @property
    def sharing(self) -> int:
        """Ranks on this rank's GPU, itself included."""

    @property
    def most_blocks(self) -> int:
        """That the launchers choose by themselves."""

    @property
    def struct(self) -> np.ndarray[Any, Any]:
        """The kernels' by-value argument."""


def peer_struct(buffers: Sequence[Buffer]) -> np.ndarray[Any, Any]:
    """struct Peers: the buffers' addresses by rank."""
    require(1 <= len(buffers) <= MAX_RANKS, f"{len(buffers)} ranks: the kernels take 1 to {MAX_RANKS}")
    struct = np.zeros(MAX_RANKS, U64)
    struct[: len(buffers)] = [b.ptr for b in buffers]
    return struct


def variant(world: int) -> int:
    """The smallest compiled number of ranks that `world` fits in."""
    return next(most for most in VARIANTS if world <= most)


def connect(devices: Sequence[Device], stem: str, names: Sequence[str]) -> None:
    """Make ready for kernels that wait for each other: peer access, and every kernel loaded.

    Loading one later may wait for what runs, for ever. Raises QwenRawError for devices without a peer path.
    """
    connect_devices(devices)
    for dev in devices:
        for name in names:
            dev.kernel(stem, f"{name}_r{variant(len(devices))}")


def connect_devices(devices: Sequence[Device]) -> None:
    """Peer access between all of them. Raises QwenRawError for devices without a peer path."""
    require(1 <= len(devices) <= MAX_RANKS, f"{len(devices)} ranks: the kernels take 1 to {MAX_RANKS}")
    for dev in devices:
        for other in devices:
            if other is not dev:
                dev.enable_peer(other)


def ranks_on_gpu(devices: Sequence[Device], rank: int) -> int:
    """How many ranks share the GPU of `rank`, itself included."""
    return sum(dev.ordinal == devices[rank].ordinal for dev in devices)


def polling_blocks(devices: Sequence[Device], rank: int) -> int:
    """Most blocks of a kernel that polls, unless a launch asks for more.

    On a GPU that ranks share, all their polling blocks together take half of the multiprocessors at most: the rest is
    left to the rank that the others wait for, whatever it has to compute first.
    """
    ranks, sms = ranks_on_gpu(devices, rank), devices[rank].sm_count
    return sms if ranks == 1 else max(1, sms // (2 * ranks))


def check_message(ws: Workspace, out: Buffer, inp: Buffer, add: bool) -> int:
    """PRECONDs of every all-reduce. Returns the message's length in packs."""
    n = inp.shape[0]
    require(n > 0 and n % PACK == 0, f"a message of {n} elements is not whole packs of {PACK}")
    require(n // PACK <= ws.capacity, f"a message of {n} elements, the workspace takes {ws.capacity * PACK}")
    check_buffer(inp, (n,), BF16, "in")
    check_buffer(out, (n,), F32 if add else BF16, "h" if add else "out")
    check_owner(ws, inp, out)
    return n // PACK


def check_owner(ws: Workspace, inp: Buffer, *outs: Buffer) -> None:
    """PRECONDs: all of this rank's device, so that its stream orders them; no output overlaps the input."""
    for buffer in (inp, *outs):
        require(ws.dev.owns(buffer), f"{buffer!r} is not of {ws.dev.name}'s stream, which this workspace belongs to")
    for out in outs:
        require(
            out.ptr + out.nbytes <= inp.ptr or inp.ptr + inp.nbytes <= out.ptr, f"{out!r} overlaps the input {inp!r}"
        )


def message_grid(ws: Workspace, n: int, block: int) -> int:
    """Blocks for a message of n packs, one pack a thread."""
    return max(1, min(-(-n // block), ws.most_blocks))


def launch_polling(
    ws: Workspace,
    stem: str,
    name: str,
    grid: Dim,
    block: int,
    args: Sequence[Arg],
    *,
    most: int,
    pdl: bool,
    cluster: int = 1,
    smem: int = 0,
) -> None:
    """Launch `name`'s variant for this world. PRECONDs: at most `most` blocks, all resident beside other ranks'.

    `cluster`: blocks along x that are one.
    A dependent launch becomes an ordinary one where ranks share the GPU: blocks that wait for the previous kernel would
    take the place of another rank's, which that kernel waits for.
    """
    dev, blocks = ws.dev, grid[0] * grid[1]
    kernel = dev.kernel(stem, f"{name}_r{variant(ws.world)}")
    require(0 < blocks <= most, f"{name}: {blocks} blocks, the workspace is laid out for 1 to {most}")
    at_once = (
        dev.resident_clusters(kernel, block, smem, cluster) * cluster
        if cluster > 1
        else dev.resident_blocks(kernel, block, smem) * dev.sm_count
    )
    resident = at_once // ws.sharing
    require(
        blocks <= resident,
        f"{name}: {blocks} blocks of {block} threads wait for each other, {dev.name} holds {resident} at once"
        + (f" for each of {ws.sharing} ranks" if ws.sharing > 1 else ""),
    )
    dims = (cluster, 1, 1) if cluster > 1 else None
    dev.launch(kernel, grid, (block, 1, 1), args, smem=smem, pdl=pdl and ws.sharing == 1, cluster=dims)
