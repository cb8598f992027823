"""Small kernels through the simulator: each ability once, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen_raw.device import F32, I32, U32
from qwen_raw.errors import QwenRawError
from qwen_raw.simt.device import SimDevice

MODES: list[dict[str, Any]] = [{}, {"seed": 1}, {"seed": 2}, {"race": True}, {"race": True, "seed": 3}]
NewDevice = Callable[..., SimDevice]


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(f"{k}{v}" for k, v in mode.items()) or "in_order")
def device(request: pytest.FixtureRequest, new_device: NewDevice) -> SimDevice:
    return new_device(**request.param)


def bf16(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bits of values that bf16 holds exactly."""
    bits = x.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def test_vector_add_with_a_tail(device: SimDevice) -> None:
    a = np.arange(1000, dtype=np.float32)
    c = device.empty((1000,), F32)
    args = [c, device.array(a), device.array(2 * a), np.int32(1000)]
    device.launch(device.kernel("basics", "vector_add"), (4, 1, 1), (256, 1, 1), args)
    np.testing.assert_array_equal(c.download(), 3 * a)


@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_block_reduction(device: SimDevice, threads: int) -> None:
    x = np.random.default_rng(0).integers(-50, 50, (5, 777)).astype(np.float32)
    out = device.empty((5,), F32)
    kernel = device.kernel("basics", "block_sums")
    device.launch(kernel, (5, 1, 1), (threads, 1, 1), [out, device.array(x), np.int32(777)])
    np.testing.assert_array_equal(out.download(), x.sum(1))


def test_dynamic_shared_memory(device: SimDevice) -> None:
    x = np.arange(4 * 96, dtype=np.int32).reshape(4, 96)
    buffer = device.array(x)
    device.launch(device.kernel("basics", "reverse"), (4, 1, 1), (96, 1, 1), [buffer], smem=4 * 96)
    np.testing.assert_array_equal(buffer.download(), x[:, ::-1])


def test_last_block_combines_and_the_counter_resets(device: SimDevice) -> None:
    x = np.arange(3000, dtype=np.float32) % 97
    total, part, counter = device.empty((1,), F32), device.empty((7,), F32), device.zeros((1,), U32)
    for _ in range(3):
        args = [total, part, counter, device.array(x), np.int32(3000)]
        device.launch(device.kernel("basics", "grid_sum"), (7, 1, 1), (64, 1, 1), args)
        assert total.download()[0] == x.sum()
        assert counter.download()[0] == 0


def test_mma_tile(device: SimDevice) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 96)).astype(np.float32), rng.integers(-8, 9, (8, 96)).astype(np.float32)
    c = device.empty((16, 8), F32)
    args = [c, device.array(bf16(a)), device.array(bf16(b)), np.int32(96)]
    device.launch(device.kernel("basics", "mma_tile"), (1, 1, 1), (32, 1, 1), args)
    np.testing.assert_array_equal(c.download(), a @ b.T)


def test_graph_replays_launches_and_fills(device: SimDevice) -> None:
    x = device.zeros((64,), I32)
    kernel = device.kernel("basics", "add_one")
    with device.capture() as capture:
        device.launch(kernel, (2, 1, 1), (32, 1, 1), [x])
        device.launch(kernel, (2, 1, 1), (32, 1, 1), [x], pdl=True)
    assert (x.download() == 0).all(), "a capture runs nothing"
    for _ in range(3):
        capture.graph.launch()
    assert (x.download() == 6).all()
    capture.graph.close()


def test_a_rehearsal_checks_and_runs_nothing(device: SimDevice) -> None:
    x = device.zeros((64,), I32)
    with device.rehearsing():
        device.launch(device.kernel("basics", "add_one"), (2, 1, 1), (32, 1, 1), [x])
        with pytest.raises(QwenRawError, match="takes 1 arguments"):
            device.launch(device.kernel("basics", "add_one"), (2, 1, 1), (32, 1, 1), [x, x])
    assert (x.download() == 0).all()
    device.launch(device.kernel("basics", "add_one"), (2, 1, 1), (32, 1, 1), [x])
    assert (x.download() == 1).all()


def test_host_ring_is_read_without_waiting(device: SimDevice) -> None:
    ring = device.host_ring(4)
    before = device.host_syncs
    device.launch(device.kernel("basics", "ring_write"), (1, 1, 1), (32, 1, 1), [ring.buffer, np.uint64(2**40 + 7)])
    assert ring.words.tolist() == [2**40 + 7, 0, 0, 0]
    assert device.host_syncs == before


def test_same_seed_same_schedule(new_device: NewDevice) -> None:
    def steps(seed: int) -> tuple[int, list[int]]:
        device = new_device(seed=seed)
        order = device.zeros((17,), U32)
        device.launch(device.kernel("basics", "arrival"), (16, 1, 1), (32, 1, 1), [order])
        return device.world.stats().steps, order.download().tolist()

    assert steps(5) == steps(5)
    assert len({tuple(steps(seed)[1]) for seed in range(8)}) > 1, "seeds differ in the order of blocks"


def test_threads_that_never_wait_cost_no_switch(new_device: NewDevice) -> None:
    device = new_device()
    a = device.zeros((1 << 16,), F32)
    before = device.world.stats().steps
    device.launch(device.kernel("basics", "vector_add"), (256, 1, 1), (256, 1, 1), [a, a, a, np.int32(1 << 16)])
    assert device.world.stats().switches < 10
    assert device.world.stats().steps - before >= 1 << 16
