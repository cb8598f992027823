"""Device memory as typed buffers over plain cuMemAlloc, and a mapped host ring. Never managed memory."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from qwen_raw.device import U64
from qwen_raw.driver.check import DriverError, call
from qwen_raw.driver.context import Context
from qwen_raw.driver.stream import Stream
from qwen_raw.errors import QwenRawError

# The driver takes a private copy of a pageable upload up to this size and returns; for more bytes, the host waits.
ASYNC_UPLOAD_BYTES = 64 << 10


class Pool:
    """What one device has allocated: frees each piece exactly once, when its last user is gone or on close()."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._live: weakref.WeakSet[Allocation] = weakref.WeakSet()
        # Pieces whose last user went away during a capture, which forbids to free them there and then.
        self._late: list[tuple[int, bool]] = []

    def device_memory(self, nbytes: int) -> Allocation:
        """At least `nbytes` on the GPU, aligned to 256 bytes.

        Raises QwenRawError during a capture, and with the sizes when memory is short.
        """
        self.context.not_capturing("allocating memory")
        self.context.use()
        driver = self.context.driver
        try:
            ptr = int(call(driver.cuMemAlloc, max(nbytes, 16)))
        except DriverError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            free, total = call(driver.cuMemGetInfo)
            raise QwenRawError(
                f"GPU {self.context.ordinal} is out of memory: {nbytes / 2**30:.2f} GiB wanted, "
                f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB free; "
                "use a smaller model, --dtype fp8, or a shorter --max-model-len"
            ) from error
        return self._adopt(Allocation(ptr, portable=False))

    def host_memory(self, nbytes: int) -> Allocation:
        """Pinned host memory that every GPU can address."""
        self.context.not_capturing("allocating pinned memory")
        self.context.use()
        driver = self.context.driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        return self._adopt(Allocation(int(call(driver.cuMemHostAlloc, nbytes, flags)), portable=True))

    def _adopt(self, allocation: Allocation) -> Allocation:
        allocation.release = weakref.finalize(allocation, self._free, allocation.ptr, allocation.portable)
        allocation.release.atexit = False  # at exit the driver takes everything back by itself
        self._live.add(allocation)
        return allocation

    def _free(self, ptr: int, host: bool) -> None:
        if self.context.captured is not None:
            self._late.append((ptr, host))
            return
        try:
            self._free_now(ptr, host)
        except DriverError as error:
            if not error.lost:  # lost: the memory went with the context, and whoever waits next is told why
                raise

    def _free_now(self, ptr: int, host: bool) -> None:
        driver = self.context.driver
        self.context.use()
        self.context.host_syncs += 1  # a free waits for the work that is queued
        # A collection may run this while the thread captures another device's stream, where a free is forbidden.
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = call(driver.cuThreadExchangeStreamCaptureMode, relaxed)
        try:
            if host:
                call(driver.cuMemFreeHost, ptr)
            else:
                call(driver.cuMemFree, driver.CUdeviceptr(ptr))
        finally:
            call(driver.cuThreadExchangeStreamCaptureMode, mode)

    def free_late(self) -> None:
        """Frees what could not be freed during the capture that has just ended."""
        late, self._late = self._late, []
        for ptr, host in late:
            self._free(ptr, host)

    def abandon(self) -> None:
        """Forgets everything: its context has been lost, and the memory with it."""
        for allocation in list(self._live):
            allocation.release.detach()
        self._late.clear()

    def close(self) -> None:
        """Frees everything that is still allocated; buffers that outlive this are refused by name when used."""
        for allocation in list(self._live):
            allocation.free()
        self.free_late()


class Allocation:
    """One piece of memory; buffers and views share it."""

    def __init__(self, ptr: int, *, portable: bool) -> None:
        self.ptr = ptr
        self.portable = portable  # pinned host memory, which every GPU reaches
        self.release: weakref.finalize[Any, Any]

    def free(self) -> None:
        """Frees it; a second call does nothing."""
        self.release()

    @property
    def freed(self) -> bool:
        """Whether it has been freed."""
        return not self.release.alive


