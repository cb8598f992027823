"""Typed buffers in simulated device memory; each allocation is bounded by guard pages and canaries."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_raw.device import U64
from qwen_raw.errors import QwenRawError

if TYPE_CHECKING:
    from qwen_raw.simt.device import SimDevice
    from qwen_raw.simt.world import SimWorld


class Allocation:
    """One piece of a rank's memory, filled with 0xff; freed when its last buffer is gone."""

    def __init__(self, world: SimWorld, rank: int, nbytes: int) -> None:
        ptr = world.allocate(rank, nbytes)
        if not ptr:
            used = world.runtime.memory_used(world.handle, rank)
            raise QwenRawError(
                f"the simulated device is out of memory: {nbytes / 2**20:.1f} MiB wanted, "
                f"{used / 2**20:.1f} of {world.memory / 2**20:.1f} MiB in use"
            )
        self.ptr = ptr
        weakref.finalize(self, world.release, ptr).atexit = False


class SimBuffer:
    """`qwen_raw.device.Buffer` in simulated memory."""

    def __init__(
        self, device: SimDevice, owner: Allocation, ptr: int, shape: Sequence[int], dtype: np.dtype[Any]
    ) -> None:
        self.device = device
        self.owner = owner
        self.ptr = ptr
        self.dtype = np.dtype(dtype)
        self.shape = tuple(int(n) for n in shape)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"SimBuffer({self.dtype}{list(self.shape)} at {self.ptr:#x} on rank {self.device.rank})"

    def view(self, shape: Sequence[int], offset: int = 0, dtype: np.dtype[Any] | None = None) -> SimBuffer:
        """The same memory from `offset` elements of this buffer's dtype on.

        Raises QwenRawError if that reaches outside this buffer or is not aligned to the new dtype.
        """
        new = self.dtype if dtype is None else np.dtype(dtype)
        start, nbytes = offset * self.dtype.itemsize, math.prod(shape) * new.itemsize
        if offset < 0 or min(*shape, 0) < 0 or start + nbytes > self.nbytes:
            raise QwenRawError(
                f"a view of {new}{list(shape)} at byte {start} does not fit {self!r}, {self.nbytes} bytes"
            )
        if (self.ptr + start) % new.itemsize:
            raise QwenRawError(f"a view of {new} at byte {start} of {self!r} is not aligned")
        return SimBuffer(self.device, self.owner, self.ptr + start, shape, new)

    def upload(self, array: np.ndarray[Any, Any]) -> None:
        """Copies `array` (same shape and dtype) in, in stream order; it may be changed as soon as this returns."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise QwenRawError(
                f"upload of {array.dtype}{list(array.shape)} into a buffer of {self.dtype}{list(self.shape)}"
            )
        self.device.not_capturing("uploading")
        if self.nbytes:
            world = self.device.world
            world.runtime.copy(world.handle, self.device.rank, self.ptr, np.ascontiguousarray(array))
            world.advance()

    def download(self) -> np.ndarray[Any, Any]:
        """A host copy after everything queued so far on the device's stream; one counted wait."""
        self.device.synchronize()
        return self._memory().copy()

    def fill(self, byte: int) -> None:
        """Sets every byte, in stream order; may be captured."""
        if not 0 <= byte <= 255:
            raise QwenRawError(f"fill with {byte}: a byte is 0…255")
        self.device.queue_fill(self, byte)

    def _memory(self) -> np.ndarray[Any, Any]:
        """The memory itself as an array; valid as long as the buffer is."""
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        raw = (ctypes.c_ubyte * self.nbytes).from_address(self.ptr)
        return np.frombuffer(memoryview(raw), self.dtype).reshape(self.shape)


class SimHostRing:
    """`qwen_raw.device.HostRing`: words that a kernel writes and the host reads without synchronising."""

    def __init__(self, buffer: SimBuffer) -> None:
        self.buffer = buffer
        self.words: np.ndarray[Any, np.dtype[np.uint64]] = buffer._memory().view(U64)
