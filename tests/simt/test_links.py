"""Several ranks in one process: links that delay and reorder stores, the adversary, and waiting across ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qwen_raw.device import BF16, U32, U64
from qwen_raw.kernels.allreduce_lamport import LamportWorkspace, allreduce_lamport
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.native import SimError
from qwen_raw.simt.world import SimWorld

NewWorld = Callable[..., SimWorld]
WORDS = 512


@dataclass
class Ring:
    """A world whose ranks know each other's memory."""

    world: SimWorld

    def __post_init__(self) -> None:
        self.devices = [SimDevice(world=self.world, rank=rank) for rank in range(self.world.ranks)]
        self.memory = [device.zeros((WORDS,), U32) for device in self.devices]
        pointers = [m.ptr for m in self.memory] + [0] * (8 - len(self.memory))
        self.peers = np.array(pointers, U64)

    def launch(self, rank: int, name: str, args: list[Any], threads: int = 32) -> None:
        device = self.devices[rank]
        device.launch(device.kernel("links", name), (1, 1, 1), (threads, 1, 1), args)

    def put(self, name: str, n: int) -> list[tuple[list[int], list[int]]]:
        """(got, expected) of every rank after one put to the right-hand neighbour."""
        payload = [np.arange(n, dtype=np.uint32) + 1000 * (rank + 1) for rank in range(len(self.devices))]
        out = [device.zeros((n,), U32) for device in self.devices]
        sent = [device.array(p) for device, p in zip(self.devices, payload, strict=True)]
        ranks = len(self.devices)
        with self.world.together():
            for r in range(ranks):
                args = [out[r], sent[r], self.peers, np.int32(r), np.int32(ranks), np.int32(n)]
                self.launch(r, name, args, 64)
        return [(out[r].download().tolist(), payload[r - 1].tolist()) for r in range(ranks)]


