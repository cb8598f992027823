"""cuda_src/accept.cu: which rows of a speculative pass stand, chosen and posted on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qwen_raw.device import F32, I32, U32, U64, Arg, Buffer, Device, HostRing
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.peers import MAX_RANKS, peer_struct
from qwen_raw.kernels.sample import SLOTS, Sampler

STEM = "accept"
MAX_ROWS = 16
HEADER = 4  # words before the ids, which stay aligned to 16 bytes
THREADS = 256
FORCED = 1 << 24  # what stands for certainty
MEETING = np.dtype([("mailboxes", U64, MAX_RANKS), ("limit", U64, 2), ("rank", I32), ("world", I32)])


@dataclass(frozen=True, slots=True)
class PassBuffers:
    """Device state of speculation with up to R rows a pass, beside the target's `Sampler`; one rank's."""

    request: Buffer  # i32 [4 + R]: position of row 0, R, two unused words, the R ids; as PrefillBuffers has it
    rows: Buffer  # i32 [R, 4] the same as decode states: id, position
    history: Buffer  # i32 [max_len + R] the id at every position
    filled: Buffer  # i32 [1] position up to which the draft model has keys
    limit: Buffer  # u32 [1] step number from which on nothing is posted
    best: Buffer  # u64 [multiprocessors or R, 2]
    chosen: Buffer  # u64 [R, 2]
    counters: Buffer  # u32 [R + 1], zero between launches
    counts: Buffer  # u32 [8]
    told: HostRing  # u64 [5]: passes << 32 | steps, guesses right, guesses, guesses compared, passes that posted
    no_draft: Buffer  # i32 [4] takes what is meant for a draft model's state where there is none
    most: int  # R
    mailboxes: tuple[Buffer, ...]  # every rank's: u32 [2, 8, 16, 4], zero before the first pass
    forced: Buffer | None = None  # u32 [1] of FORCED: see `accept`

    @staticmethod
    def create(dev: Device, R: int, max_len: int, V: int, *, forced: bool = False) -> PassBuffers:
        """Of the only rank. `max_len`: positions of prompt and generated ids together; `forced`: see `accept`."""
        return PassBuffers.create_ranks([dev], R, max_len, V, forced=forced)[0]

    @staticmethod
    def create_ranks(
        devices: Sequence[Device], R: int, max_len: int, V: int, *, forced: bool = False
    ) -> list[PassBuffers]:
        """All ranks', synchronised. V: rows of the whole LM head. Ranks are peers already (`Sampler.create_ranks`)."""
        require(1 <= R <= MAX_ROWS, f"{R} rows a pass: 1 to {MAX_ROWS} are possible")
        mailboxes = tuple(dev.zeros((2, MAX_RANKS, MAX_ROWS, 4), U32) for dev in devices)
        found = []
        for dev in devices:
            buffers = PassBuffers(
                dev.zeros((HEADER + R,), I32),
                dev.zeros((R, 4), I32),
                dev.zeros((max_len + R,), I32),
                dev.zeros((1,), I32),
                dev.zeros((1,), U32),
                dev.empty((max(R, dev.sm_count), 2), U64),
                dev.empty((R, 2), U64),
                dev.zeros((R + 1,), U32),
                dev.zeros((8,), U32),
                dev.host_ring(5),
                dev.zeros((4,), I32),
                R,
                mailboxes,
                dev.zeros((1,), U32) if forced else None,
            )
            found.append(buffers)
        for dev in devices:
            dev.synchronize()
        return found

    def first(self, M: int) -> PassBuffers:
        """The same for a pass of M rows."""
        require(1 <= M <= self.most, f"{M} rows of {self.most}")
        return replace(self, request=self.request.view((HEADER + M,)), rows=self.rows.view((M, 4)))

    @property
    def ids(self) -> Buffer:
        """i32 [M] what is verified: the last id, then guesses."""
        return self.request.view((self.request.shape[0] - HEADER,), HEADER)

    @property
    def ended(self) -> tuple[int, int]:
        """(passes that have ended, ids that they and all before them have posted): both of one moment."""
        word = int(self.told.words[0])
        return word >> 32, word & 0xFFFFFFFF

    @property
    def span(self) -> Buffer:
        """i32 [2]: position of row 0, R."""
        return self.request.view((2,))

    def force(self, acceptance: float) -> None:
        """From here on a guess stands with this probability, whatever is right. Of buffers made with `forced`."""
        require(self.forced is not None and 0 <= acceptance <= 1, f"acceptance cannot be forced to {acceptance}")
        assert self.forced is not None
        self.forced.upload(np.array([round(acceptance * FORCED)], np.uint32))


