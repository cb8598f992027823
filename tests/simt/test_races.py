"""The race checker tells ordered kernels from the same ones with the ordering left out, under any schedule."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen_raw.device import F32, U32
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.native import SimError

NewDevice = Callable[..., SimDevice]
SEEDS: list[int | None] = [None, 1, 2, 3, 4, 5]


def launch_one(device: SimDevice, name: str) -> None:
    """One of the kernels that work on a block's memory."""
    blocks = 3 if name == "blocks_overlap" else 1
    threads = 64 if name.startswith(("barrier", "reuse")) else 32
    device.launch(device.kernel("races", name), (blocks, 1, 1), (threads, 1, 1), [device.zeros((128,), F32)])


def launch_combine(device: SimDevice, name: str) -> float:
    total, part, counter = device.zeros((1,), F32), device.zeros((5 * 64,), F32), device.zeros((1,), U32)
    device.launch(device.kernel("races", name), (5, 1, 1), (64, 1, 1), [total, part, counter])
    return float(total.download()[0])


def launch_message(device: SimDevice, name: str) -> list[float]:
    x, flag = device.zeros((2,), F32), device.zeros((1,), U32)
    device.launch(device.kernel("races", name), (2, 1, 1), (32, 1, 1), [x, flag])
    return [float(v) for v in x.download()]


def launch_dependents(device: SimDevice, consumer: str) -> Any:
    x, y = device.zeros((32,), F32), device.zeros((32,), F32)
    produce, consume = device.kernel("races", "produce"), device.kernel("races", consumer)
    with device.world.together():
        for _ in range(3):
            device.launch(produce, (1, 1, 1), (32, 1, 1), [x], pdl=True)
        device.launch(consume, (1, 1, 1), (32, 1, 1), [y, x], pdl=True)
    return y.download()


@pytest.mark.parametrize("seed", SEEDS)
class TestOrdered:
    @pytest.mark.parametrize("name", ["barrier_ok", "reuse_ok", "syncwarp_ok"])
    def test_in_a_block(self, new_device: NewDevice, seed: int | None, name: str) -> None:
        launch_one(new_device(race=True, seed=seed), name)

    @pytest.mark.parametrize("name", ["combine_acq_rel", "combine_fenced"])
    def test_last_block(self, new_device: NewDevice, seed: int | None, name: str) -> None:
        assert launch_combine(new_device(race=True, seed=seed), name) == 320

    def test_flag(self, new_device: NewDevice, seed: int | None) -> None:
        assert launch_message(new_device(race=True, seed=seed), "message_ok") == [7, 7]

    def test_dependent_launch(self, new_device: NewDevice, seed: int | None) -> None:
        np.testing.assert_array_equal(launch_dependents(new_device(race=True, seed=seed), "consume_ok"), 3)

    def test_launches_of_one_stream(self, new_device: NewDevice, seed: int | None) -> None:
        device = new_device(race=True, seed=seed)
        x = device.zeros((128,), F32)
        for name in ("barrier_ok", "reuse_ok"):
            device.launch(device.kernel("races", name), (1, 1, 1), (64, 1, 1), [x])


@pytest.mark.parametrize("seed", SEEDS)
class TestRaces:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("barrier_missing", r"(data race: |uninitialised shared memory: )"),
            ("reuse_too_early", r"data race: .* of shared s \+ \d+ \(256 bytes\), at races\.cu:\d+ is not ordered"),
            ("syncwarp_missing", r"(data race: |uninitialised shared memory: )"),
            ("shuffle_is_no_fence", r"data race: read of shared s \+ \d+ .* by thread \d+"),
            ("blocks_overlap", r"data race: write of argument x \+ \d+ .* by thread \d+ of another block"),
        ],
    )
    def test_in_a_block(self, new_device: NewDevice, seed: int | None, name: str, expected: str) -> None:
        with pytest.raises(SimError) as caught:
            launch_one(new_device(race=True, seed=seed), name)
        assert re.search(expected, str(caught.value)), str(caught.value)

    @pytest.mark.parametrize("name", ["combine_fence_before_barrier", "combine_unfenced"])
    def test_last_block(self, new_device: NewDevice, seed: int | None, name: str) -> None:
        with pytest.raises(SimError, match=r"data race: read of argument part .* of another block"):
            launch_combine(new_device(race=True, seed=seed), name)

    def test_flag(self, new_device: NewDevice, seed: int | None) -> None:
        with pytest.raises(SimError, match=r"data race: read of argument x"):
            launch_message(new_device(race=True, seed=seed), "message_relaxed")

    def test_dependent_launch_that_reads_before_it_waits(self, new_device: NewDevice, seed: int | None) -> None:
        with pytest.raises(SimError, match=r"data race: read of argument x .* of another launch"):
            launch_dependents(new_device(race=True, seed=seed), "consume_too_early")


def test_reading_early_shows_in_values_too(new_device: NewDevice) -> None:
    """Without the checker, some random schedule lets the dependent launch overtake its predecessor."""
    seen = {float(launch_dependents(new_device(seed=seed), "consume_too_early")[0]) for seed in range(40)}
    assert seen > {3.0}


def test_missing_barrier_shows_in_values_too(new_device: NewDevice) -> None:
    device = new_device(seed=1)
    x = device.zeros((128,), F32)
    device.launch(device.kernel("races", "barrier_missing"), (1, 1, 1), (64, 1, 1), [x])
    assert np.isnan(x.download()).any()
