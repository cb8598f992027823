"""The all-reduces and put-with-signal between simulated ranks: values, changing sizes, replays, both output forms."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kernel_reference import bf16_input

from loaders.dtypes import bf16_to_f32, f32_to_bf16
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.allreduce_flag import FlagWorkspace, allreduce_flag
from qwen_raw.kernels.allreduce_lamport import LamportWorkspace, allreduce_lamport
from qwen_raw.kernels.allreduce_norm import LONGEST, allreduce_norm
from qwen_raw.kernels.allreduce_twoshot import TwoShotWorkspace, allreduce_twoshot
from qwen_raw.kernels.signal import SignalEnds, signal_put, signal_take
from qwen_raw.simt import run
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

LIMIT_NS = 10**12
CAPACITY = 24  # packs
PATHS: dict[str, tuple[Any, Callable[..., None]]] = {
    "lamport": (LamportWorkspace, allreduce_lamport),
    "flag": (FlagWorkspace, allreduce_flag),
    "twoshot": (TwoShotWorkspace, allreduce_twoshot),
}


@pytest.fixture(params=[(2, False), (3, False), (8, False), (3, True)], ids=["2", "3", "8", "3-race"])
def world(request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[Any]]]:
    """(SimWorld, its devices) on a random schedule with delayed links; checked for races, or under AddressSanitizer.

    The latter in a process started by `python -m qwen_raw.simt.run`.
    """
    ranks, race = request.param
    if run.active() and race:
        pytest.skip("the race checker and AddressSanitizer exclude each other")
    with SimWorld(ranks, seed=7, race=race, sanitize="address" if run.active() else None) as world:
        yield world, [SimDevice(world=world, rank=r) for r in range(ranks)]


def rank_order_sum(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    total = np.zeros_like(parts[0], np.float32)
    for part in parts:
        total += part.astype(np.float32)
    return total


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("add", [False, True])
def test_sums_are_exact_and_the_same_everywhere(world: Any, rng: np.random.Generator, path: str, add: bool) -> None:
    """Calls back to back without a host wait, of changing sizes and payloads; out is poisoned before each."""
    sim, devices = world
    workspace, reduce = PATHS[path]
    ends = workspace.create(devices, CAPACITY, limit_ns=LIMIT_NS)
    expected, outs = [], []
    with sim.together():
        for packs in (1, CAPACITY, 3, 17, 2):
            inputs = [bf16_input(rng, 8 * packs) for _ in devices]
            base = rng.standard_normal(8 * packs).astype(np.float32)
            total = rank_order_sum([v for _, v in inputs])
            if path == "twoshot" and add:
                total = bf16_to_f32(f32_to_bf16(total))
            expected.append(base + total if add else f32_to_bf16(total))
            row = []
            for dev, ws, (bits, _) in zip(devices, ends, inputs, strict=True):
                out = dev.array(base) if add else dev.empty((8 * packs,), np.dtype(np.uint16))
                reduce(ws, out, dev.array(bits), add=add, block=32, grid=2)
                row.append(out)
            outs.append(row)
    sim.run()
    for want, row in zip(expected, outs, strict=True):
        for rank, out in enumerate(row):
            np.testing.assert_array_equal(out.download(), want, err_msg=f"rank {rank}")


@pytest.mark.parametrize("path", PATHS)
def test_payload_bit_patterns(world: Any, path: str) -> None:
    """Negative zero, subnormals, NaN, infinities, pairs that form the sentinel: the call ends, with right values."""
    sim, devices = world
    workspace, reduce = PATHS[path]
    ends = workspace.create(devices, CAPACITY, limit_ns=LIMIT_NS)
    low = np.array(
        [0x8000, 0x8001, 0x807F, 0x0001, 0x007F, 0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x0000, 0x0000, 0x3F80], np.uint16
    )
    high = np.array(
        [0x8000, 0x8000, 0x0000, 0x8000, 0x8001, 0x8000, 0x0000, 0x8000, 0x8000, 0x8000, 0x8001, 0x8000], np.uint16
    )
    bits = np.stack([low, high], 1).reshape(-1)
    zeros = np.zeros_like(bits)
    outs = []
    with sim.together():
        for sender in range(len(devices)):
            for rank, (dev, ws) in enumerate(zip(devices, ends, strict=True)):
                out = dev.empty(bits.shape, np.dtype(np.uint16))
                reduce(ws, out, dev.array(bits if rank == sender else zeros), block=32, grid=1)
                outs.append(out)
    sim.run()
    want = bf16_to_f32(bits)
    for out in outs:
        np.testing.assert_array_equal(bf16_to_f32(out.download()), want)  # compares -0 and +0 as equal, NaN as NaN


@pytest.mark.parametrize("path", PATHS)
def test_replays_of_a_graph_advance_the_protocol(world: Any, rng: np.random.Generator, path: str) -> None:
    """An odd number of reduces a graph, replayed with new inputs: nothing of the protocol is baked into the graph."""
    sim, devices = world
    workspace, reduce = PATHS[path]
    ends = workspace.create(devices, CAPACITY, limit_ns=LIMIT_NS)
    inputs = [dev.zeros((40,), np.dtype(np.uint16)) for dev in devices]
    outs = [dev.empty((40,), np.dtype(np.uint16)) for dev in devices]
    graphs = []
    for dev, ws, inp, out in zip(devices, ends, inputs, outs, strict=True):
        with dev.capture() as capture:
            for _ in range(3):
                reduce(ws, out, inp, block=32, grid=1)
        graphs.append(capture.graph)
    for _ in range(4):
        values = [bf16_input(rng, 40) for _ in devices]
        for inp, (bits, _) in zip(inputs, values, strict=True):
            inp.upload(bits)
        with sim.together():
            for graph in graphs:
                graph.launch()
        sim.run()
        want = f32_to_bf16(rank_order_sum([v for _, v in values]))
        for out in outs:
            np.testing.assert_array_equal(out.download(), want)


def first_and_then_without_the_last(world: Any, path: str, limit_ns: int) -> list[Any]:
    """One call of all ranks, then one that the last rank never makes: what SimError says of it is raised."""
    sim, devices = world
    workspace, reduce = PATHS[path]
    ends = workspace.create(devices, CAPACITY, limit_ns=limit_ns)
    outs, inputs = ([dev.zeros((8,), np.dtype(np.uint16)) for dev in devices] for _ in range(2))
    for coming in (devices, devices[:-1]):
        with sim.together():
            for ws, out, inp in list(zip(ends, outs, inputs, strict=True))[: len(coming)]:
                reduce(ws, out, inp, block=32, grid=1)
        if coming is devices:
            sim.run()
            assert [end.limit.fault() for end in ends] == [None] * len(devices)
    return list(ends)


@pytest.mark.parametrize("path", PATHS)
def test_a_peer_that_never_comes_ends_the_poll_with_its_name(world: Any, path: str) -> None:
    """The deadline of a poll: the launch fails, and the fault records name who waited for whom, and in which call."""
    sim, devices = world
    ends = first_and_then_without_the_last(world, path, limit_ns=50_000_000)
    with pytest.raises(QwenRawError, match="trap"):
        sim.run()
    faults = {rank: end.limit.fault() for rank, end in enumerate(ends)}
    number = {"lamport": 2, "flag": 2, "twoshot": 3}[path]  # twoshot counts barriers
    said = {rank: fault for rank, fault in faults.items() if fault is not None}
    assert said, "no fault record"
    for rank, fault in said.items():
        assert fault == f"rank {rank} waited 50 ms for rank {len(devices) - 1} in call {number}"


@pytest.mark.parametrize("path", PATHS)
def test_without_a_limit_a_missing_peer_is_a_deadlock(world: Any, path: str) -> None:
    ends = first_and_then_without_the_last(world, path, limit_ns=0)
    with pytest.raises(QwenRawError, match="deadlock"):
        world[0].run()
    assert [end.limit.fault() for end in ends] == [None] * len(ends)


def test_the_fault_record_is_out_before_the_trap() -> None:
    """A trap completes no stores: with the own rank's stores late too, the record still arrives."""
    from qwen_raw.simt.device import SimDevice
    from qwen_raw.simt.world import SimWorld

    for seed in range(20):
        with SimWorld(2, seed=seed, weak_local=True) as sim:
            devices = [SimDevice(world=sim, rank=rank) for rank in range(2)]
            ends = first_and_then_without_the_last((sim, devices), "lamport", limit_ns=50_000_000)
            with pytest.raises(QwenRawError, match="trap"):
                sim.run()
            assert ends[0].limit.fault() == "rank 0 waited 50 ms for rank 1 in call 2"


