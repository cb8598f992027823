"""What the engine asks of a device: two things implement it, the CUDA driver and the CPU's SIMT simulator.

Launchers and model code are written against these protocols only, so every kernel and the whole decode
step run unchanged on a GPU (`qwen_raw.driver`) and on a laptop (`qwen_raw.simt`).

Storage types are NumPy's: float32, int32, uint32, uint64; uint16 holds bf16 or f16 bits, uint8 holds e4m3 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from qwen_raw.errors import require

BF16 = np.dtype(np.uint16)  # bfloat16 bits
F16 = np.dtype(np.uint16)  # float16 bits: activations that are bounded, inside prefill
E4M3 = np.dtype(np.uint8)  # float8 e4m3fn bits
U8 = np.dtype(np.uint8)
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


@dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """How Hopper's copy engine sees memory, for a kernel's `BY_VALUE TensorMap` parameter. Keeps its buffers alive."""

    words: np.ndarray[Any, np.dtype[np.uint64]]  # 128 bytes that only the device understands
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class BoxShape:
    """What a tensor map describes: a tensor of 2 to 5 dimensions, the innermost first, and the box of one copy.

    `strides`: bytes from one index of dimension 1, 2, … to the next, multiples of 16. What a box has outside the tensor
    arrives as zeros. A box row (dimension 0) is 128 bytes, and swizzled in 128-byte rows (include/wgmma.cuh).
    """

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def check(self, base: int, item: int) -> None:
        """Raises QwenRawError for what the hardware does not take."""
        rank = len(self.dims)
        whole = 2 <= rank <= 5 and len(self.strides) == rank - 1 and len(self.box) == rank
        require(whole, f"a tensor map of {rank} dimensions, {len(self.strides)} strides and a box of {len(self.box)}")
        require(base % 16 == 0, f"a tensor map from {base:#x}: the address is a multiple of 16")
        require(all(0 < n <= 1 << 32 for n in self.dims), f"a tensor map of {self.dims}")
        legal = all(s % 16 == 0 and 0 < s < 1 << 40 for s in self.strides)
        require(legal, f"a tensor map with strides of {self.strides} bytes: each is a multiple of 16")
        require(all(0 < n <= 256 for n in self.box), f"a box of {self.box}: a dimension has 1 to 256")
        require(self.box[0] * item == 128, f"a box row of {self.box[0] * item} bytes: rows have 128")


# By value: numpy scalars (their dtype is the parameter's type) or a structured/1-d array for a struct.
Arg = Buffer | np.generic | np.ndarray[Any, Any] | TensorMap
Dim = tuple[int, int, int]


# Queues the launches of a part of a graph that loops; given what their kernels set (`BY_VALUE LoopHandle`).
LoopPart = Callable[[np.ndarray[Any, np.dtype[np.uint64]]], None]


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

    def tensor_map(self, buffers: Sequence[Buffer], shape: BoxShape) -> TensorMap:
        """A map of `shape` from the first buffer's address on, in its dtype; `buffers`: all that the map reaches into.

        The words depend on address, dtype and shape alone, so they may be kept as long as anything refers to them.
        """

    def resident_clusters(self, kernel: Kernel, threads: int, smem: int, blocks: int) -> int:
        """Clusters of `blocks` such blocks that the whole device holds at once; 0 where it has no clusters."""

    def launch(
        self,
        kernel: Kernel,
        grid: Dim,
        block: Dim,
        args: Sequence[Arg],
        *,
        smem: int = 0,
        pdl: bool = False,
        cluster: Dim | None = None,
    ) -> None:
        """Queue one launch.

        `pdl`: programmatic dependent launch; the kernel must griddep_wait() itself. `cluster`: blocks a cluster, which
        the grid is a multiple of.
        """

    def queue_library(self, queue: Callable[[int], None], buffers: Sequence[Buffer], *, loading: bool = False) -> None:
        """Let a library queue work: `queue` gets the main stream's handle. `buffers`: all that the work reaches.

        While rehearsing only what is `loading` runs: the library's code is loaded by it, and the work is wasted.
        """

    def owns(self, buffer: Buffer) -> bool:
        """Whether `buffer` is of this device's memory, ordered by its main stream."""

    def enable_peer(self, other: Device) -> None:
        """Let kernels of this device read and write the memory of `other`; a second call does nothing.

        Raises QwenRawError if the two have no peer path.
        """

    def capture(self) -> AbstractContextManager[Capture]: ...

    def require_loops(self) -> None:
        """Raises UnavailableError, with the reason, where graphs cannot loop."""

    def capture_loop(self, begin: LoopPart, body: LoopPart) -> Graph:
        """A graph of what `begin` queues, then of what `body` queues, again and again while they set the handle so.

        Between two rounds the host has no part. As a replay begins, the handle is not set: `begin` sets it for the
        first round, and every round for the next. Raises as require_loops does.
        """

    @property
    def capturing(self) -> object | None:
        """What names the capture under way, and keeps nothing of it alive; None where nothing is captured."""

    def when_queued(self, call: Callable[[], None]) -> None:
        """Call now or, during a capture, before each launch of the graph; if it raises, nothing of that is queued."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Launches of the block are checked and their kernels loaded, but none is queued.

        What a capture will need can so be loaded before it, without doing the work.
        """

    def queueing(self) -> AbstractContextManager[None]:
        """For work of several ranks: what the block queues may start at its end, on every rank. The host may not wait.

        The simulator, which runs what it can at each launch, would otherwise look at waiting ranks again and again.
        """

    def synchronize(self) -> None: ...

    def idle(self) -> bool:
        """Whether everything queued has finished; never waits; raises QwenRawError if a launch failed."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""

    def close(self) -> None: ...