def accept_begin(dev: Device, b: PassBuffers, s: Sampler, draft: Buffer, draft_vocab: int | None = None) -> None:
    """Before the first pass: s.state's id into the history, positions to rows, both to the state `draft` i32 [4].

    draft_vocab: ids that the draft model knows; None: as many as the target.
    """
    check_buffer(draft, (4,), I32, "draft state")
    args: list[Arg] = [s.state, draft, b.rows, b.span, b.filled, b.history]
    args += [np.int32(b.most), np.int32(draft_vocab or s.vocab)]
    dev.launch(dev.kernel(STEM, "accept_begin"), (1, 1, 1), (1, 1, 1), args)


def accept(
    dev: Device, b: PassBuffers, s: Sampler, draft: Buffer, logits: Buffer, draft_vocab: int | None = None
) -> None:
    """Choose after every row of logits f32 [M, V of this rank]; post and move on as far as b.ids were right. M <= b's.

    With a meeting, every rank launches this and all end in the same state. Buffers made with `forced` are for benches
    and tests: a guess then stands by a hash of its position, as often as `force` said, and is posted.
    """
    M, V = logits.shape
    require(1 <= M <= b.most, f"{M} rows of logits, the buffers are for {b.most}")
    require(len(s.rows) == V, f"logits of {V} ids, the sampler has {len(s.rows)}")
    check_buffer(logits, (M, V), F32, "logits")
    check_buffer(draft, (4,), I32, "draft state")
    args: list[Arg] = [s.state, draft, b.rows, b.span, b.filled, b.ids, b.history, logits, s.params, b.best, b.chosen]
    args += [b.counters.view((M + 1,)), b.limit, b.counts, s.ring.buffer, b.told.buffer]
    args += [np.int32(n) for n in (SLOTS, b.most, V, s.rows.start, draft_vocab or s.vocab)]
    args.append(_meeting(b, s))
    if b.forced is not None:
        args.append(b.forced)
    name = "accept_f32" if b.forced is None else "accept_forced_f32"
    blocks = max(1, min(dev.sm_count // M, -(-V // THREADS)))
    dev.launch(dev.kernel(STEM, name), (blocks, M, 1), (THREADS, 1, 1), args)


def accept_step(
    dev: Device, b: PassBuffers, s: Sampler, draft: Buffer, draft_vocab: int | None = None, *, pdl: bool = False
) -> None:
    """After a decode step that chose an id and posted it: what a pass leaves. Every rank launches this."""
    check_buffer(draft, (4,), I32, "draft state")
    args: list[Arg] = [s.state, draft, b.rows, b.span, b.history, b.counts, b.told.buffer]
    args += [np.int32(b.most), np.int32(draft_vocab or s.vocab)]
    dev.launch(dev.kernel(STEM, "accept_step"), (1, 1, 1), (32, 1, 1), args, pdl=pdl)


def _meeting(b: PassBuffers, s: Sampler) -> np.ndarray[Any, Any]:
    """struct PassMeeting."""
    m = s.meeting
    require(len(b.mailboxes) == (1 if m is None else m.world), f"buffers of {len(b.mailboxes)} ranks")
    limit, rank = (np.zeros(2, U64), 0) if m is None else (m.limit.struct(), m.rank)
    return np.array([(peer_struct(b.mailboxes), limit, rank, len(b.mailboxes))], MEETING)
