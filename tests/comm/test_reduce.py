"""Reducers: sums over ranks through the interface that the engine uses, on the simulator and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
from comm.ranks import Ranks
from kernel_reference import bf16_input

from loaders.dtypes import bf16_to_f32, f32_to_bf16
from qwen_raw.comm.reduce import PATHS, Reducer, create_reducers
from qwen_raw.device import BF16, F32
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

LIMIT_NS = 2_000_000_000
SIZES = (8, 896, 16, 3584, 8192, 24)


class Call:
    """One reduction of fresh random vectors: `queue(rank)`, then `check()`."""

    def __init__(self, ranks: Ranks, rng: np.random.Generator, n: int) -> None:
        self._parts = [bf16_input(rng, n) for _ in ranks.devices]
        self._base = rng.standard_normal(n).astype(np.float32)
        self._partials = [dev.array(bits) for dev, (bits, _) in zip(ranks.devices, self._parts, strict=True)]
        self._h = [dev.array(self._base) for dev in ranks.devices]

    def queue(self, reducers: Sequence[Reducer], rank: int, *, pdl: bool) -> None:
        reducers[rank].add(self._h[rank], self._partials[rank], pdl=pdl)

    def check(self, path: str) -> None:
        total = np.zeros_like(self._base)
        for _, values in self._parts:
            total += values.astype(np.float32)
        if path == "twoshot":
            total = bf16_to_f32(f32_to_bf16(total))
        for rank, h in enumerate(self._h):
            np.testing.assert_array_equal(h.download(), self._base + total, err_msg=f"rank {rank}")


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_adds_the_sum_in_rank_order(ranks: Ranks, rng: np.random.Generator, path: str, pdl: bool) -> None:
    reducers = create_reducers(ranks.devices, path=path, elements=max(SIZES), limit_ns=LIMIT_NS)
    assert [r.path for r in reducers] == [path] * len(ranks.devices)
    calls = [Call(ranks, rng, n) for n in SIZES]
    ranks.finish()
    with nullcontext() if path == "host" else ranks.together():
        for call in calls:
            for rank in range(len(reducers)):
                call.queue(reducers, rank, pdl=pdl)
    ranks.finish()
    for call in calls:
        call.check(path)
    assert [r.fault() for r in reducers] == [None] * len(reducers)


def test_host_ranks_take_turns(ranks: Ranks) -> None:
    reducers = create_reducers(ranks.devices, path="host", elements=8, limit_ns=0)
    h, partial = ([dev.zeros((8,), dtype) for dev in ranks.devices] for dtype in (F32, BF16))
    reducers[1].add(h[1], partial[1])
    with pytest.raises(QwenRawError, match="rank 1 asks for a sum before rank 0 has asked for the last one"):
        reducers[1].add(h[1], partial[1])


@pytest.mark.parametrize("path", PATHS)
def test_memory_of_another_rank_is_refused(ranks: Ranks, path: str) -> None:
    """A workspace belongs to one stream: what another stream orders would race with its calls."""
    reducers = create_reducers(ranks.devices, path=path, elements=8, limit_ns=LIMIT_NS)
    mine, theirs = (dev.zeros((8,), BF16) for dev in ranks.devices[:2])
    h = ranks.devices[0].zeros((8,), F32)
    with pytest.raises(QwenRawError, match=r"are not both of|is not of"):
        reducers[0].add(h, theirs)
    with pytest.raises(QwenRawError, match=r"are not both of|is not of"):
        reducers[1].add(h, mine)


def test_an_output_over_the_input_is_refused(ranks: Ranks) -> None:
    reducers = create_reducers(ranks.devices, path="lamport", elements=64, limit_ns=LIMIT_NS)
    both = ranks.devices[0].zeros((64,), F32)
    with pytest.raises(QwenRawError, match="overlaps the input"):
        reducers[0].add(both, both.view((64,), 8, BF16))


def test_requests_that_cannot_be_met(ranks: Ranks) -> None:
    with pytest.raises(UsageError, match="no path 'smoke' for sums over ranks: choose lamport"):
        create_reducers(ranks.devices, path="smoke", elements=8, limit_ns=0)
    with pytest.raises(QwenRawError, match="messages of 0 elements"):
        create_reducers(ranks.devices, path="lamport", elements=0, limit_ns=0)
    with pytest.raises(QwenRawError, match="9 ranks"):
        create_reducers((ranks.devices * 9)[:9], path="lamport", elements=8, limit_ns=0)
    with SimWorld(1) as other, pytest.raises(QwenRawError):
        create_reducers([ranks.devices[0], SimDevice(world=other)], path="lamport", elements=8, limit_ns=0)
