"""Simulated devices for tests: skipped, with the reason, where there is no C++ compiler.

Under `python -m qwen_raw.simt.run -m pytest tests/simt` all kernels are compiled with AddressSanitizer instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_fixtures import rng

from qwen_raw.errors import UsageError
from qwen_raw.simt import run, toolchain
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.library import Library, variant_of
from qwen_raw.simt.world import SimWorld

__all__ = ["rng"]

KERNELS = Path(__file__).parent / "kernels"
# How the project's own kernels are run, beyond the plain way in which tests/kernels runs them.
MODES = ["address"] if run.active() else ["random", "race"]


@pytest.fixture(scope="session")
def compiler() -> toolchain.Compiler:
    try:
        return toolchain.find_compiler()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def library(compiler: toolchain.Compiler) -> Callable[[toolchain.Variant], Library]:
    """The compiled kernels of a variant, those of tests/simt/kernels among them."""
    return functools.cache(lambda variant: Library(variant, kernel_folders=(KERNELS,)))


@pytest.fixture
def new_world(library: Callable[[toolchain.Variant], Library]) -> Iterator[Callable[..., SimWorld]]:
    """Makes worlds that know the kernels of tests/simt/kernels too; they are closed after the test."""
    made: list[SimWorld] = []

    def make(ranks: int = 1, **options: Any) -> SimWorld:
        if run.active():
            if options.get("race"):
                pytest.skip("the race checker and AddressSanitizer exclude each other")
            options["sanitize"] = "address"
        variant = variant_of(options.get("race", False), options.get("sanitize"))
        made.append(SimWorld(ranks, library=library(variant), **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def new_device(new_world: Callable[..., SimWorld]) -> Callable[..., SimDevice]:
    """Makes devices in worlds of their own."""
    return lambda **options: SimDevice(world=new_world(1, **options))


@pytest.fixture(params=MODES)
def dev(request: pytest.FixtureRequest, new_device: Callable[..., SimDevice]) -> SimDevice:
    """In place of the fixture of that name: tests/kernels' tests, under random schedules and with every check.

    "random": any order of blocks and threads, by a fresh seed. "race": instrumented, in order or random.
    """
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"schedule seed {seed}")
    options: dict[str, dict[str, Any]] = {
        "random": {"seed": seed},
        "race": {"race": True, "seed": seed if seed % 4 == 0 else None},
        "address": {"sanitize": "address", "seed": seed if seed % 2 else None},
    }
    return new_device(**options[request.param])
