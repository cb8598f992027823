"""`qwen_raw.device.Device` on a real GPU."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qwen_raw.device import Arg, BoxShape, Buffer, Device, Dim, Kernel, LoopPart, TensorMap
from qwen_raw.driver import graph, loop, tensor_map
from qwen_raw.driver.check import DriverError, call
from qwen_raw.driver.context import Context
from qwen_raw.driver.launch import CudaKernel, Geometry, ParamLayout
from qwen_raw.driver.memory import CudaBuffer, CudaHostRing, Pool
from qwen_raw.driver.stream import Event, Stream
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels import compile as nvrtc
from qwen_raw.kernels import toolchain
from qwen_raw.kernels.cubin import resources

MINIMUM_CAPABILITY = (8, 0)  # bf16 tensor cores


def arch_name(major: int, minor: int) -> str:
    """The compiler's name of a compute capability: with the accelerated instructions (the "a") from 9.0 on."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _buffers(args: Sequence[Arg]) -> Iterator[CudaBuffer]:
    """The buffers among a launch's arguments, those that its tensor maps reach into among them."""
    for arg in args:
        for buffer in arg.buffers if isinstance(arg, TensorMap) else (arg,):
            if isinstance(buffer, CudaBuffer):
                yield buffer


class CudaDevice:
    """One GPU with one main stream; use it from one thread at a time.

    Several devices may be opened on one GPU: they share its primary context, so each addresses the others' memory, and
    work on their streams runs side by side.
    """

    kind: Literal["cuda", "sim"] = "cuda"

    def __init__(self, ordinal: int = 0) -> None:
        """Opens GPU `ordinal` of those visible to the process.

        Raises UsageError if there is none, or if it is older than sm_80.
        """
        context = Context(ordinal)
        self.context = context
        self.ordinal = ordinal
        self.name = call(context.driver.cuDeviceGetName, 96, context.device).split(b"\0")[0].decode()
        major, minor = context.attribute("COMPUTE_CAPABILITY_MAJOR"), context.attribute("COMPUTE_CAPABILITY_MINOR")
        if (major, minor) < MINIMUM_CAPABILITY:
            context.close()
            raise UsageError(f"{self.name} has compute capability {major}.{minor}: the kernels need 8.0 or later")
        self.arch = arch_name(major, minor)
        self._cuda_version = int(call(context.driver.cuDriverGetVersion))  # 13000 for 13.0
        self.driver = f"CUDA driver {self._cuda_version // 1000}.{self._cuda_version % 1000 // 10}"
        self.pdl = self.clusters = major >= 9  # programmatic dependent launch exists, clusters too
        self.sm_count = context.attribute("MULTIPROCESSOR_COUNT")
        self.smem_per_block = context.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.stream = Stream(context)
        self._pool = Pool(context)
        self._kernels: dict[tuple[str, str, Path | None], CudaKernel] = {}
        self._rings: weakref.WeakSet[CudaHostRing] = weakref.WeakSet()
        self._graphs: weakref.WeakSet[graph.CudaGraph] = weakref.WeakSet()
        self._peers: set[int] = set()
        self._rehearsing = False

    def __repr__(self) -> str:
        return f"CudaDevice({self.ordinal}: {self.name}, {self.arch})"

    @property
    def host_syncs(self) -> int:
        """Times the host has waited for this device: stream and event waits, downloads, large uploads, frees."""
        return self.context.host_syncs

    @host_syncs.setter
    def host_syncs(self, count: int) -> None:
        self.context.host_syncs = count

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> CudaBuffer:
        """A new buffer with whatever the memory held."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        owner = self._pool.device_memory(nbytes)
        return CudaBuffer(self.context, self.stream, owner, owner.ptr, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> CudaBuffer:
        """A new buffer of zero bytes."""
        buffer = self.empty(shape, dtype)
        buffer.fill(0)
        return buffer

    def array(self, host: np.ndarray[Any, Any]) -> CudaBuffer:
        """A new buffer with a copy of `host`."""
        buffer = self.empty(host.shape, host.dtype)
        buffer.upload(host)
        return buffer

    def host_ring(self, slots: int) -> CudaHostRing:
        """`slots` zeroed uint64 words of pinned memory, mapped into the GPU."""
        ring = CudaHostRing(self._pool, self.stream, slots)
        self._rings.add(ring)
        return ring

    def event(self, *, timing: bool = True) -> Event:
        """A new event of this device."""
        return Event(self.context, timing=timing)

    def kernel(self, stem: str, name: str, source_root: Path | None = None) -> CudaKernel:
        """The entry point `name` of `stem`.cu in cuda_src (or `source_root`): compiled or from the cache, loaded whole.

        Raises QwenRawError for a compile error (with file and line) or a name that the file does not have.
        """
        key = (stem, name, source_root)
        found = self._kernels.get(key)
        if found is None:
            self.context.not_capturing(f"loading {stem}.{name}")
            found = self._kernels[key] = self._load(stem, name, source_root)
        return found

    def _load(self, stem: str, name: str, source_root: Path | None) -> CudaKernel:
        compiler, supported = toolchain.nvrtc_version(), self._cuda_version // 1000
        if compiler[0] > supported:
            raise UsageError(
                f"{self.driver} cannot load what NVRTC {compiler[0]}.{compiler[1]} compiles: "
                f"update the driver, or install the packages of CUDA {supported}"
            )
        path = nvrtc.build(stem, self.arch, source_root=source_root)
        table = resources(path)
        if name not in table:
            raise QwenRawError(f"{stem}.cu has no kernel {name}: it has {', '.join(sorted(table))}")
        entry = table[name]
        raw, handle = self._load_cubin(path, name)
        self.context.use()
        driver = self.context.driver
        function = driver.CUfunction(handle)
        if hasattr(driver, "cuFuncLoad"):  # lazy loading inside a launch can deadlock kernels that wait for each other
            call(driver.cuFuncLoad, function)
        return CudaKernel(
            name=name,
            context=self.context,
            function=function,
            layout=ParamLayout(name, entry.params),
            max_threads=entry.max_threads,
            static_smem=entry.static_smem,
            registers=entry.registers,
            keep=raw,
        )

    def _load_cubin(self, path: Path, name: str) -> tuple[object, int]:
        """(CuPy's kernel, its CUfunction) of the entry point `name` of the cubin `path`, loaded on this GPU."""
        try:
            import cupy  # imported here: the CPU path works without it
        except ImportError as error:
            raise UsageError(f"CuPy is not installed ({error}): reinstall qwen-raw") from error
        self.context.use()
        try:
            # This makes the run-time library retain the primary context too. CuPy keeps every module that it has loaded
            # as long as the process lives, so the context must outlive close(): a later device gets the same module.
            cupy.cuda.runtime.setDevice(self.ordinal)
            raw = cupy.RawModule(path=str(path)).get_function(name)
            handle = int(raw.kernel.ptr)
        except RuntimeError as error:  # CuPy's errors of the driver and the run-time library
            raise QwenRawError(f"{path.name} could not be loaded on GPU {self.ordinal}: {error}") from error
        return raw, handle

    def tensor_map(self, buffers: Sequence[Buffer], shape: BoxShape) -> TensorMap:
        """A map of `shape` from the first buffer's address on, in its dtype; `buffers`: all that the map reaches into.

        Raises QwenRawError for what the hardware does not take.
        """
        return TensorMap(tensor_map.encode(buffers[0].ptr, buffers[0].dtype, shape), tuple(buffers))

    def resident_blocks(self, kernel: Kernel, threads: int, smem: int) -> int:
        """Blocks of `threads` threads and `smem` dynamic bytes that one multiprocessor holds at once; 0: none fits."""
        if not isinstance(kernel, CudaKernel) or kernel.context is not self.context:
            raise QwenRawError(f"{kernel!r} was asked about on GPU {self.ordinal}: load it with that device's kernel()")
        return kernel.resident_blocks(threads, smem, self.smem_per_block)

    def resident_clusters(self, kernel: Kernel, threads: int, smem: int, blocks: int) -> int:
        """Clusters of `blocks` such blocks that the whole GPU holds at once; 0 before sm_90, which has none."""
        if not isinstance(kernel, CudaKernel) or kernel.context is not self.context:
            raise QwenRawError(f"{kernel!r} was asked about on GPU {self.ordinal}: load it with that device's kernel()")
        return kernel.resident_clusters(threads, smem, blocks, self.smem_per_block) if self.clusters else 0

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
        stream: Stream | None = None,
    ) -> None:
        """Queues one launch on the main stream (or `stream`); the host does not wait.

        `smem`: bytes of dynamic shared memory. `pdl`: programmatic dependent launch, an ordinary launch before sm_90.
        `cluster`: blocks a cluster, sm_90+. Raises QwenRawError for arguments that are not what the kernel
        declares, for a kernel or buffer of another device, and for a geometry that the device cannot run.
        """
        context = self.context
        if not isinstance(kernel, CudaKernel) or kernel.context is not context:
            raise QwenRawError(f"{kernel!r} was launched on GPU {self.ordinal}: load it with that device's kernel()")
        buffers = list(_buffers(args))
        for buffer in buffers:
            self._require_reachable(kernel, buffer)
        params = kernel.layout.pack(args)
        context.use()
        geometry = Geometry(grid, block, smem, pdl and self.pdl, cluster)
        config = kernel.config(geometry, stream or self.stream, self.smem_per_block)
        if self._rehearsing:
            return
        try:
            call(context.driver.cuLaunchKernelEx, config, kernel.function, ctypes.addressof(params), 0)
        except DriverError as error:
            raise DriverError(f"{kernel.name}, {geometry}: {error}", error.name) from error
        if context.captured is not None:
            context.keep(kernel.keep, *(buffer.owner for buffer in buffers))

    def _require_reachable(self, kernel: CudaKernel, buffer: CudaBuffer) -> None:
        """Raises unless this GPU may read `buffer`: its own, pinned memory, or a peer's after enable_peer()."""
        buffer.require_alive()
        elsewhere = buffer.context.ordinal != self.ordinal and not buffer.owner.portable
        if elsewhere and buffer.context.ordinal not in self._peers:
            raise QwenRawError(f"{kernel.name} on GPU {self.ordinal} was given {buffer!r}: enable peer access first")

    def queue_library(self, queue: Callable[[int], None], buffers: Sequence[Buffer], *, loading: bool = False) -> None:
        """See Device."""
        if self._rehearsing and not loading:
            return
        if loading:
            self.context.not_capturing("loading a library's code")
        owned = [buffer for buffer in buffers if isinstance(buffer, CudaBuffer)]
        for buffer in owned:
            buffer.require_alive()
        self.context.use()
        queue(int(self.stream.handle))
        if self.context.captured is not None:
            self.context.keep(*(buffer.owner for buffer in owned))

    def owns(self, buffer: Buffer) -> bool:
        """Whether `buffer` is of this device's memory, ordered by its main stream."""
        return isinstance(buffer, CudaBuffer) and buffer.stream is self.stream

    def enable_peer(self, other: Device) -> None:
        """Lets kernels of this device read and write the memory of `other`; a second call does nothing.

        Raises QwenRawError if the two have no peer path.
        """
        if not isinstance(other, CudaDevice):
            raise QwenRawError(f"GPU {self.ordinal} cannot access the memory of {other.name}")
        if other.ordinal == self.ordinal or other.ordinal in self._peers:
            return
        driver = self.context.driver
        self.context.use()
        if not call(driver.cuDeviceCanAccessPeer, self.context.device, other.context.device):
            raise QwenRawError(f"GPU {self.ordinal} cannot access the memory of GPU {other.ordinal}")
        try:
            call(driver.cuCtxEnablePeerAccess, other.context.handle, 0)
        except DriverError as error:
            if error.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":  # by CuPy, say, in the same context
                raise
        self._peers.add(other.ordinal)

    def capture(self) -> AbstractContextManager[graph.CudaCapture]:
        """Captures what the with-block launches into a graph: `with device.capture() as c: …`, then `c.graph.launch()`.

        Kernels must be loaded, and buffers allocated, before.
        """
        return self._capturing()

    def require_loops(self) -> None:
        """See Device."""
        loop.require_loops(self.context)

    def capture_loop(self, begin: LoopPart, body: LoopPart) -> graph.CudaGraph:
        """See Device."""
        try:
            result = loop.capture_loop(self.context, self.stream, begin, body)
        finally:
            self._pool.free_late()
        self._graphs.add(result)
        return result

    @property
    def capturing(self) -> object | None:
        """See Device."""
        return None if self.context.captured is None else self.context.captured.name

    def when_queued(self, call_first: Callable[[], None]) -> None:
        """See Device."""
        if self.context.captured is not None:
            self.context.captured.when_queued.append(call_first)
        elif not self._rehearsing:
            call_first()

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Launches of the block are checked and their kernels loaded, but none is queued; not during a capture."""
        self.context.not_capturing("rehearsing")
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Work of several ranks is queued; a GPU starts it by itself.

        Without the cycle collector, which may free what an earlier engine has left: the driver would wait with that
        for ranks that wait for others, for which the host has queued nothing yet.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()

    @contextmanager
    def _capturing(self) -> Iterator[graph.CudaCapture]:
        try:
            with graph.capture(self.context, self.stream) as result:
                yield result
        finally:
            self._pool.free_late()
        self._graphs.add(result.graph)

    def synchronize(self) -> None:
        """Waits for everything queued on the main stream; counted."""
        self.stream.synchronize()

    def idle(self) -> bool:
        """Whether everything queued on the main stream has finished; never waits.

        Raises DriverError if a launch failed.
        """
        return self.stream.idle()

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU."""
        self.context.use()
        free, total = call(self.context.driver.cuMemGetInfo)
        return int(free), int(total)

    def close(self) -> None:
        """Frees all it gave out (graphs, buffers, rings) and gives the context back; a second call does nothing.

        Raises DriverError if work that was still queued failed.
        """
        if self.context.closed:
            return
        try:
            self.synchronize()
        except DriverError:
            self._pool.abandon()
            for kernel in self._kernels.values():
                kernel.abandon()
            self.context.closed = True
            raise
        for captured in list(self._graphs):
            captured.close()
        for ring in list(self._rings):
            ring.close()
        self._kernels.clear()
        self._pool.close()
        self.stream.close()
        self.context.close()

    def __enter__(self) -> CudaDevice:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DriverError:
            if kind is None:  # otherwise the block's own error says more
                raise
