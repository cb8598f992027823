"""cuda_src/sample.cu: the next id, chosen on the device and posted to the host's ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qwen_raw.device import F32, I32, U32, U64, Arg, Buffer, Device, HostRing
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.peers import MAX_RANKS, PollLimit, peer_struct

STEM = "sample"
BAD_ID = 0xFFFFFFFF  # posted instead of an id when a logit was not finite
SLOTS = 256  # ids that may be posted before the host has read the first


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks' candidates meet: one rank's end."""

    rank: int
    world: int
    mailbox: Buffer  # u32 [2, 8, 4], zero before the first choice
    peers: np.ndarray[Any, Any]  # struct Peers: all mailboxes
    limit: PollLimit


@dataclass(frozen=True, slots=True)
class Sampler:
    """Device state of one decode stream: the token loop's own memory. Under tensor parallelism, a rank's copy of it."""

    state: Buffer  # i32 [4]: token, its position, ids chosen so far, unused
    params: Buffer  # u32 [4]: bits of temperature, seed low, seed high, text_vocab
    best: Buffer  # u64 [blocks or more, 2]
    counter: Buffer  # u32 [1], zero between launches
    ring: HostRing  # u64 [2·SLOTS]
    vocab: int  # V: rows of the whole LM head
    rows: range  # those that this rank holds
    blocks: int
    meeting: Meeting | None = None  # None: this rank holds all rows

    @staticmethod
    def create(dev: Device, V: int, blocks: int | None = None, rows: range | None = None) -> Sampler:
        """`rows`: None for all V."""
        rows = range(V) if rows is None else rows
        n = blocks or max(1, min(dev.sm_count, (len(rows) + 255) // 256))
        return Sampler(
            dev.zeros((4,), I32),
            dev.zeros((4,), U32),
            dev.empty((max(n, 8 * dev.sm_count), 2), U64),  # an LM head that chooses has as many blocks at most
            dev.zeros((1,), U32),
            dev.host_ring(2 * SLOTS),
            V,
            rows,
            n,
        )

    @staticmethod
    def create_ranks(
        devices: Sequence[Device], rows: Sequence[range], *, limit_ns: int, blocks: int | None = None
    ) -> list[Sampler]:
        """All ranks' samplers, `rows` of the LM head each, which together are all; synchronised.

        `limit_ns`: how long a rank waits for another's candidate; 0: for ever. Raises QwenRawError for devices without
        a peer path.
        """
        V = rows[-1].stop
        require(
            [r.start for r in rows] == [0, *(r.stop for r in rows[:-1])], f"{list(rows)} are not all rows in rank order"
        )
        mailboxes = [dev.zeros((2, MAX_RANKS, 4), U32) for dev in devices]
        for dev in devices:
            dev.kernel(STEM, "sample_ranks_f32")  # before ranks wait for each other: loading may wait for what runs
            for other in devices:
                if other is not dev:
                    dev.enable_peer(other)
        samplers = [Sampler.create(dev, V, blocks, part) for dev, part in zip(devices, rows, strict=True)]
        for dev in devices:
            dev.synchronize()
        peers = peer_struct(mailboxes)
        return [
            replace(s, meeting=Meeting(rank, len(devices), mailbox, peers, PollLimit.create(dev, limit_ns)))
            for rank, (s, mailbox, dev) in enumerate(zip(samplers, mailboxes, devices, strict=True))
        ]

    @property
    def token(self) -> Buffer:
        return self.state.view((1,), 0)

    @property
    def pos(self) -> Buffer:
        return self.state.view((1,), 1)

    def set_params(self, temperature: float, seed: int, text_vocab: int) -> None:
        """Greedy when temperature is 0. Ids from text_vocab on are never chosen."""
        require(
            0 < text_vocab <= self.vocab, f"text_vocab {text_vocab} is not within the {self.vocab} rows of the LM head"
        )
        words = [int(np.float32(temperature).view(np.uint32)), seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, text_vocab]
        self.params.upload(np.array(words, np.uint32))

    def set_position(self, token: int, pos: int) -> None:
        """What the next decode step embeds, and where. The count of ids goes on: old steps may still be posting."""
        self.state.view((2,)).upload(np.array([token, pos], np.int32))


def sample(dev: Device, logits: Buffer, s: Sampler, *, threads: int = 256, pdl: bool = False) -> None:
    """Choose from logits f32 [rows] the id at position state.pos + 1; advance the state; post {id, hash} to the ring.

    With a meeting, every rank launches this and all end in the same state: the hash too is of the whole row of logits.
    """
    check_buffer(logits, (len(s.rows),), F32, "logits")
    require(threads in (32, 64, 128, 256), f"blocks of {threads} threads: 32, 64, 128 or 256")
    require(s.best.shape[0] >= s.blocks, f"scratch is {s.best.shape}, expected {(s.blocks, 2)}")
    args: list[Arg] = [s.state, logits, s.params, s.best, s.counter, s.ring.buffer, np.int32(SLOTS)]
    kernel = dev.kernel(STEM, "sample_f32" if s.meeting is None else "sample_ranks_f32")
    if s.meeting is not None:
        m = s.meeting
        args += [np.int32(s.rows.start), np.int32(len(s.rows)), m.peers, np.int32(m.rank), np.int32(m.world)]
        args.append(m.limit.struct())
    dev.launch(kernel, (s.blocks, 1, 1), (threads, 1, 1), args, pdl=pdl)
