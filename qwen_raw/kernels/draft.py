"""cuda_src/draft.cu: the ids of one speculative pass, from the draft model's choices or from the text so far."""

from __future__ import annotations

import numpy as np

from qwen_raw.device import I32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

STEM = "draft"
THREADS = 1024


def draft_row(dev: Device, ids: Buffer, rows: Buffer, i: int, source: Buffer) -> None:
    """ids i32 [M] and rows i32 [M, 4]: row i takes the token of the decode state `source` i32 [4]."""
    M = ids.shape[0]
    require(0 <= i < M, f"row {i} of {M}")
    _check(ids, rows, source)
    dev.launch(dev.kernel(STEM, "draft_row"), (1, 1, 1), (1, 1, 1), [source, ids, rows, np.int32(i)])


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


def _check(ids: Buffer, rows: Buffer, state: Buffer) -> None:
    M = ids.shape[0]
    check_buffer(ids, (M,), I32, "ids")
    check_buffer(rows, (M, 4), I32, "rows")
    check_buffer(state, (4,), I32, "state")
