"""The two machines that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conformance.machines import HERE, Machine, Recording, stage_probes

from qwen_raw.errors import UsageError

if TYPE_CHECKING:
    from qwen_raw.simt.library import Library


@pytest.fixture(scope="session")
def library() -> Library:
    """The simulator's compiled kernels, the probes among them."""
    from qwen_raw.simt.library import Library

    try:
        return Library(kernel_folders=(HERE,))
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source root for the GPU's compiler with probes.cu in it."""
    return stage_probes(tmp_path_factory.mktemp("probes"))


@pytest.fixture
def sim(library: Library) -> Iterator[Machine]:
    """Two ranks in the simulator."""
    from qwen_raw.simt.device import SimDevice
    from qwen_raw.simt.world import SimWorld

    with SimWorld(2, library=library) as world:
        ranks = [Recording(SimDevice(world=world, rank=rank)) for rank in range(2)]
        yield Machine(ranks, lambda name: library.kernel("probes", name), world.together, world.run)


@pytest.fixture(scope="session")
def _second_rank(_open_gpu: Any) -> Iterator[Any]:
    """A second device object, thus a second stream, on the GPU of `cuda_device`: they share the context."""
    from qwen_raw.driver.device import CudaDevice

    with CudaDevice(_open_gpu.ordinal) as device:
        yield device


@pytest.fixture
def gpu(cuda_device: Any, _second_rank: Any, staged: Path) -> Machine:
    """Two ranks on one GPU."""
    ranks = [Recording(cuda_device), Recording(_second_rank)]

    def finish() -> None:
        for rank in ranks:
            rank.synchronize()

    return Machine(ranks, lambda name: cuda_device.kernel("probes", name, staged), nullcontext, finish)


@pytest.fixture
def new_rng() -> Callable[[], np.random.Generator]:
    """Generators of the same fresh numbers: one for each machine. The seed is shown when a test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"rng seed {seed}")
    return lambda: np.random.default_rng(seed)
