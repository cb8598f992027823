"""Copies, barriers and products that run beside the threads: a ring that is right, and the mistakes in one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from loaders.dtypes import bf16_to_f32, f32_to_bf16
from qwen_raw.device import F32, U32, BoxShape, TensorMap
from qwen_raw.errors import QwenRawError
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.native import SimError

NewDevice = Callable[..., SimDevice]
SLICES, SMEM = 9, 2 * 80 * 128 + 1024


def matrix(device: SimDevice, bits: np.ndarray) -> TensorMap:
    rows, columns = bits.shape
    return device.tensor_map([device.array(bits)], BoxShape((columns, rows), (2 * columns,), (64, rows)))


def ring(device: SimDevice, name: str) -> float:
    """How far the product is off; infinity for NaN, and where phases slip so that somebody waits for ever."""
    rng = np.random.default_rng(1)
    x, w = (f32_to_bf16(rng.standard_normal((n, 64 * SLICES)).astype(np.float32)) for n in (64, 16))
    out = device.zeros((64, 16), F32)
    args = [out, matrix(device, x), matrix(device, w), np.int32(SLICES)]
    try:
        device.launch(device.kernel("async", name), (1, 1, 1), (160, 1, 1), args, smem=SMEM)
        device.synchronize()
    except SimError as problem:
        if "trap" in str(problem):
            return np.inf
        raise
    error = np.abs(out.download() - bf16_to_f32(x) @ bf16_to_f32(w).T).max()
    return float(error) if np.isfinite(error) else np.inf


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("race", [False, True])
def test_a_ring(new_device: NewDevice, seed: int | None, race: bool) -> None:
    assert ring(new_device(seed=seed, race=race), "ring_ok") < 1e-3


@pytest.mark.parametrize("mistake", ["reads_early", "copies_early", "sums_early"])
def test_mistakes_show_in_values(new_device: NewDevice, mistake: str) -> None:
    """Under some schedule: what is early is done as late as the rules allow."""
    assert max(ring(new_device(seed=seed), f"ring_{mistake}") for seed in range(60)) > 0.1


@pytest.mark.parametrize("mistake", ["reads_early", "gives_back_early"])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_mistakes_are_races(new_device: NewDevice, mistake: str, seed: int | None) -> None:
    with pytest.raises(SimError, match=r"data race: .* of dynamic shared memory|uninitialised shared memory"):
        ring(new_device(seed=seed, race=True), f"ring_{mistake}")


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_hand_over(new_device: NewDevice, seed: int | None) -> None:
    """Who arrives without waiting is ordered before those that wait, and not after them."""

    def run(name: str) -> np.ndarray:
        device = new_device(race=True, seed=seed)
        out = device.zeros((64,), U32)
        device.launch(device.kernel("async", f"hand_over_{name}"), (1, 1, 1), (128, 1, 1), [out], smem=1024)
        return out.download()

    assert (run("ok") == np.arange(64)).all()
    for mistake in ("late", "takes"):
        with pytest.raises(SimError, match=r"data race: .* of dynamic shared memory|uninitialised shared memory"):
            run(mistake)


def test_an_operand_in_registers_is_read_late(new_device: NewDevice) -> None:
    device, out = new_device(), {}
    for name in ("ok", "early"):
        sums = device.zeros((128,), F32)
        device.launch(device.kernel("async", f"registers_{name}"), (1, 1, 1), (128, 1, 1), [sums], smem=2048)
        out[name] = sums.download()
    assert (out["ok"] == 32 * 16).all()
    assert (out["early"] < 32 * 16).all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (0, "mbarrier at dynamic shared memory .* was not initialised"),
        (1, "a block ended with bulk copies under way"),
        (2, "destination at 128, not aligned to 1024 bytes"),
        (3, "tma_load_3d with a tensor map of 2 dimensions"),
        (4, r"named_barrier 1 of \d+ threads, others wait there for \d+"),
        (5, r"deadlock|waits"),
        (6, r"trap: the kernel ended the launch"),
        (7, "the warp is not in a whole warpgroup"),
        (8, "a warp ended with products that it did not wait for"),
        (9, "a block ended with a named barrier that some had arrived at"),
        (10, "tma_store from element -3 of dimension 1: an H200 answers with an illegal instruction"),
    ],
)
def test_misuse(new_device: NewDevice, mode: int, expected: str) -> None:
    device = new_device()
    x = matrix(device, np.zeros((64, 64), np.uint16))
    with pytest.raises(SimError, match=expected):
        device.launch(
            device.kernel("async", "misuse"), (1, 1, 1), (160, 1, 1), [x, np.int32(mode)], smem=64 * 128 + 1024
        )
        device.synchronize()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (BoxShape((64, 8), (120,), (64, 8)), "multiple of 16"),
        (BoxShape((64, 8), (128,), (32, 8)), "box row of 64 bytes"),
        (BoxShape((64, 8), (128, 128), (64, 8)), "2 strides"),
        (BoxShape((64, 8), (128,), (64, 257)), "1 to 256"),
        (BoxShape((64,), (), (64,)), "1 dimensions"),
    ],
)
def test_tensor_maps_that_no_gpu_takes(new_device: NewDevice, shape: BoxShape, expected: str) -> None:
    device = new_device()
    with pytest.raises(QwenRawError, match=expected):
        device.tensor_map([device.zeros((8, 64), np.dtype(np.uint16))], shape)


def test_a_map_that_is_larger_than_its_memory(new_device: NewDevice) -> None:
    device = new_device()
    small, w = device.zeros((63, 64), np.dtype(np.uint16)), matrix(device, np.zeros((16, 64), np.uint16))
    x = device.tensor_map([small], BoxShape((64, 64), (128,), (64, 64)))
    args = [device.zeros((64, 16), F32), x, w, np.int32(1)]
    with pytest.raises(SimError, match="out of bounds"):
        device.launch(device.kernel("async", "ring_ok"), (1, 1, 1), (160, 1, 1), args, smem=SMEM)
