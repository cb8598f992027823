"""What the engine asks of a device: two things implement it, the CUDA driver and the CPU's SIMT simulator.

Launchers and model code are written against these protocols only, so every kernel and the whole decode
step run unchanged on a GPU (`qwen_raw.driver`) and on a laptop (`qwen_raw.simt`).

Storage types are NumPy's: float32, int32, uint32, uint64; uint16 holds bf16 or f16 bits, uint8 holds e4m3 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np

BF16 = np.dtype(np.uint16)  # bfloat16 bits
F16 = np.dtype(np.uint16)  # float16 bits: activations that are bounded, inside prefill
E4M3 = np.dtype(np.uint8)  # float8 e4m3fn bits
F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
U32 = np.dtype(np.uint32)
U64 = np.dtype(np.uint64)


class Buffer(Protocol):
    """A typed, contiguous piece of device memory. Views keep their owner alive."""

    ptr: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int

    def view(self, shape: Sequence[int], offset: int = 0, dtype: np.dtype[Any] | None = None) -> Buffer:
        """The same memory from `offset` elements on, under another shape (and dtype); bounds are checked."""

    def upload(self, array: np.ndarray[Any, Any]) -> None:
        """Copy a host array of the same shape and dtype in, ordered on the device's stream."""

    def download(self) -> np.ndarray[Any, Any]:
        """A host copy, after everything queued so far; counts as a host synchronisation."""

    def fill(self, byte: int) -> None:
        """Set every byte, ordered on the device's stream."""


# By value: numpy scalars (their dtype is the parameter's type) or a structured/1-d array for a struct.
Arg = Buffer | np.generic | np.ndarray[Any, Any]
Dim = tuple[int, int, int]


class Kernel(Protocol):
    """One loaded entry point."""

    @property
    def name(self) -> str: ...


class Graph(Protocol):
    """A captured sequence of launches, replayed without parameters."""

    def launch(self) -> None: ...

    def close(self) -> None: ...


class Capture(Protocol):
    """What `Device.capture()` yields; `graph` is set when the with-block ends."""

    @property
    def graph(self) -> Graph: ...


class HostRing(Protocol):
    """uint64 words in host memory that a kernel can write and the host can read without synchronising."""

    @property
    def words(self) -> np.ndarray[Any, np.dtype[np.uint64]]: ...

    @property
    def buffer(self) -> Buffer: ...


class Device(Protocol):
    """One GPU (or one simulated one) with one main stream. Several may share a GPU, each with its own stream."""

    kind: Literal["cuda", "sim"]
    name: str
    ordinal: int  # which GPU: equal on devices that share one
    arch: str  # "sm_90a", or "sim"
    driver: str  # for people: "CUDA driver 13.0", "SIMT simulator, g++ 12.2"
    sm_count: int
    smem_per_block: int  # opt-in limit, bytes

    @property
    def host_syncs(self) -> int:
        """Times the host has waited for this device."""

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Buffer: ...

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Buffer: ...

    def array(self, host: np.ndarray[Any, Any]) -> Buffer:
        """A new buffer holding a copy of `host`."""

    def host_ring(self, slots: int) -> HostRing: ...

    def kernel(self, stem: str, name: str) -> Kernel:
        """The entry point `name` of cuda_src/`stem`.cu, compiled (or taken from the cache) and loaded."""

    def resident_blocks(self, kernel: Kernel, threads: int, smem: int) -> int:
        """Blocks of `threads` threads and `smem` dynamic bytes that one multiprocessor holds at once; 0: none fits."""

    def launch(
        self, kernel: Kernel, grid: Dim, block: Dim, args: Sequence[Arg], *, smem: int = 0, pdl: bool = False
    ) -> None:
        """Queue one launch. `pdl`: programmatic dependent launch; the kernel must griddep_wait() itself."""

    def owns(self, buffer: Buffer) -> bool:
        """Whether `buffer` is of this device's memory, ordered by its main stream."""

    def enable_peer(self, other: Device) -> None:
        """Let kernels of this device read and write the memory of `other`; a second call does nothing.

        Raises QwenRawError if the two have no peer path.
        """

    def capture(self) -> AbstractContextManager[Capture]: ...

    def synchronize(self) -> None: ...

    def idle(self) -> bool:
        """Whether everything queued has finished; never waits; raises QwenRawError if a launch failed."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""

    def close(self) -> None: ...
