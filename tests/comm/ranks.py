"""Ranks to test with: simulated ones, several on a GPU, one a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from qwen_raw.simt import run
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld


@dataclass
class Ranks:
    """Devices; `together()`: what the block queues starts at once, where that can be said; `finish()`: wait for all."""

    devices: list[Any]
    together: Callable[[], AbstractContextManager[Any]]

    def finish(self) -> None:
        for dev in self.devices:
            dev.synchronize()


@pytest.fixture(
    params=[
        "sim-2",
        "sim-8",
        *(pytest.param(f"cuda-{name}", marks=pytest.mark.gpu) for name in ("0,0", "0,0,0,0,0,0,0,0", "0,1", "0,0,1,1")),
    ]
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    kind, _, which = request.param.partition("-")
    if kind == "sim":
        sanitize = "address" if run.active() else None
        with SimWorld(int(which), seed=11, sanitize=sanitize) as world:  # type: ignore[arg-type]
            yield Ranks([SimDevice(world=world, rank=r) for r in range(world.ranks)], world.together)
        return
    from qwen_raw.driver.device import CudaDevice
    from qwen_raw.driver.probe import probe

    ordinals = [int(n) for n in which.split(",")]
    if max(ordinals) >= len(probe().gpus):
        pytest.skip("needs two GPUs")
    with ExitStack() as stack:
        yield Ranks([stack.enter_context(CudaDevice(n)) for n in ordinals], nullcontext)
