"""Fixtures of every test: the GPU, where there is one, and a reason to skip where there is none."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from qwen_raw.driver.device import CudaDevice

# Before NumPy is imported. Where each of several processes has a BLAS thread for every core, most of their time goes by
# in waiting for each other: what computes in NumPy took four times as long.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(_share, 1)))


@functools.cache
def _gpus() -> tuple[int, str]:
    """(number of usable GPUs, why there are none)."""
    from qwen_raw.driver.probe import probe

    machine = probe()
    return len(machine.gpus), machine.problem or "no GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _gpus()[0]:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=_gpus()[1]))


@pytest.fixture(scope="session")
def _open_gpu() -> Iterator[CudaDevice]:
    count, problem = _gpus()
    if not count:
        pytest.skip(problem)
    from qwen_raw.driver.device import CudaDevice

    with CudaDevice(0) as device:
        yield device


@pytest.fixture
def cuda_device(_open_gpu: CudaDevice) -> Iterator[CudaDevice]:
    """GPU 0, idle before and after the test; opened once, because tests must not depend on a fresh one."""
    yield _open_gpu
    _open_gpu.synchronize()


@pytest.fixture
def second_cuda_device() -> Iterator[CudaDevice]:
    """GPU 1, opened for this test."""
    if _gpus()[0] < 2:
        pytest.skip("needs two GPUs")
    from qwen_raw.driver.device import CudaDevice

    with CudaDevice(1) as device:
        yield device
