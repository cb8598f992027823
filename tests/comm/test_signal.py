"""Put-with-signal through SignalChannel: every form, ring and shape, on the simulator what it has, and on GPUs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_raw.comm.signal import SignalChannel
from qwen_raw.device import U32
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels.signal import Pieces, SignalEnds, signal_fetch, signal_ring, signal_store
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

PACKS = 5
KERNEL: tuple[dict[str, Any], ...] = ({}, {"shape": "pull"})
MEMOP: tuple[dict[str, str], ...] = (
    {"form": "memop"},
    {"form": "memop", "ring": "node"},
    {"form": "memop", "ring": "node", "shape": "pull"},
)


@dataclass
class Pair:
    """Producer and consumer; what the `together` block queues is queued at both ends before either runs."""

    producer: Any
    consumer: Any
    together: Any

    def finish(self) -> None:
        for dev in (self.producer, self.consumer):
            dev.synchronize()

    def queueing(self) -> AbstractContextManager[Any]:
        return self.together() if self.together else nullcontext()


@pytest.fixture(params=["sim", *(pytest.param(which, marks=pytest.mark.gpu) for which in ("0,0", "0,1"))])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "sim":
        with SimWorld(2, seed=5) as world:
            yield Pair(*(SimDevice(world=world, rank=rank) for rank in range(2)), world.together)
        return
    from qwen_raw.driver.device import CudaDevice
    from qwen_raw.driver.probe import probe

    ordinals = [int(n) for n in request.param.split(",")]
    if max(ordinals) >= len(probe().gpus):
        pytest.skip("needs two GPUs")
    with ExitStack() as stack:
        yield Pair(*(stack.enter_context(CudaDevice(n)) for n in ordinals), None)


@pytest.fixture(params=KERNEL, ids=["push", "pull"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("ordinals", ["0,0", "0,1"])
def test_a_million_hand_overs(ordinals: str) -> None:
    """Of distinct payloads, the producer as far ahead as the slots allow; in a process, which has a deadline."""
    from qwen_raw.driver.probe import probe

    if max(map(int, ordinals.split(","))) >= len(probe().gpus):
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "bench.signal", "--devices", ordinals, "--bytes", "--soak", "1000000"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--output", folder], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
        )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("soak ")]
    assert len(lines) == (3 if ordinals == "0,0" else 4) and all("every payload right" in line for line in lines), (
        done.stdout
    )


@pytest.mark.gpu
@pytest.mark.parametrize("ordinals", ["0,0", "0,1"])
def test_the_memop_form(ordinals: str) -> None:
    """The tests below whose streams wait, in a process of its own: such a wait has no deadline, a process has."""
    from qwen_raw.driver.probe import probe

    if max(map(int, ordinals.split(","))) >= len(probe().gpus):
        pytest.skip("needs two GPUs")
    script = Path(__file__).parent / "memop_hand_overs.py"
    done = subprocess.run([sys.executable, str(script), ordinals], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(MEMOP)} ways"


def payloads(rng: np.random.Generator, count: int, packs: int = PACKS) -> np.ndarray[Any, Any]:
    """uint32 [count, packs, 4], all different: each has its number and random words."""
    words = rng.integers(0, 2**32, (count, packs, 4), dtype=np.uint32)
    words[:, 0, 0] = np.arange(count)
    return words


def graphs(pair: Pair, channel: SignalChannel, count: int, packs: int = PACKS) -> tuple[Any, Any, Any, Any]:
    """(source, sink, producer's graph, consumer's graph) of `count` hand-overs, each of its own row."""
    source, sink = (dev.zeros((count, packs, 4), U32) for dev in (pair.producer, pair.consumer))
    captured = []
    for dev, call, buffer in ((pair.producer, channel.put, source), (pair.consumer, channel.wait, sink)):
        with dev.capture() as capture:
            for row in range(count):
                call(buffer.view((packs, 4), row * packs * 4))
        captured.append(capture.graph)
    return source, sink, captured[0], captured[1]


def test_every_payload_arrives_whole_and_in_order(pair: Pair, options: Any, rng: np.random.Generator) -> None:
    """Replays of a graph whose hand-overs have payloads of their own, new ones each time; nothing is reset between.

    The producer is as far ahead as the slots allow: its whole graph is queued before the consumer's.
    """
    channel = SignalChannel(pair.producer, pair.consumer, 16 * PACKS, **options)
    count, rounds = (6, 3) if pair.producer.kind == "sim" else (240, 30)
    source, sink, put, wait = graphs(pair, channel, count)
    for _ in range(rounds):
        words = payloads(rng, count)
        source.upload(words)
        sink.fill(0xEE)
        with pair.queueing():
            put.launch()
            wait.launch()
        pair.finish()
        np.testing.assert_array_equal(sink.download(), words)
    assert channel.fault() is None


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_any_number_of_slots_holds(pair: Pair, options: Any, rng: np.random.Generator, slots: int) -> None:
    """The credit keeps a producer from overwriting what is not taken, however few slots there are."""
    channel = SignalChannel(pair.producer, pair.consumer, 16 * PACKS, slots, **options)
    count = 2 * slots
    source, sink, put, wait = graphs(pair, channel, count)
    for _ in range(3):
        words = payloads(rng, count)
        source.upload(words)
        with pair.queueing():
            put.launch()
            wait.launch()
        pair.finish()
        np.testing.assert_array_equal(sink.download(), words)


def test_puts_run_ahead_of_the_consumer(pair: Pair, options: Any, rng: np.random.Generator) -> None:
    """As many puts as there are slots end without a consumer; it finds them later, none torn."""
    channel = SignalChannel(pair.producer, pair.consumer, 16 * PACKS, **options)
    words = payloads(rng, channel.slots)
    for row in words:
        channel.put(pair.producer.array(row))
    pair.producer.synchronize()
    for row in words:
        taken = pair.consumer.zeros((PACKS, 4), U32)
        channel.wait(taken)
        np.testing.assert_array_equal(taken.download(), row)


@pytest.mark.parametrize("value", [0.0, -0.0, np.float32(-1e-45), np.nan])
def test_a_payload_may_look_like_the_signal(pair: Pair, options: Any, value: float) -> None:
    """Activations that are zeros, negative zeros, subnormals: only the header is a signal."""
    channel = SignalChannel(pair.producer, pair.consumer, 16 * PACKS, **options)
    sent = np.full((PACKS, 4), value, np.float32).view(np.uint32)
    for _ in range(4):
        taken = pair.consumer.array(~sent)
        channel.put(pair.producer.array(sent))
        channel.wait(taken)
        pair.finish()
        np.testing.assert_array_equal(taken.download(), sent)


def test_large_payloads(pair: Pair, options: Any, rng: np.random.Generator) -> None:
    """Of several blocks; on a GPU of all that there may be, each with several rounds."""
    packs = 600 if pair.producer.kind == "sim" else 4 * 32 * 512 + 7
    channel = SignalChannel(pair.producer, pair.consumer, 16 * packs, **options)
    for words in payloads(rng, 4, packs):
        taken = pair.consumer.zeros((packs, 4), U32)
        channel.put(pair.producer.array(words))
        channel.wait(taken)
        pair.finish()
        np.testing.assert_array_equal(taken.download(), words)


def test_payloads_of_several_sizes_and_in_pieces(pair: Pair, options: Any, rng: np.random.Generator) -> None:
    """As rows of a cache lie: pieces go to where the consumer has its own; what is between them stays as it is."""
    channel = SignalChannel(pair.producer, pair.consumer, 16 * PACKS, **options)
    words = payloads(rng, 6)
    sent, taken = pair.producer.array(words), pair.consumer.array(~words)
    for first, count, packs, stride in ((0, 2, 2, 5), (1, 4, 1, 5), (0, 1, 5, 5), (2, 3, 1, 1)):
        views = [buffer.view((6 - first, PACKS, 4), first * PACKS * 4) for buffer in (sent, taken)]
        put, got = (Pieces(view, count, 16 * packs, 16 * stride) for view in views)
        channel.put(put)
        channel.wait(got)
        pair.finish()
        want = (~words[first:]).reshape(-1, 4)
        at = np.concatenate([np.arange(packs) + stride * i for i in range(count)])
        want[at] = words[first:].reshape(-1, 4)[at]
        np.testing.assert_array_equal(views[1].download().reshape(-1, 4), want)
        taken.upload(~words)


@pytest.mark.parametrize(
    ("count", "nbytes", "stride"), [(0, 16, 16), (2, 32, 16), (2, 24, 32), (2, 16, 24), (3, 16, 48), (1, 0, 16)]
)
def test_pieces_that_do_not_lie_apart_in_the_buffer_are_refused(count: int, nbytes: int, stride: int) -> None:
    with SimWorld(1) as world, pytest.raises(QwenRawError, match="in whole 16-byte packs"):
        Pieces(SimDevice(world=world).zeros((28,), U32).view((27,)), count, nbytes, stride)


def test_the_parts_of_the_memop_form(rng: np.random.Generator) -> None:
    """On the simulator, a kernel in the place of the stream's write, and a wait that finds the doorbell rung."""
    for pulled in (False, True):
        with SimWorld(2, seed=3) as world:
            devices = [SimDevice(world=world, rank=rank) for rank in range(2)]
            ends = SignalEnds.create(*devices, 16 * PACKS, pulled=pulled, limit_ns=10**12)
            words = payloads(rng, 7)
            taken = [devices[1].zeros((PACKS, 4), U32) for _ in words]
            with world.together():
                for number, row in enumerate(words, 1):
                    signal_store(ends, devices[0].array(row), number % 3)
                    signal_ring(ends, number % 3)
                for number, sink in enumerate(taken, 1):
                    signal_fetch(ends, sink, number % 3)
            world.run()
            for row, sink in zip(words, taken, strict=True):
                np.testing.assert_array_equal(sink.download(), row)


