"""Simulated devices for tests: skipped, with the reason, where there is no C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_raw.errors import UsageError
from qwen_raw.simt import toolchain
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="session")
def compiler() -> toolchain.Compiler:
    try:
        return toolchain.find_compiler()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture
def new_world(compiler: toolchain.Compiler) -> Iterator[Callable[..., SimWorld]]:
    """Makes worlds that know the kernels of tests/simt/kernels too; they are closed after the test."""
    made: list[SimWorld] = []

    def make(ranks: int = 1, **options: Any) -> SimWorld:
        made.append(SimWorld(ranks, kernel_folders=(KERNELS,), **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def new_device(new_world: Callable[..., SimWorld]) -> Callable[..., SimDevice]:
    """Makes devices in worlds of their own."""
    return lambda **options: SimDevice(world=new_world(1, **options))