@pytest.mark.parametrize(("puts", "takes"), [(0, 1), (4, 0)])
def test_a_hand_over_that_never_comes_ends_the_poll_with_its_name(world: Any, puts: int, takes: int) -> None:
    """A take without a put; a put that runs more than three ahead of what is taken."""
    sim, devices = world
    ends = SignalEnds.create(devices[0], devices[1], 16, limit_ns=50_000_000)
    buffers = [dev.zeros((4,), np.dtype(np.uint32)) for dev in devices[:2]]
    with pytest.raises(QwenRawError, match="trap"):
        with sim.together():
            for _ in range(puts):
                signal_put(ends, buffers[0])
            for _ in range(takes):
                signal_take(ends, buffers[1])
        sim.run()
    waited = (
        ("rank 0 waited 50 ms for rank 1 in call 4", None)
        if puts
        else (None, "rank 1 waited 50 ms for rank 0 in call 1")
    )
    assert tuple(limit.fault() for limit in ends.limits) == waited


def test_messages_that_do_not_fit_are_refused(world: Any) -> None:
    _, devices = world
    ws = LamportWorkspace.create(devices, CAPACITY, limit_ns=LIMIT_NS)[0]
    u16 = np.dtype(np.uint16)
    big = devices[0].zeros((8 * CAPACITY + 8,), u16)
    with pytest.raises(QwenRawError, match=f"the workspace takes {8 * CAPACITY}"):
        allreduce_lamport(ws, devices[0].zeros(big.shape, u16), big)
    odd = devices[0].zeros((12,), u16)
    with pytest.raises(QwenRawError, match="whole packs"):
        allreduce_lamport(ws, devices[0].zeros((12,), u16), odd)