@pytest.mark.parametrize("end", ["producer", "consumer"])
def test_a_replay_that_is_at_another_slot_says_so(end: str) -> None:
    """What a graph of two hand-overs would do at its second replay, with three slots: a clear end, no torn payload."""
    with SimWorld(2, seed=3) as world:
        devices = [SimDevice(world=world, rank=rank) for rank in range(2)]
        channel = SignalChannel(*devices, 16 * PACKS)
        buffers = [dev.zeros((PACKS, 4), U32) for dev in devices]
        with pytest.raises(QwenRawError, match="trap"):
            with world.together():
                if end == "producer":
                    signal_store(channel._ends, buffers[0], 2)
                else:
                    signal_fetch(channel._ends, buffers[1], 2)
            world.run()
        said = channel.fault()
    assert said is not None and said.startswith("hand-over 1 does not belong to the slot")
    assert "multiple of 3" in said


def test_what_the_two_devices_cannot_do_is_refused() -> None:
    with SimWorld(2) as world:
        devices = [SimDevice(world=world, rank=rank) for rank in range(2)]
        for options, message in (
            ({"form": "memop"}, "no stream operations"),
            ({"form": "dma"}, "form 'dma' is not one of auto, kernel, memop"),
            ({"ring": "node"}, 'ring "node" belongs to form "memop"'),
        ):
            with pytest.raises(UsageError, match=message):
                SignalChannel(*devices, 16, **options)  # type: ignore[arg-type]
        for nbytes in (0, 24):
            with pytest.raises(QwenRawError, match="whole 16-byte packs"):
                SignalChannel(*devices, nbytes)
        channel = SignalChannel(*devices, 16)
        with pytest.raises(QwenRawError, match="the channel takes 16"):
            channel.put(devices[0].zeros((8,), U32))
