"""Fixtures of every test: one GPU for the session where there is one, and a reason to skip where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from qwen_raw.errors import QwenRawError


def _open_gpu() -> tuple[Any, str]:
    """(device, "") or (None, why not)."""
    try:
        from qwen_raw.driver.device import CudaDevice

        return CudaDevice(0), ""
    except (ImportError, QwenRawError) as error:
        return None, str(error)


@pytest.fixture(scope="session")
def _gpu() -> Iterator[tuple[Any, str]]:
    device, why = _open_gpu()
    yield device, why
    if device is not None:
        device.close()


@pytest.fixture
def cuda_device(_gpu: tuple[Any, str]) -> Any:
    """The first GPU; the test is skipped where there is none."""
    device, why = _gpu
    if device is None:
        pytest.skip(f"needs an NVIDIA GPU: {why}")
    return device
