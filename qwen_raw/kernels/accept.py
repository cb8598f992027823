"""cuda_src/accept.cu: which rows of a speculative pass stand, chosen and posted on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_raw.device import F32, I32, U32, U64, Arg, Buffer, Device, HostRing
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.sample import SLOTS, Sampler

STEM = "accept"
MAX_ROWS = 16
HEADER = 4  # words before the ids, which stay aligned to 16 bytes
THREADS = 256


@dataclass(frozen=True, slots=True)
class PassBuffers:
    """Device state of speculation with up to M rows a pass, beside the target's `Sampler`."""

    request: Buffer  # i32 [4 + M]: position of row 0, M, two unused words, the M ids; as PrefillBuffers has it
    rows: Buffer  # i32 [M, 4] the same as decode states: id, position
    history: Buffer  # i32 [max_len + M] the id at every position
    limit: Buffer  # u32 [1] step number from which on nothing is posted
    best: Buffer  # u64 [M·blocks, 2]
    chosen: Buffer  # u64 [M, 2]
    counters: Buffer  # u32 [M + 1], zero between launches
    counts: Buffer  # u32 [4]
    told: HostRing  # u64 [4]: passes, steps, guesses that were right, guesses
    no_draft: Buffer  # i32 [4] takes what is meant for a draft model's state where there is none
    blocks: int  # a row

    @staticmethod
    def create(dev: Device, M: int, max_len: int, V: int) -> PassBuffers:
        """`max_len`: positions of prompt and generated ids together."""
        require(1 <= M <= MAX_ROWS, f"{M} rows a pass: 1 to {MAX_ROWS} are possible")
        blocks = max(1, min(dev.sm_count // M, (V + THREADS - 1) // THREADS))
        return PassBuffers(
            dev.zeros((HEADER + M,), I32),
            dev.zeros((M, 4), I32),
            dev.zeros((max_len + M,), I32),
            dev.zeros((1,), U32),
            dev.empty((M * blocks, 2), U64),
            dev.empty((M, 2), U64),
            dev.zeros((M + 1,), U32),
            dev.zeros((4,), U32),
            dev.host_ring(4),
            dev.zeros((4,), I32),
            blocks,
        )

    @property
    def ids(self) -> Buffer:
        """i32 [M] what is verified: the last id, then guesses."""
        return self.request.view((self.request.shape[0] - HEADER,), HEADER)

    @property
    def span(self) -> Buffer:
        """i32 [2]: position of row 0, M."""
        return self.request.view((2,))


def accept_begin(dev: Device, b: PassBuffers, s: Sampler, draft: Buffer) -> None:
    """Before the first pass: s.state's id into the history, positions to rows, both to the state `draft` i32 [4]."""
    check_buffer(draft, (4,), I32, "draft state")
    args: list[Arg] = [s.state, draft, b.rows, b.span, b.history, np.int32(b.ids.shape[0])]
    dev.launch(dev.kernel(STEM, "accept_begin"), (1, 1, 1), (1, 1, 1), args)


def accept(dev: Device, b: PassBuffers, s: Sampler, draft: Buffer, logits: Buffer) -> None:
    """Choose after every row of logits f32 [M, V]; post and move on as far as b.ids were right. M <= b's."""
    M, V = logits.shape
    require(1 <= M <= b.ids.shape[0], f"{M} rows of logits, the buffers are for {b.ids.shape[0]}")
    require(s.meeting is None and s.vocab == V, f"logits of {V} ids, the sampler has {s.vocab} on one rank")
    check_buffer(logits, (M, V), F32, "logits")
    check_buffer(draft, (4,), I32, "draft state")
    args: list[Arg] = [s.state, draft, b.rows, b.span, b.ids, b.history, logits, s.params, b.best, b.chosen]
    args += [b.counters.view((M + 1,)), b.limit, b.counts, s.ring.buffer, b.told.buffer]
    args += [np.int32(n) for n in (SLOTS, b.ids.shape[0], V)]
    dev.launch(dev.kernel(STEM, "accept_f32"), (b.blocks, M, 1), (THREADS, 1, 1), args)
