"""Fixtures of tests that run on both devices: the CPU simulator, given a C++ compiler, and a GPU, if there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from qwen_raw.simt import run
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def dev(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh `qwen_raw.device.Device` of either kind."""
    if request.param == "cuda":
        yield request.getfixturevalue("cuda_device")
        return
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("the simulator needs a C++17 compiler")
    device = SimDevice()
    yield device
    device.close()


@contextmanager
def random_world(ranks: int, race: bool) -> Iterator[tuple[SimWorld, list[SimDevice]]]:
    """A random schedule with delayed links; checked for races, or under AddressSanitizer (`qwen_raw.simt.run`)."""
    if run.active() and race:
        pytest.skip("the race checker and AddressSanitizer exclude each other")
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"schedule seed {seed}")
    with SimWorld(ranks, seed=seed, race=race, sanitize="address" if run.active() else None) as sim:
        yield sim, [SimDevice(world=sim, rank=rank) for rank in range(ranks)]


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh numbers in every run: a kernel must be right on any input. The seed is shown when a test fails."""
    seed = int(np.random.SeedSequence().entropy) & 0xFFFFFFFF  # type: ignore[arg-type]
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)
