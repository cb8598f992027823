"""The machines that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conformance.machines import HERE, MOST_RANKS, Machine, Recording, mma_error, probe_stem, stage_probes
from conformance.some_ranks import run as run_some_ranks

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
    """A source root for the GPU's compiler with the probes in it."""
    return stage_probes(tmp_path_factory.mktemp("probes"))


def simulated(library: Library, seed: int | None) -> Iterator[Machine]:
    """Ranks in the simulator."""
    from qwen_raw.simt.device import SimDevice
    from qwen_raw.simt.world import SimWorld

    with SimWorld(MOST_RANKS, seed=seed, library=library) as world:
        ranks = [Recording(SimDevice(world=world, rank=rank)) for rank in range(MOST_RANKS)]
        yield Machine(ranks, lambda name: library.kernel(probe_stem(name), name), world.together, world.run)


@pytest.fixture
def in_order(library: Library) -> Iterator[Machine]:
    """The simulator, blocks and threads one after another."""
    yield from simulated(library, None)


@pytest.fixture
def shuffled(library: Library) -> Iterator[Machine]:
    """The simulator under a random schedule, dependent launches early: the one that a GPU is compared with."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"schedule seed {seed}")
    yield from simulated(library, seed)


@pytest.fixture
def gpu(cuda_device: Any, staged: Path) -> Machine:
    """GPU 0, one rank."""
    return Machine(
        [Recording(cuda_device)],
        lambda name: cuda_device.kernel(probe_stem(name), name, staged),
        nullcontext,
        cuda_device.synchronize,
        mma_error(cuda_device.arch),
    )


@pytest.fixture(scope="session")
def some_ranks(_open_gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, dict[str, Any]]]:
    """(the generators' seed, results by case and name) of the cases with several ranks, on GPU 0."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, run_some_ranks(seed, tmp_path_factory.mktemp("some_ranks"))


@pytest.fixture
def new_rng() -> Callable[[], np.random.Generator]:
    """Generators of the same fresh numbers: one for each machine. The seed is shown when a test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"rng seed {seed}")
    return lambda: np.random.default_rng(seed)
