"""sample_ranks_f32 between simulated ranks: whatever one rank would choose, all of them choose, on any schedule."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from device_fixtures import random_world

from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import logits_hash
from qwen_raw.generation.sampling import choose
from qwen_raw.kernels.sample import BAD_ID, SLOTS, Sampler, sample
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

V, TEXT = 701, 690
LIMIT_NS = 50_000_000


@pytest.fixture(params=[(2, False), (3, False), (8, False), (3, True)], ids=["2", "3", "8", "3-race"])
def world(request: pytest.FixtureRequest) -> Iterator[tuple[SimWorld, list[SimDevice]]]:
    with random_world(*request.param) as world:
        yield world


def split(world: int) -> list[range]:
    """V rows over the ranks; the last one's are all padding when there are eight of them."""
    ends = (
        [r * TEXT // (world - 1) for r in range(world)] + [V]
        if world == 8
        else [r * V // world for r in range(world + 1)]
    )
    return [range(a, b) for a, b in pairwise(ends)]


def queue(devices: Any, samplers: Any, logits: Any, ranks: range | None = None) -> None:
    for rank in ranks or range(len(devices)):
        s = samplers[rank]
        sample(devices[rank], devices[rank].array(logits[s.rows.start : s.rows.stop]), s)


def test_all_ranks_choose_what_one_would(world: Any, rng: np.random.Generator) -> None:
    """300 steps, 50 at a time queued without a host wait, so that the tags wrap; state and ring equal everywhere."""
    sim, devices = world
    samplers = Sampler.create_ranks(devices, split(len(devices)), limit_ns=LIMIT_NS, blocks=2)
    for first in range(0, 100 if sim.library.variant == "race" else 300, 50):
        temperature = 0.8 if first == 50 else 0.0
        for s in samplers:
            s.set_params(temperature, 77, TEXT)
            s.set_position(1, 9)
        rows = rng.standard_normal((50, V)).astype(np.float32)
        rows[:, TEXT:] = 1e4
        rows[0, [57, 601]] = 9.0  # a tie between ranks
        with sim.together():
            for row in rows:
                queue(devices, samplers, row)
        sim.run()
        for step, row in enumerate(rows):
            want = choose(row, position=10 + step, temperature=temperature, seed=77, text_vocab=TEXT)
            at = first + step
            for s in samplers:
                word, posted = (int(w) for w in s.ring.words.reshape(SLOTS, 2)[at % SLOTS])
                assert (posted, word & 0xFFFFFFFF, word >> 32) == (at + 1, want, logits_hash(row[:TEXT])), f"step {at}"
        states = [s.state.download() for s in samplers]
        assert states[0][1] == 59 and all((state == states[0]).all() for state in states)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_logit_that_is_not_finite_is_reported_by_all(world: Any, rng: np.random.Generator, bad: float) -> None:
    sim, devices = world
    samplers = Sampler.create_ranks(devices, split(len(devices)), limit_ns=LIMIT_NS)
    for s in samplers:
        s.set_params(0.0, 0, TEXT)
    logits = rng.standard_normal(V).astype(np.float32)
    logits[TEXT - 1] = bad
    queue(devices, samplers, logits)
    sim.run()
    assert [int(s.ring.words[0]) & 0xFFFFFFFF for s in samplers] == [BAD_ID] * len(devices)


def test_a_rank_that_never_comes_ends_the_poll_with_its_name(world: Any, rng: np.random.Generator) -> None:
    sim, devices = world
    samplers = Sampler.create_ranks(devices, split(len(devices)), limit_ns=LIMIT_NS)
    for s in samplers:
        s.set_params(0.0, 0, TEXT)
    logits = rng.standard_normal(V).astype(np.float32)
    queue(devices, samplers, logits)
    sim.run()
    last = len(devices) - 1
    with pytest.raises(QwenRawError, match="trap"):
        queue(devices, samplers, logits, range(last))
        sim.run()
    faults = [s.meeting.limit.fault() for s in samplers if s.meeting is not None]
    said = [fault for fault in faults if fault is not None]
    assert said and all(fault.endswith(f"waited 50 ms for rank {last} in call 2") for fault in said)


def test_the_ranks_rows_must_be_all_rows(world: Any) -> None:
    _, devices = world
    with pytest.raises(QwenRawError, match="not all rows in rank order"):
        Sampler.create_ranks(devices[:2], [range(0, 5), range(6, 9)], limit_ns=0)
