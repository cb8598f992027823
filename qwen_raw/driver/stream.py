"""Streams, events and the two stream memory operations that hand a word from one stream to another."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from typing import Any

from qwen_raw.driver.check import call, failure
from qwen_raw.driver.context import Context
from qwen_raw.errors import QwenRawError


class Wait(IntFlag):
    """When a wait on a 32-bit word at `addr` lets the stream go on (CUstreamWaitValue_flags)."""

    GEQ = 0  # int32(word - value) >= 0
    EQ = 1
    AND = 2  # word & value != 0
    NOR = 3  # ~(word | value) != 0
    FLUSH = 1 << 30  # also order earlier remote writes; only where the device says that it can


class Event:
    """A point in a stream. `timing` events cost a little more and can be subtracted."""

    def __init__(self, context: Context, *, timing: bool = True) -> None:
        self._context = context
        self._driver = context.driver
        self._timing = timing
        flags = self._driver.CUevent_flags
        context.use()
        self.handle = call(
            self._driver.cuEventCreate, int(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING)
        )
        self._open = True

    def record(self, stream: Stream) -> None:
        """Marks the work queued on `stream` so far."""
        self._context.use()
        call(self._driver.cuEventRecord, self.handle, stream.handle)

    def done(self) -> bool:
        """Whether the device has passed this event; never waits."""
        self._context.use()
        return _finished(self._driver.cuEventQuery, self.handle)

    def synchronize(self) -> None:
        """Waits on the host until the device has passed this event; counted."""
        self._context.host_waits("Event.synchronize")
        call(self._driver.cuEventSynchronize, self.handle)

    def elapsed_ms(self, earlier: Event) -> float:
        """Milliseconds between `earlier` and this event; waits for this one first (counted)."""
        if not (self._timing and earlier._timing):
            raise QwenRawError("elapsed_ms needs two events made with timing=True")
        self.synchronize()
        return float(call(self._driver.cuEventElapsedTime, earlier.handle, self.handle))

    def close(self) -> None:
        """Destroys the event; a second call does nothing."""
        if self._open:
            self._open = False
            self._context.use()
            call(self._driver.cuEventDestroy, self.handle)


class Stream:
    """One non-blocking stream of a device: not ordered with the legacy default stream."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._driver = context.driver
        self.memops = MemopSupport.probe(context)
        context.use()
        self.handle = call(self._driver.cuStreamCreate, int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._open = True

    def synchronize(self) -> None:
        """Waits on the host for everything queued so far; counted."""
        self._context.host_waits("Stream.synchronize")
        call(self._driver.cuStreamSynchronize, self.handle)

    def idle(self) -> bool:
        """Whether everything queued has finished; never waits.

        Raises DriverError if some of it failed.
        """
        self._context.not_capturing("asking whether the stream is idle")
        self._context.use()
        return _finished(self._driver.cuStreamQuery, self.handle)

    def wait_event(self, event: Event) -> None:
        """Later work on this stream starts after `event`, also one of another device; the host does not wait."""
        self._context.use()
        call(self._driver.cuStreamWaitEvent, self.handle, event.handle, 0)

    def wait_value32(self, addr: int, value: int, condition: Wait) -> None:
        """Holds the stream until the word at `addr` satisfies `condition`.

        A word that never comes holds the stream for ever, so the writer must already be certain to run.
        """
        self.memops.require(addr, value, condition)
        self._context.use()
        word = self._driver.cuuint32_t(value)
        call(self._driver.cuStreamWaitValue32, self.handle, self._driver.CUdeviceptr(addr), word, int(condition))

    def write_value32(self, addr: int, value: int) -> None:
        """Writes the word after all earlier work of this stream is visible system-wide.

        Since CUDA 13.1 an address on another GPU may be refused (DriverError): probe before relying on it.
        """
        self.memops.require(addr, value, Wait.GEQ)
        self._context.use()
        word = self._driver.cuuint32_t(value)
        call(self._driver.cuStreamWriteValue32, self.handle, self._driver.CUdeviceptr(addr), word, 0)

    def close(self) -> None:
        """Destroys the stream; a second call does nothing."""
        if self._open:
            self._open = False
            self._context.use()
            call(self._driver.cuStreamDestroy, self.handle)


class MemopSupport:
    """What the device says of stream memory operations; asked once, checked before each."""

    def __init__(self, *, nor: bool, flush: bool) -> None:
        self.nor = nor
        self.flush = flush

    @staticmethod
    def probe(context: Context) -> MemopSupport:
        """Reads the two attributes from the driver."""
        return MemopSupport(
            nor=bool(context.attribute("CAN_USE_STREAM_WAIT_VALUE_NOR")),
            flush=bool(context.attribute("CAN_FLUSH_REMOTE_WRITES")),
        )

    def require(self, addr: int, value: int, condition: Wait) -> None:
        """Refuses what the driver would refuse, by name."""
        if addr % 4:
            raise QwenRawError(f"stream memory operation on address {addr:#x}: it must be a multiple of 4")
        if not 0 <= value < 1 << 32:
            raise QwenRawError(f"stream memory operation with value {value}: it must fit 32 unsigned bits")
        if condition & Wait.FLUSH and not self.flush:
            raise QwenRawError("this GPU cannot flush remote writes in a stream wait: drop Wait.FLUSH")
        if condition & ~Wait.FLUSH == Wait.NOR and not self.nor:
            raise QwenRawError("this GPU has no NOR stream wait: use EQ, GEQ or AND")


def _finished(query: Callable[[Any], Any], handle: Any) -> bool:
    """The answer of cuEventQuery or cuStreamQuery, whose "not ready" is no failure."""
    (status,) = query(handle)
    if status.name == "CUDA_ERROR_NOT_READY":
        return False
    if int(status) != 0:
        raise failure(query, (handle,), status)
    return True