class CudaBuffer:
    """`qwen_raw.device.Buffer` on a GPU: copies are ordered on the device's main stream."""

    __slots__ = ("context", "dtype", "nbytes", "owner", "ptr", "shape", "stream")

    def __init__(
        self,
        context: Context,
        stream: Stream,
        owner: Allocation,
        ptr: int,
        shape: Sequence[int],
        dtype: np.dtype[Any],
    ) -> None:
        self.context = context
        self.stream = stream
        self.owner = owner
        self.ptr = ptr
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"CudaBuffer({self.dtype}{list(self.shape)} at {self.ptr:#x} on GPU {self.context.ordinal})"

    def view(self, shape: Sequence[int], offset: int = 0, dtype: np.dtype[Any] | None = None) -> CudaBuffer:
        """The same memory from `offset` elements of this buffer's dtype on, as `shape` of `dtype` (default: the same).

        Raises QwenRawError if that reaches outside this buffer or is not aligned to the new dtype.
        """
        start = check_view(self.nbytes, self.dtype, shape, offset, dtype or self.dtype, self.ptr)
        return CudaBuffer(self.context, self.stream, self.owner, self.ptr + start, shape, dtype or self.dtype)

    def upload(self, array: np.ndarray[Any, Any]) -> None:
        """Copies `array` (same shape and dtype) in, in stream order; it may be changed as soon as this returns.

        More than 64 KiB makes the host wait for the copy, and is counted.
        """
        if array.shape != self.shape or array.dtype != self.dtype:
            raise QwenRawError(
                f"upload of {array.dtype}{list(array.shape)} into a buffer of {self.dtype}{list(self.shape)}"
            )
        self.require_alive()
        if self.nbytes > ASYNC_UPLOAD_BYTES:
            self.context.host_waits("uploading")
        else:
            self.context.not_capturing("uploading")
            self.context.use()
        if self.nbytes:
            source = np.ascontiguousarray(array)
            driver = self.context.driver
            target = driver.CUdeviceptr(self.ptr)
            call(driver.cuMemcpyHtoDAsync, target, source.ctypes.data, self.nbytes, self.stream.handle)

    def download(self) -> np.ndarray[Any, Any]:
        """A host copy after everything queued so far on the device's stream; one counted wait."""
        self.require_alive()
        self.context.not_capturing("downloading")
        host = np.empty(self.shape, self.dtype)
        self.context.use()
        if self.nbytes:
            driver = self.context.driver
            source = driver.CUdeviceptr(self.ptr)
            call(driver.cuMemcpyDtoHAsync, host.ctypes.data, source, self.nbytes, self.stream.handle)
        self.stream.synchronize()
        return host

    def fill(self, byte: int) -> None:
        """Sets every byte, in stream order; may be captured."""
        if not 0 <= byte <= 255:
            raise QwenRawError(f"fill with {byte}: a byte is 0…255")
        self.require_alive()
        self.context.use()
        self.context.keep(self.owner)
        if self.nbytes:
            driver = self.context.driver
            call(driver.cuMemsetD8Async, driver.CUdeviceptr(self.ptr), byte, self.nbytes, self.stream.handle)

    def require_alive(self) -> None:
        """Raises if the memory behind this buffer has been freed."""
        if self.owner.freed:
            raise QwenRawError(f"{self!r} was used after its memory was freed (the device was closed)")


class CudaHostRing:
    """`qwen_raw.device.HostRing`: pinned words that a kernel writes and the host polls.

    Take `words` from the ring each time: after close() it is a plain copy, and an alias kept from before would dangle.
    """

    def __init__(self, pool: Pool, stream: Stream, slots: int) -> None:
        if slots < 1:
            raise QwenRawError(f"a host ring of {slots} slots: it needs at least one")
        context = pool.context
        owner = pool.host_memory(slots * 8)
        storage: Any = (ctypes.c_uint64 * slots).from_address(owner.ptr)
        storage.owner = owner  # NumPy holds the ctypes array, and that the memory
        self.words: np.ndarray[Any, np.dtype[np.uint64]] = np.frombuffer(storage, np.uint64)
        self.words[:] = 0
        ptr = int(call(context.driver.cuMemHostGetDevicePointer, owner.ptr, 0))
        self.buffer = CudaBuffer(context, stream, owner, ptr, (slots,), U64)
        self._owner = owner

    def close(self) -> None:
        """Unpins the memory; `words` keeps the last values."""
        if not self._owner.freed:
            self.words = self.words.copy()
            self._owner.free()


def check_view(
    nbytes: int, dtype: np.dtype[Any], shape: Sequence[int], offset: int, new: np.dtype[Any], ptr: int = 0
) -> int:
    """The byte at which a view starts.

    `nbytes`, `dtype`, `ptr`: the buffer's; `offset`: in elements of `dtype`; `shape`, `new`: the view's.
    Raises QwenRawError if the view leaves the buffer or is misaligned.
    """
    start = offset * dtype.itemsize
    size = math.prod(shape) * new.itemsize
    if offset < 0 or any(n < 0 for n in shape) or start + size > nbytes:
        place = f"bytes {start}…{start + size} of a buffer of {nbytes}"
        raise QwenRawError(f"a view of {new}{list(shape)} at element {offset} would take {place}")
    if (ptr + start) % new.alignment:
        raise QwenRawError(f"a view of {new} at byte {start} is not aligned to {new.alignment} bytes")
    return start