def test_rows_that_the_fused_norm_does_not_take_are_refused(world: Any) -> None:
    _, devices = world
    dev, D = devices[0], LONGEST + 8
    ws = LamportWorkspace.create(devices, D // 8, limit_ns=LIMIT_NS)[0]
    h, out, inp, g = (
        dev.zeros(shape, np.dtype(dtype))
        for shape, dtype in (((1, D), "f4"), ((1, D), "u2"), ((1, D), "u2"), ((D,), "u2"))
    )
    with pytest.raises(QwenRawError, match=f"rows of {D} elements, the kernel takes {LONGEST}"):
        allreduce_norm(ws, h, out, inp, g, 1e-6)


@pytest.mark.parametrize(
    ("grid", "message"), [(513, "laid out for 1 to 512"), (0, "0 blocks"), (200, "wait for each other")]
)
def test_blocks_that_cannot_all_be_resident_are_refused(world: Any, grid: int, message: str) -> None:
    """Each waits for others: one that cannot start would be waited for, for ever."""
    _, devices = world
    ws = LamportWorkspace.create(devices, CAPACITY, limit_ns=LIMIT_NS)[0]
    out, inp = (devices[0].zeros((8,), np.dtype(np.uint16)) for _ in range(2))
    with pytest.raises(QwenRawError, match=message):
        allreduce_lamport(ws, out, inp, block=512, grid=grid)


@pytest.mark.parametrize("handovers", [1, 10])
def test_put_with_signal(world: Any, rng: np.random.Generator, handovers: int) -> None:
    """A producer that is queued far ahead; payloads of zeros and sentinels among them; every payload arrives whole."""
    sim, devices = world
    ends = SignalEnds.create(devices[0], devices[1], 5 * 16, limit_ns=LIMIT_NS)
    payloads = [rng.integers(0, 2**32, (5, 4), dtype=np.uint32) for _ in range(handovers)]
    payloads[0][:], payloads[-1][1:3] = 0, 0x80000000
    taken = [devices[1].empty((5, 4), np.dtype(np.uint32)) for _ in payloads]
    with sim.together():
        for payload in payloads:
            signal_put(ends, devices[0].array(payload))
        for buffer in taken:
            signal_take(ends, buffer)
    sim.run()
    for payload, buffer in zip(payloads, taken, strict=True):
        np.testing.assert_array_equal(buffer.download(), payload)
