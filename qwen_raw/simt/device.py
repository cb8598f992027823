"""`qwen_raw.device.Device` on the CPU: the kernels of cuda_src/, compiled by the host's compiler, thread by thread."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import numpy as np

from qwen_raw.device import U32, U64, Arg, BoxShape, Buffer, Device, Dim, Kernel, LoopPart, TensorMap
from qwen_raw.errors import QwenRawError
from qwen_raw.simt.buffer import Allocation, SimBuffer, SimHostRing
from qwen_raw.simt.kernel import (
    Bound,
    SimKernel,
    SimParam,
    check_cluster,
    check_geometry,
    check_pointer,
    check_value,
    prepare,
    resident_blocks,
)
from qwen_raw.simt.world import SimWorld

SMEM_PER_BLOCK = 227 << 10  # as on sm_90
TENSOR_MAP_MAGIC, TENSOR_MAP_SWIZZLE = 0x7E4504A9, 128  # cuda_src/sim/async.h


class SimGraph:
    """A captured sequence of launches and fills, queued again by each launch()."""

    def __init__(
        self, device: SimDevice, steps: list[Callable[[], None]], when_queued: list[Callable[[], None]]
    ) -> None:
        self._device = device
        self._steps = steps
        self._when_queued = when_queued
        self._open = True

    def launch(self) -> None:
        """Queues one replay; what `Device.when_queued` was given during the capture is called first."""
        if not self._open:
            raise QwenRawError("a graph was launched after close()")
        self._device.not_capturing("launching a graph")
        for step in (*self._when_queued, *self._steps):
            step()

    def close(self) -> None:
        """Lets go of the launches; a second call does nothing."""
        self._open = False
        self._steps, self._when_queued = [], []


class SimLoop:
    """A graph that repeats a part of itself; the host takes the node's part, and waits between rounds."""

    def __init__(self, begin: SimGraph, body: SimGraph, handle: SimBuffer) -> None:
        self._begin, self._body, self._handle = begin, body, handle

    def launch(self) -> None:
        """Runs it to its end."""
        self._begin.launch()
        while self._handle.download()[0]:
            self._handle.fill(0)
            self._body.launch()

    def close(self) -> None:
        """Lets go of the launches; a second call does nothing."""
        self._begin.close()
        self._body.close()


class SimCapture:
    """What capture() yields; `graph` exists once the with-block has ended without an error."""

    def __init__(self) -> None:
        self._graph: SimGraph | None = None

    @property
    def graph(self) -> SimGraph:
        """The captured graph."""
        if self._graph is None:
            raise QwenRawError("the graph exists only after the capture's with-block has ended")
        return self._graph

    @graph.setter
    def graph(self, graph: SimGraph) -> None:
        self._graph = graph


