"""accept_f32 and draft_share between simulated ranks: all do what one rank would, on any schedule."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from device_fixtures import random_world

from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.accept import PassBuffers, accept, accept_begin
from qwen_raw.kernels.draft import SharedGuesses, draft_share
from qwen_raw.kernels.peers import PollLimit
from qwen_raw.kernels.sample import Sampler, sample
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

V, TEXT, R, LONGEST = 203, 190, 3, 1000
LIMIT_NS = 50_000_000
I32 = np.dtype(np.int32)


@pytest.fixture(params=[(2, False), (8, False), (3, True)], ids=["2", "8", "3-race"])
def world(request: pytest.FixtureRequest) -> Iterator[tuple[SimWorld, list[SimDevice]]]:
    with random_world(*request.param) as world:
        yield world


class Ends:
    """Decode states and pass buffers of ranks that hold V rows together."""

    def __init__(self, devices: list[Any]) -> None:
        world = len(devices)
        self.devices = devices
        if world == 1:
            self.samplers = [Sampler.create(devices[0], V, 2)]
        else:
            parts = [range(a, b) for a, b in pairwise(r * V // world for r in range(world + 1))]
            self.samplers = Sampler.create_ranks(devices, parts, limit_ns=LIMIT_NS, blocks=2)
        self.buffers = PassBuffers.create_ranks(devices, R, LONGEST, V)
        self.drafts = [dev.zeros((4,), I32) for dev in devices]
        for dev, b, s, draft in self.each():
            s.set_params(0.0, 0, TEXT)
            s.set_position(1, 9)
            b.limit.upload(np.array([LONGEST], np.uint32))
            accept_begin(dev, b, s, draft)

    def each(self) -> Any:
        return list(zip(self.devices, self.buffers, self.samplers, self.drafts, strict=True))

    def put(self, ids: np.ndarray[Any, Any]) -> None:
        for b in self.buffers:
            b.ids.upload(ids)

    def queue(self, rows: np.ndarray[Any, Any], ranks: int | None = None) -> None:
        for dev, b, s, draft in self.each()[:ranks]:
            mine = np.ascontiguousarray(rows[:, s.rows.start : s.rows.stop])
            accept(dev, b, s, draft, dev.array(mine))

    def found(self) -> list[list[Any]]:
        """Of every rank: all that a pass leaves."""
        return [
            [x.download().ravel().tolist() for x in (s.state.view((3,)), draft, b.rows, b.span, b.counts, b.history)]
            + [s.ring.words.tolist(), b.told.words.tolist()]
            for _, b, s, draft in self.each()
        ]


def test_all_ranks_do_what_one_would(world: Any, rng: np.random.Generator) -> None:
    """Passes of three rows, that often stand, and of one, queued without a host wait.

    So many that tags wrap between two of three rows: what the first left must not be taken for the second's, whose
    logits are smaller.
    """
    sim, devices = world
    lone = SimDevice()
    one, all_ = Ends([lone]), Ends(devices)
    count = 258 if len(devices) == 2 else 12
    for first in range(0, count, 43):
        ids = rng.integers(0, TEXT, R).astype(np.int32)
        passes = []
        for number in range(first, min(count, first + 43)):
            rows = rng.standard_normal((R if number % 256 in (0, 1, 3) else 1, V)) * (1.0 if number < 256 else 0.1)
            rows[:-1][range(len(rows) - 1), ids[1 : len(rows)]] = 5.0 + (number == 3)  # the guesses are right
            passes.append(rows.astype(np.float32))
        for ends in (one, all_):
            ends.put(ids)
        with sim.together():
            for rows in passes:
                all_.queue(rows)
        sim.run()
        for rows in passes:
            one.queue(rows)
        want = one.found()[0]
        for rank, got in enumerate(all_.found()):
            assert got == want, f"rank {rank} after pass {first + len(passes)}"
    assert int(one.buffers[0].told.words[1]) >= 6
    lone.close()


def test_choices_between_passes_go_by_their_own_count(world: Any, rng: np.random.Generator) -> None:
    """256 steps in passes between two choices: the first one's packs, of larger logits, are not the second's."""
    sim, devices = world
    if len(devices) != 2:
        pytest.skip("as many as it takes")
    ends = Ends(devices)
    ids = rng.integers(0, TEXT, R).astype(np.int32)
    ends.put(ids)
    rows = np.zeros((R, V), np.float32)
    rows[range(R - 1), ids[1:]] = 1.0
    for scale in (8.0, 1.0):
        row = (rng.permutation(V) / V * scale).astype(np.float32)
        row[TEXT:] = 0.0
        with sim.together():
            for dev, _, s, _ in ends.each():
                sample(dev, dev.array(row[s.rows.start : s.rows.stop]), s)
        sim.run()
        assert [int(s.state.download()[0]) for s in ends.samplers] == [row.argmax()] * len(devices)
        for b in ends.buffers:
            b.limit.upload(np.array([256], np.uint32))
        for _ in range(0, 256 if scale > 1 else 0, 3 * 29):
            with sim.together():
                for _ in range(29):
                    ends.queue(rows)
            sim.run()
        assert int(ends.samplers[0].state.download()[2]) == (256 if scale > 1 else 257)


def test_a_rank_that_never_comes_ends_the_poll_with_its_name(world: Any, rng: np.random.Generator) -> None:
    sim, devices = world
    ends, last = Ends(devices), len(devices) - 1
    ends.queue(rng.standard_normal((R, V)).astype(np.float32))
    sim.run()
    with pytest.raises(QwenRawError, match="trap"):
        ends.queue(rng.standard_normal((R, V)).astype(np.float32), last)
        sim.run()
    said = [fault for s in ends.samplers if s.meeting is not None and (fault := s.meeting.limit.fault()) is not None]
    assert said and all(fault.endswith(f"waited 50 ms for rank {last} in call 2") for fault in said)


def test_rank_0_s_guesses_reach_all(world: Any, rng: np.random.Generator) -> None:
    """So many calls that tags wrap, of any length."""
    sim, devices = world
    ends = SharedGuesses.create_ranks(devices, [PollLimit.create(dev, LIMIT_NS) for dev in devices])
    buffers = [PassBuffers.create(dev, 16, 10, V) for dev in devices]
    for call in range(270 if len(devices) == 2 else 10):
        M = int(rng.integers(1, 17))
        ids = rng.integers(0, 1 << 24, M).astype(np.int32)
        views = [b.first(M) for b in buffers]
        views[0].ids.upload(ids)
        with sim.together():
            for dev, b, end in zip(devices, views, ends, strict=True):
                draft_share(dev, b.ids, b.rows, end)
        sim.run()
        for b in views[1:]:
            assert b.ids.download().tolist() == ids.tolist(), f"call {call}"
            assert b.rows.download()[:, 0].tolist() == ids.tolist()
    with pytest.raises(QwenRawError, match="17 ids"):
        draft_share(devices[0], devices[0].zeros((17,), I32), devices[0].zeros((17, 4), I32), ends[0])
