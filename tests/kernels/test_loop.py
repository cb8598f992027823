"""loop.cu: a graph repeats a body as often as it should, on the simulator and a GPU; and ranks agree."""

from typing import Any

import numpy as np
import pytest

from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.loop import LOG, LoopEnd, loop_again, loop_begin
from qwen_raw.kernels.peers import PollLimit
from qwen_raw.kernels.sample import SLOTS, Sampler, sample
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

V = 200
U32 = np.dtype(np.uint32)


class Loop:
    """Choices of ids from logits that stay as they are, up to `most` a replay."""

    def __init__(self, dev: Any, most: int) -> None:
        self.dev, self.sampler = dev, Sampler.create(dev, V, 2)
        self.sampler.set_params(0.0, 0, V)
        self.sampler.set_position(1, 9)
        logits = np.zeros(V, np.float32)
        logits[77] = 1.0
        self.logits, self.limit = dev.array(logits), dev.zeros((1,), U32)
        (self.end,) = LoopEnd.create_ranks([dev], [PollLimit.create(dev, 0)])
        sample(dev, self.logits, self.sampler)  # loaded before the capture
        dev.synchronize()
        state = self.sampler.state

        def begin(handle: Any) -> None:
            loop_begin(dev, self.end, handle, state, self.limit)

        def body(handle: Any) -> None:
            sample(dev, self.logits, self.sampler, pdl=True)
            loop_again(dev, self.end, handle, state, self.limit, 3, most=most, pdl=True)

        self.number = 0
        self.graph = dev.capture_loop(begin, body)

    def run(self, limit: int, ends: int = 0, room: int = 1 << 30) -> int:
        """How many ids one replay chose."""
        self.limit.upload(np.array([limit], np.uint32))
        self.end.asked.words[:] = ends, room
        before = int(self.sampler.state.download()[2])
        self.graph.launch()
        self.number += 1
        after = int(self.sampler.state.download()[2])
        assert self.end.state.download()[:2].tolist() == [self.number, after - before]
        told = self.end.told.words
        assert (int(told[0]), int(told[1 + self.number % LOG])) == (self.number, after - before)
        ring = self.sampler.ring.words
        for step in range(before, after):
            assert [int(w) & 0xFFFFFFFF for w in ring[2 * (step % SLOTS) :][:2]] == [77, step + 1]
        return after - before


@pytest.fixture
def loop(dev: Any) -> Any:
    made = Loop(dev, 5)
    yield made
    made.graph.close()
    made.graph.close()


def test_a_loop_ends_for_each_of_its_reasons(loop: Loop) -> None:
    step = int(loop.sampler.state.download()[2])
    assert loop.run(step) == 0  # nothing to do
    assert loop.run(step + 100) == 5  # as many passes as a replay has
    assert loop.run(step + 7) == 2  # as many ids as are wanted
    assert loop.run(step + 7) == 0
    assert loop.run(step + 100, ends=loop.number + 1) == 1  # what the host asks is looked at after a pass
    assert loop.run(step + 100, ends=loop.number) == 5
    assert loop.run(step + 100, room=step + 13 + 3 + 2) == 3  # after two there was room for a third
    assert loop.run(step + 100, room=step) == 1
    for _ in range(LOG):
        assert loop.run(step + 100) == 5


def test_a_step_count_may_wrap(loop: Loop) -> None:
    state = loop.sampler.state
    state.view((1,), 2, U32).upload(np.array([(1 << 32) - 2], np.uint32))
    loop.limit.upload(np.array([3], np.uint32))
    loop.end.asked.words[:] = 0, 4
    loop.graph.launch()
    assert int(state.download()[2]) == 2  # 2 + 3 rows are more than 4


def test_what_cannot_loop(dev: Any) -> None:
    loop = Loop(dev, 1)
    args: tuple[Any, ...] = (dev, loop.end, np.zeros(1, np.uint64), loop.sampler.state)
    with pytest.raises(QwenRawError, match="a loop of 0 passes"):
        loop_again(*args, loop.limit, 1, most=0)
    with pytest.raises(QwenRawError, match="passes of 0 rows"):
        loop_again(*args, loop.limit, 0)
    with pytest.raises(QwenRawError, match="limit is int32"):
        loop_begin(*args, loop.limit.view((1,), 0, np.dtype(np.int32)))
    with pytest.raises(QwenRawError, match=r"during a capture|being captured"):
        dev.capture_loop(lambda handle: dev.synchronize(), lambda handle: None)
    loop.run(100)  # and the stream is usable
    loop.graph.close()


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("race", [False, True])
def test_ranks_do_what_rank_0_sees(ranks: int, race: bool) -> None:
    """On a random schedule with delayed links: all handles say the same, whichever rank is first."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"schedule seed {seed}")
    with SimWorld(ranks, seed=seed, race=race) as world:
        devices = [SimDevice(world=world, rank=rank) for rank in range(ranks)]
        ends = LoopEnd.create_ranks(devices, [PollLimit.create(dev, 10_000_000) for dev in devices])
        handles = [dev.zeros((1,), U32) for dev in devices]
        states = [dev.array(np.array([0, 0, 7, 0], np.int32)) for dev in devices]
        limits = [dev.array(np.array([9], np.uint32)) for dev in devices]
        for end in ends[1:]:
            end.asked.words[:] = 5, 0  # rank 0's counts
        asked = ((-1, 9, 1), (0, 9, 0), (-1, 8, 0), (-1, 9, 1), (-1, 9, 0))  # the last: as many passes as there are
        for stop, room, want in asked:
            ends[0].asked.words.view(np.int64)[:] = stop, room
            with devices[0].queueing():
                for parts in zip(devices, ends, handles, states, limits, strict=True):
                    dev, end, handle, state, limit = parts
                    loop_again(dev, end, np.array([handle.ptr], np.uint64), state, limit, 2, most=5)
            assert [int(handle.download()[0]) for handle in handles] == [want] * ranks


def test_a_rank_that_is_told_nothing_gives_up() -> None:
    with SimWorld(2) as world:
        devices = [SimDevice(world=world, rank=rank) for rank in range(2)]
        ends = LoopEnd.create_ranks(devices, [PollLimit.create(dev, 1_000_000) for dev in devices])
        handle, limit = devices[1].zeros((1,), U32), devices[1].zeros((1,), U32)
        state = devices[1].zeros((4,), np.dtype(np.int32))
        with pytest.raises(QwenRawError):
            loop_again(devices[1], ends[1], np.array([handle.ptr], np.uint64), state, limit, 1)
            devices[1].synchronize()
        assert ends[1].limit.fault() == "rank 1 waited 1 ms for rank 0 in call 1"