class SimDevice:
    """One rank of a simulated world, or a world of its own.

    A launch runs at once, so errors are raised where the launch is; only launches that wait for another rank are still
    pending when launch() returns. `seed`, `race`, `sanitize`: see SimWorld; they belong to `world` where one is given.
    """

    kind: Literal["cuda", "sim"] = "sim"
    arch = "sim"

    def __init__(
        self,
        *,
        seed: int | None = None,
        race: bool = False,
        sanitize: Literal["address"] | None = None,
        sm_count: int = 4,
        world: SimWorld | None = None,
        rank: int = 0,
    ) -> None:
        """Raises UsageError where there is no C++17 compiler."""
        self._own_world = world is None
        self.world = SimWorld(1, seed=seed, race=race, sanitize=sanitize) if world is None else world
        if not 0 <= rank < self.world.ranks:
            raise QwenRawError(f"rank {rank} of a simulated world of {self.world.ranks}")
        self.rank = self.ordinal = rank
        self.name = f"SIMT simulator, rank {rank} of {self.world.ranks}" if self.world.ranks > 1 else "SIMT simulator"
        self.driver = f"SIMT simulator, {self.world.library.compiler}"
        self.sm_count = sm_count
        self.smem_per_block = SMEM_PER_BLOCK
        self.host_syncs = 0
        self._captured: list[Callable[[], None]] | None = None
        self._rehearsing = False
        self._when_queued: list[Callable[[], None]] = []  # of what is being captured
        self.capturing: object | None = None  # see Device

    @staticmethod
    def of_world(ranks: int) -> list[SimDevice]:
        """All ranks of a new world, which ends when the first of them is closed."""
        world = SimWorld(ranks)
        devices = [SimDevice(world=world, rank=rank) for rank in range(ranks)]
        devices[0]._own_world = True
        return devices

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> SimBuffer:
        """A new buffer of 0xff bytes: NaN in every float format, so that reading it before writing shows."""
        self.not_capturing("allocating memory")
        owner = Allocation(self.world, self.rank, math.prod(shape) * np.dtype(dtype).itemsize)
        return SimBuffer(self, owner, owner.ptr, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> SimBuffer:
        """A new buffer of zero bytes."""
        buffer = self.empty(shape, dtype)
        buffer.fill(0)
        return buffer

    def array(self, host: np.ndarray[Any, Any]) -> SimBuffer:
        """A new buffer with a copy of `host`."""
        buffer = self.empty(host.shape, host.dtype)
        buffer.upload(host)
        return buffer

    def host_ring(self, slots: int) -> SimHostRing:
        """`slots` zeroed uint64 words that kernels and the host share."""
        return SimHostRing(self.zeros((slots,), U64))

    def kernel(self, stem: str, name: str) -> SimKernel:
        """The entry point `name` of cuda_src/`stem`.cu: compiled or taken from the cache.

        Raises QwenRawError for a compile error (with file and line) or a name that the file does not have.
        """
        return self.world.library.kernel(stem, name)

    def resident_blocks(self, kernel: Kernel, threads: int, smem: int) -> int:
        """As many as 2,048 threads and one multiprocessor's shared memory allow; registers are not simulated."""
        if smem > self.smem_per_block:
            return 0
        return max(1, min(2048 // threads, self.smem_per_block // max(smem, 1)))

    def tensor_map(self, buffers: Sequence[Buffer], shape: BoxShape) -> TensorMap:
        """See Device: the words are struct SimTensorMap of cuda_src/sim/async.h."""
        first = buffers[0]
        shape.check(first.ptr, first.dtype.itemsize)

        def padded(values: tuple[int, ...], n: int) -> list[int]:
            return [*values, *[0] * (n - len(values))]

        raw = struct.pack(
            "=Q4Q5I5I4I",
            first.ptr,
            *padded(shape.strides, 4),
            *padded(shape.dims, 5),
            *padded(shape.box, 5),
            len(shape.dims),
            first.dtype.itemsize,
            TENSOR_MAP_SWIZZLE,
            TENSOR_MAP_MAGIC,
        )
        return TensorMap(np.frombuffer(raw.ljust(128, b"\0"), np.uint64), tuple(buffers))

    def resident_clusters(self, kernel: Kernel, threads: int, smem: int, blocks: int) -> int:
        """As many as there is room for; where a cluster's blocks lie is not simulated."""
        return self.resident_blocks(kernel, threads, smem) * self.sm_count // blocks

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
        """Queues one launch and runs what can run.

        Raises QwenRawError for a geometry or arguments that do not fit the kernel, SimError for what the kernel does.
        """
        if not isinstance(kernel, SimKernel):
            raise QwenRawError(f"{kernel!r} was launched on the simulator: load it with this device's kernel()")
        check_geometry(kernel, grid, block, smem, self.smem_per_block)
        size = check_cluster(kernel, grid, cluster)
        if len(args) != len(kernel.params):
            names = ", ".join(p.name for p in kernel.params)
            raise QwenRawError(f"{kernel.name} takes {len(kernel.params)} arguments ({names}), got {len(args)}")
        prepared = prepare(
            kernel,
            self.rank,
            (grid, block, smem),
            [self._bind(kernel, param, arg) for param, arg in zip(kernel.params, args, strict=True)],
            dependent=pdl,
            cluster=size,
            resident_limit=resident_blocks(block, smem, self.sm_count),
            keep=[arg for arg in args if isinstance(arg, SimBuffer | TensorMap)],
        )
        self._queue(lambda: self.world.launch(prepared))

    def queue_library(self, queue: Callable[[int], None], buffers: Sequence[Buffer], *, loading: bool = False) -> None:
        """See Device: the library works on the host's memory, when all that was queued before has finished."""

        def run() -> None:
            self.world.wait(self.rank)
            queue(0)

        if self._rehearsing:
            if loading:
                run()
            return
        if loading:
            self.not_capturing("loading a library's code")
        self._queue(run)

    def owns(self, buffer: Buffer) -> bool:
        """Whether `buffer` is of this device's memory."""
        return isinstance(buffer, SimBuffer) and buffer.device is self

    def enable_peer(self, other: Device) -> None:
        """Nothing to do: ranks of one world reach each other.

        Raises QwenRawError for a device of another one.
        """
        if not isinstance(other, SimDevice) or other.world is not self.world:
            raise QwenRawError(f"{other.name} is not a rank of the same simulated world")

    def capture(self) -> AbstractContextManager[SimCapture]:
        """Records what the with-block launches: `with device.capture() as c: …`, then `c.graph.launch()`."""
        return self._capturing()

    def require_loops(self) -> None:
        """See Device: there are."""

    def capture_loop(self, begin: LoopPart, body: LoopPart) -> SimLoop:
        """See Device. The host takes the node's part, so nothing in it may wait for another rank."""
        handle = self.zeros((1,), U32)
        graphs = []
        for part in (begin, body):
            with self._capturing() as capture:
                part(np.array([handle.ptr], np.uint64))
            graphs.append(capture.graph)
        return SimLoop(graphs[0], graphs[1], handle)

    def when_queued(self, call: Callable[[], None]) -> None:
        """See Device."""
        if self._captured is None:
            call()
        else:
            self._when_queued.append(call)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Launches of the block are checked and their kernels loaded, but none is queued; not during a capture."""
        with self._capturing():  # and the graph forgotten
            self._rehearsing = True
            try:
                yield
            finally:
                self._rehearsing = False

    def queueing(self) -> AbstractContextManager[None]:
        """What the block queues starts at its end, on all ranks of the world; the host cannot wait inside."""
        return self.world.together()

    def synchronize(self) -> None:
        """Waits for everything queued on this device; counted.

        Raises SimError with every waiting thread's place if it can never finish.
        """
        self.not_capturing("waiting")
        self.host_syncs += 1
        self.world.wait(self.rank)

    def idle(self) -> bool:
        """Whether everything queued has finished; never waits."""
        self.world.advance()
        return self.world.runtime.rank_idle(self.world.handle, self.rank)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of this rank."""
        used = self.world.runtime.memory_used(self.world.handle, self.rank)
        return self.world.memory - used, self.world.memory

    def close(self) -> None:
        """Frees everything, unless the world is shared: then its close() does."""
        if self._own_world:
            self.world.close()

    def __enter__(self) -> SimDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def not_capturing(self, what: str) -> None:
        """Raises QwenRawError if a capture is under way."""
        if self._captured is not None:
            raise QwenRawError(f"{what} is not possible during a capture")

    def queue_fill(self, buffer: SimBuffer, byte: int) -> None:
        """Queues a fill of `buffer`."""

        def fill() -> None:
            self.world.runtime.fill(self.world.handle, self.rank, buffer.ptr, byte, buffer.nbytes)
            self.world.advance()

        self._queue(fill)

    def _queue(self, step: Callable[[], None]) -> None:
        if self._captured is None:
            step()
        else:
            self._captured.append(step)

    @contextmanager
    def _capturing(self) -> Iterator[SimCapture]:
        self.not_capturing("starting a capture")
        steps = self._captured = []
        self.capturing = object()
        when_queued: list[Callable[[], None]] = []
        self._when_queued = when_queued
        result = SimCapture()
        try:
            yield result
        finally:
            self._captured = self.capturing = None
        result.graph = SimGraph(self, steps, when_queued)

    def _bind(self, kernel: SimKernel, param: SimParam, arg: Arg) -> Bound:
        if isinstance(arg, TensorMap):
            return Bound(check_value(kernel, param, arg.words), tuple((b.ptr, b.nbytes) for b in arg.buffers))
        if isinstance(arg, np.generic | np.ndarray):
            value = check_value(kernel, param, arg)
            return Bound(value, self.world.pointed_to(value) if param.kind == "s" else ())
        if not isinstance(arg, SimBuffer) or arg.device.world is not self.world:
            raise QwenRawError(f"{kernel.name}: argument {param.name} is {arg!r}, not memory of this simulator")
        check_pointer(kernel, param, arg.dtype)
        return Bound(arg.ptr.to_bytes(8, "little"), ((arg.ptr, arg.nbytes),))
