"""cuda_src/draft.cu: the ids of one speculative pass, from the draft model's choices or from the text so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_raw.device import I32, U32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.peers import PollLimit, peer_struct

STEM = "draft"
THREADS = 1024
MAX_SHARED = 16  # ids that draft_share hands over
MAX_ROWS = 32  # that draft_rows fills
HEADER = 4  # words before a request's ids


def draft_row(dev: Device, ids: Buffer, rows: Buffer, i: int, source: Buffer) -> None:
    """ids i32 [M] and rows i32 [M, 4]: row i takes the token of the decode state `source` i32 [4]."""
    M = ids.shape[0]
    require(0 <= i < M, f"row {i} of {M}")
    _check(ids, rows, source)
    dev.launch(dev.kernel(STEM, "draft_row"), (1, 1, 1), (1, 1, 1), [source, ids, rows, np.int32(i)])


def draft_rows(dev: Device, ids: Buffer, rows: Buffer, state: Buffer, guesses: Buffer) -> None:
    """ids i32 [M] and rows i32 [M, 4]: row 0 takes the token of `state` i32 [4], row i guesses i32 [M or more] i."""
    M = ids.shape[0]
    require(M <= MAX_ROWS, f"{M} rows, {MAX_ROWS} at most are filled")
    _check(ids, rows, state)
    require(guesses.dtype == I32 and guesses.nbytes >= 4 * M, f"guesses {guesses!r} for {M} rows of int32")
    dev.launch(dev.kernel(STEM, "draft_rows"), (1, 1, 1), (MAX_ROWS, 1, 1), [state, guesses, ids, rows, np.int32(M)])


def draft_ngram(dev: Device, ids: Buffer, rows: Buffer, state: Buffer, history: Buffer, N: int) -> None:
    """ids i32 [M] and rows i32 [M, 4]: the last id, and what followed the latest earlier run of up to N ids like it.

    `state` i32 [4]; history i32 [any], of positions 0 … state.pos.
    """
    M = ids.shape[0]
    require(N > 0, f"runs of up to {N} ids")
    _check(ids, rows, state)
    require(history.dtype == I32, f"history is {history.dtype}, expected int32")
    args: list[Arg] = [state, history, ids, rows, np.int32(M), np.int32(N)]
    dev.launch(dev.kernel(STEM, "draft_ngram"), (1, 1, 1), (THREADS, 1, 1), args)


@dataclass(frozen=True, slots=True)
class SharedGuesses:
    """One rank's end of rank 0's guesses."""

    rank: int
    world: int
    calls: Buffer  # u32 [1]
    mailbox: Buffer  # u32 [4, 4]
    peers: np.ndarray[Any, Any]  # struct Peers: all mailboxes
    limit: PollLimit

    @staticmethod
    def create_ranks(devices: Sequence[Device], limits: Sequence[PollLimit]) -> list[SharedGuesses]:
        """All ranks' ends, synchronised. `limits`: how long each waits. Ranks are peers already."""
        mailboxes = [dev.zeros((4, 4), U32) for dev in devices]
        peers = peer_struct(mailboxes)
        ends = [
            SharedGuesses(rank, len(devices), dev.zeros((1,), U32), mailbox, peers, limit)
            for rank, (dev, mailbox, limit) in enumerate(zip(devices, mailboxes, limits, strict=True))
        ]
        for dev in devices:
            dev.kernel(STEM, "draft_share")  # before ranks wait for each other: loading may wait for what runs
            dev.synchronize()
        return ends


def draft_share(dev: Device, ids: Buffer, rows: Buffer, end: SharedGuesses) -> None:
    """ids i32 [M] of rank 0 become those of all ranks, and so do the ids of rows i32 [M, 4]. M at most 16.

    Every rank launches this; between two calls all ranks must have met, as they do in `accept`.
    """
    M = ids.shape[0]
    require(1 <= M <= MAX_SHARED, f"{M} ids, {MAX_SHARED} at most are shared")
    check_buffer(ids, (M,), I32, "ids")
    check_buffer(rows, (M, 4), I32, "rows")
    args: list[Arg] = [ids, rows, end.calls, np.int32(M), end.peers, np.int32(end.rank), np.int32(end.world)]
    dev.launch(dev.kernel(STEM, "draft_share"), (1, 1, 1), (32, 1, 1), [*args, end.limit.struct()])


def draft_catch(dev: Device, state: Buffer, filled: Buffer, history: Buffer, request: Buffer, vocab: int) -> None:
    """request i32 [4 + n]: the ids from position filled i32 [1] on, n at most; `filled` moves on by as many.

    `state` i32 [4]: up to whose position the history i32 [any] has ids. Those from `vocab` on become 0.
    """
    most = request.shape[0] - HEADER
    require(most > 0 and request.dtype == I32, f"a request for {most} ids")
    require(history.dtype == I32, f"history is {history.dtype}, expected int32")
    check_buffer(state, (4,), I32, "state")
    check_buffer(filled, (1,), I32, "filled")
    args: list[Arg] = [state, filled, history, request, np.int32(most), np.int32(vocab)]
    dev.launch(dev.kernel(STEM, "draft_catch"), (1, 1, 1), (256, 1, 1), args)


def _check(ids: Buffer, rows: Buffer, state: Buffer) -> None:
    M = ids.shape[0]
    check_buffer(ids, (M,), I32, "ids")
    check_buffer(rows, (M, 4), I32, "rows")
    check_buffer(state, (4,), I32, "state")