@pytest.fixture(params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def failures(new_world: NewWorld) -> Iterator[Callable[..., int]]:
    """How many of the seeds make a put deliver something else than the payload."""

    def count(name: str, ranks: int, seeds: int, **options: Any) -> int:
        bad = 0
        for seed in range(seeds):
            with new_world(ranks, seed=seed, **options) as world:
                bad += any(got != expected for got, expected in Ring(world).put(name, 40))
        return bad

    yield count


@pytest.mark.parametrize("name", ["put_released", "put_fenced"])
@pytest.mark.parametrize("weak_local", [False, True])
def test_ordered_put(failures: Callable[..., int], name: str, ranks: int, weak_local: bool) -> None:
    assert failures(name, ranks, 60, weak_local=weak_local) == 0


def test_unordered_put_is_caught(failures: Callable[..., int], ranks: int) -> None:
    assert failures("put_unfenced", ranks, 60) > 5


def test_the_adversary_can_be_left_out(failures: Callable[..., int]) -> None:
    assert failures("put_released", 4, 20, adversary=False) == 0
    assert failures("put_unfenced", 4, 20, adversary=False) > 0


def test_in_order_the_missing_fence_is_invisible(new_world: NewWorld) -> None:
    """Why schedules are needed: the fast way delivers at once."""
    ring = Ring(new_world(4))
    assert all(got == expected for got, expected in ring.put("put_unfenced", 40))


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_race_checker_over_ranks(new_world: NewWorld, seed: int | None) -> None:
    ring = Ring(new_world(4, seed=seed, race=True))
    assert all(got == expected for got, expected in ring.put("put_released", 40))


@pytest.mark.parametrize("seed", [None, 1])
def test_plain_store_to_a_peer(new_world: NewWorld, seed: int | None) -> None:
    ring = Ring(new_world(2, seed=seed, race=True))
    with pytest.raises(SimError, match=r"plain store to memory of rank [01], argument peers \+ \d+"):
        ring.put("put_plainly", 8)


def test_a_pack_can_arrive_in_pieces(new_world: NewWorld) -> None:
    seen = set()
    for seed in range(60):
        with new_world(2, seed=seed) as world:
            ring = Ring(world)
            out = ring.devices[1].zeros((1,), U32)
            with world.together():
                for rank in range(2):
                    ring.launch(rank, "torn_pack", [out, ring.peers, np.int32(rank)])
            seen.add(int(out.download()[0]))
    assert {4} < seen <= {1, 2, 3, 4}


def test_own_stores_are_visible_at_once(new_world: NewWorld, ranks: int) -> None:
    for seed in range(5):
        with new_world(ranks, seed=seed, weak_local=True) as world:
            ring = Ring(world)
            for rank, device in enumerate(ring.devices):
                out = device.zeros((32,), U32)
                ring.launch(rank, "reads_back", [out, ring.peers, np.int32(rank), np.int32(ranks)])
                assert out.download().tolist() == list(range(1, 33))


def test_no_reduction_is_lost(new_world: NewWorld, ranks: int) -> None:
    for seed in range(10):
        with new_world(ranks, seed=seed, weak_local=True) as world:
            ring = Ring(world)
            with world.together():
                for rank in range(ranks):
                    ring.launch(rank, "count_everywhere", [ring.peers, np.int32(ranks)])
            world.run()
            assert [int(m.download()[0]) for m in ring.memory] == [32 * ranks] * ranks


@pytest.mark.parametrize("seed", [None, 7])
def test_a_launch_may_wait_for_one_that_comes_later(new_world: NewWorld, seed: int | None) -> None:
    ring = Ring(new_world(2, seed=seed))
    out = [device.zeros((1,), U32) for device in ring.devices]
    for rank in (0, 1):
        assert ring.devices[rank].idle()
        ring.launch(rank, "signal_right", [out[rank], ring.peers, np.int32(rank), np.int32(2), np.uint32(10 + rank)])
        assert ring.devices[0].idle() is (rank == 1)
    assert [int(o.download()[0]) for o in out] == [11, 10]


@pytest.mark.parametrize("seed", [None, 7])
def test_uploads_keep_their_place_in_the_stream(new_world: NewWorld, seed: int | None) -> None:
    """What the host uploads after a launch that still waits must not reach memory before that launch has finished."""
    ring = Ring(new_world(2, seed=seed))
    out = [device.zeros((1,), U32) for device in ring.devices]
    args = [[out[rank], ring.peers, np.int32(rank), np.int32(2), np.uint32(10 + rank)] for rank in (0, 1)]
    ring.launch(0, "signal_right", args[0])
    out[0].upload(np.array([99], np.uint32))
    ring.launch(1, "signal_right", args[1])
    assert [int(o.download()[0]) for o in out] == [99, 10]


@pytest.mark.parametrize("seed", [None, 7])
def test_deadlock_names_every_rank_that_waits(new_world: NewWorld, seed: int | None) -> None:
    ring = Ring(new_world(3, seed=seed))
    out = ring.devices[0].zeros((1,), U32)
    for rank in (0, 1):  # rank 2 never sends to rank 0
        args = [
            out if rank == 0 else ring.memory[1].view((1,), 8),
            ring.peers,
            np.int32(rank),
            np.int32(3),
            np.uint32(5),
        ]
        ring.launch(rank, "signal_right", args)
    assert ring.devices[1].idle()
    with pytest.raises(SimError) as caught:
        ring.devices[0].synchronize()
    assert "kernel signal_right, rank 0, block (0,0,0): poll argument peers + 0 (2048 bytes), links.cu:" in str(
        caught.value
    )


def test_a_poll_of_several_peers_costs_what_they_send(new_world: NewWorld) -> None:
    """Each thread polls three addresses in turn, and sleeps until one of them changes: no other store wakes it."""
    n, ranks = 2048, 4
    world = new_world(ranks)
    devices = [SimDevice(world=world, rank=rank) for rank in range(ranks)]
    ends = LamportWorkspace.create(devices, n // 8, limit_ns=0)
    vectors = [device.zeros((n,), BF16) for device in devices]
    sums = [device.zeros((n,), BF16) for device in devices]
    world.run()
    before = world.stats().steps
    with world.together():
        for end, out, vector in zip(ends, sums, vectors, strict=True):
            allreduce_lamport(end, out, vector)
    world.run()
    packs = ranks * (n // 8)
    assert packs < world.stats().steps - before < 2 * ranks * packs


def test_what_a_poll_has_done_with_does_not_wake_it(new_world: NewWorld) -> None:
    """The thread has looked at words 2 and 3 and polls 0 and 1: when 2 and 3 change it looks again, and then sleeps."""
    ring = Ring(new_world(2))
    looks = ring.devices[1].zeros((1,), U32)
    ring.launch(1, "waits_in_part", [looks, ring.peers])
    ring.world.advance()
    for first in (2, 0):
        ring.launch(0, "set_two_words", [ring.peers, np.int32(first)])
        ring.world.advance()
    assert looks.download()[0] < 1000


def test_a_trace_shows_the_flag_overtaking_the_payload(new_world: NewWorld) -> None:
    for seed in range(40):
        with new_world(2, seed=seed, trace=2000) as world:
            if all(got == expected for got, expected in Ring(world).put("put_unfenced", 40)):
                continue
            lines = world.trace().splitlines()
        assert re.match(r" *\d+  rank \d  put_unfenced #\d+  block 0  thread \d+  ", lines[0])
        flags = [i for i, text in enumerate(lines) if "lands rank" in text and "memory + 0 of" in text]
        payloads = [i for i, text in enumerate(lines) if "lands rank" in text and "memory + 160 of" in text]
        assert flags and payloads and min(flags) < max(payloads)
        assert any("load rank" in text and "= 00000001  links.cu:" in text for text in lines)
        return
    pytest.fail("no seed failed")


def test_a_world_has_at_most_eight_ranks(new_world: NewWorld) -> None:
    with pytest.raises(Exception, match="1 to 8 ranks"):
        new_world(9)
