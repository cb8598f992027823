"""Buffers between guard bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qwen_raw.device import Arg, Buffer, Dim

GUARD, POISON = 256, 0xA5  # bytes before and after every buffer, and what they are


class Guarded:
    """A device whose buffers lie between guard bands."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._wholes: list[tuple[Any, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def enable_peer(self, other: Any) -> None:
        """As the device's."""
        self._device.enable_peer(getattr(other, "_device", other))

    def launch(self, kernel: Any, grid: Dim, block: Dim, args: Sequence[Arg], **options: Any) -> None:
        """As the device's."""
        self._device.launch(kernel, grid, block, args, **options)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Buffer:
        """A view of a larger buffer."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        room = -(-nbytes // 16) * 16
        whole = self._device.empty((room + 2 * GUARD,), np.dtype(np.uint8))
        whole.fill(POISON)
        self._wholes.append((whole, nbytes))
        return whole.view(shape, GUARD, dtype)  # type: ignore[no-any-return]

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Buffer:
        """As the device's."""
        buffer = self.empty(shape, dtype)
        buffer.fill(0)
        return buffer

    def array(self, host: np.ndarray[Any, Any]) -> Buffer:
        """As the device's."""
        buffer = self.empty(host.shape, host.dtype)
        buffer.upload(np.ascontiguousarray(host))
        return buffer

    def check(self) -> None:
        """No guard band was written."""
        for whole, nbytes in self._wholes:
            found = whole.download()
            assert (found[:GUARD] == POISON).all() and (found[GUARD + nbytes :] == POISON).all(), f"{nbytes} bytes"
