"""One GPU's primary context (the one CuPy uses too), the count of host waits, and what a capture forbids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qwen_raw.driver.check import call, initialised
from qwen_raw.errors import QwenRawError, UsageError


@dataclass(eq=False, slots=True)
class Captured:
    """What belongs to a graph besides its nodes."""

    name: object = field(default_factory=object)  # what tells captures apart, and keeps nothing of them
    keep: list[object] = field(default_factory=list)  # what its launches use, alive as long as the graph
    when_queued: list[Callable[[], None]] = field(default_factory=list)  # called before each replay is queued


class Context:
    """Everything below `Device` shares this: whose turn it is, and what the host may do right now."""

    def __init__(self, ordinal: int) -> None:
        """Retains the primary context of GPU `ordinal`.

        Raises UsageError where there is no such GPU.
        """
        self.driver = initialised()
        count = call(self.driver.cuDeviceGetCount)
        if not 0 <= ordinal < count:
            have = f"this machine has GPUs 0…{count - 1}" if count > 1 else f"this machine has {count} GPU(s)"
            raise UsageError(f"there is no GPU {ordinal}: {have}")
        self.ordinal = ordinal
        self.device = call(self.driver.cuDeviceGet, ordinal)
        self.handle = call(self.driver.cuDevicePrimaryCtxRetain, self.device)
        self.host_syncs = 0
        self.closed = False
        self.captured: Captured | None = None  # while a graph is being captured

    def use(self) -> None:
        """Makes this context current on the calling thread: every call into the driver starts with it."""
        if self.closed:
            raise QwenRawError(f"GPU {self.ordinal} was closed: open the device again")
        call(self.driver.cuCtxSetCurrent, self.handle)

    def attribute(self, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_`name` of this GPU."""
        key = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(self.driver.cuDeviceGetAttribute, key, self.device))

    def not_capturing(self, what: str) -> None:
        """Raises if a graph is being captured: the driver would answer `what` by invalidating the whole capture."""
        if self.captured is not None:
            raise QwenRawError(f"{what} while a graph is being captured on GPU {self.ordinal}: do it before capture()")

    def host_waits(self, what: str) -> None:
        """Called before every call that makes the host wait for this GPU; makes the context current."""
        self.not_capturing(what)
        self.host_syncs += 1
        self.use()

    def keep(self, *objects: object) -> None:
        """During a capture, ties the life of `objects` to the graph's."""
        if self.captured is not None:
            self.captured.keep.extend(objects)

    def close(self) -> None:
        """Gives the primary context back; a second call does nothing."""
        if not self.closed:
            self.closed = True
            call(self.driver.cuDevicePrimaryCtxRelease, self.device)
