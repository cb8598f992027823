"""Kernel arguments as bytes, and the launch itself (cuLaunchKernelEx with attributes)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qwen_raw.device import Arg, Dim, TensorMap
from qwen_raw.driver.check import call
from qwen_raw.driver.context import Context
from qwen_raw.driver.memory import CudaBuffer
from qwen_raw.driver.stream import Stream
from qwen_raw.errors import QwenRawError

DEFAULT_SMEM = 48 << 10  # bytes a block may have without being told first that it may have more


class ParamLayout:
    """The sizes of a kernel's parameters, and how to lay values out for `kernelParams`.

    The storage is one block: a table of one pointer a parameter, then the parameters, each on 16 bytes.
    """

    def __init__(self, kernel: str, sizes: Sequence[int]) -> None:
        self.kernel = kernel
        self.sizes = tuple(sizes)
        self.offsets: list[int] = []
        at = -(-8 * len(self.sizes) // 16) * 16
        for size in self.sizes:
            self.offsets.append(at)
            at += -(-size // 16) * 16
        self._block = ctypes.c_char * max(at, 16)
        table = f"{len(self.sizes)}Q{-8 * len(self.sizes) % 16}x"
        self._struct = struct.Struct("=" + table + "".join(f"{size}s{-size % 16}x" for size in self.sizes))

    def pack(self, args: Sequence[Arg]) -> ctypes.Array[ctypes.c_char]:
        """The block for one launch; it must live until the launch call has returned (the driver copies it there).

        Raises QwenRawError if the number of arguments, or the size of one, is not what the kernel declares.
        """
        if len(args) != len(self.sizes):
            raise QwenRawError(f"{self.kernel} takes {len(self.sizes)} arguments, {len(args)} were given")
        values = [self._bytes(index, arg) for index, arg in enumerate(args)]
        for index, (value, size) in enumerate(zip(values, self.sizes, strict=True)):
            if len(value) != size:
                given = f"{_name(args[index])} has {len(value)} bytes"
                raise QwenRawError(f"{self.kernel}, argument {index}: {given}, the kernel's parameter {size}")
        block = self._block()
        base = ctypes.addressof(block)
        self._struct.pack_into(block, 0, *[base + offset for offset in self.offsets], *values)
        return block

    def _bytes(self, index: int, arg: Arg) -> bytes:
        if isinstance(arg, CudaBuffer):
            return arg.ptr.to_bytes(8, "little")
        if isinstance(arg, np.generic | np.ndarray):
            return arg.tobytes()
        if isinstance(arg, TensorMap):
            return arg.words.tobytes()
        raise QwenRawError(
            f"{self.kernel}, argument {index}: {_name(arg)} has no fixed size; pass a buffer, a NumPy scalar such as "
            "np.int32(n) or np.float32(x), or a NumPy structure"
        )


def _name(arg: Any) -> str:
    if isinstance(arg, np.ndarray):
        return f"{arg.dtype}{list(arg.shape)} by value"
    return f"{type(arg).__name__} {arg!r}"[:60]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a launch is besides its arguments; hashable, so that the driver's structures are built once for each."""

    grid: Dim
    block: Dim
    smem: int
    pdl: bool
    cluster: Dim | None

    def __str__(self) -> str:
        extra = f", cluster {self.cluster}" if self.cluster else ""
        return f"grid {self.grid}, block {self.block}, {self.smem} bytes of shared memory{extra}"

    def check(self, kernel: CudaKernel) -> None:
        """Refuses what the driver would refuse, by name."""
        limits = ((1 << 31) - 1, 65535, 65535)
        if any(not 0 < n <= most for n, most in zip(self.grid, limits, strict=True)):
            raise QwenRawError(f"{kernel.name}: grid {self.grid} is outside 1…{limits}")
        threads = self.block[0] * self.block[1] * self.block[2]
        if min(self.block) < 1 or threads > kernel.max_threads:
            raise QwenRawError(
                f"{kernel.name}: block {self.block} is {threads} threads, 1…{kernel.max_threads} are legal"
            )
        if self.cluster is not None and any(n % c for n, c in zip(self.grid, self.cluster, strict=True)):
            raise QwenRawError(f"{kernel.name}: grid {self.grid} is not a multiple of the cluster {self.cluster}")

    def config(self, driver: Any, stream: Any) -> Any:
        """The driver's CUlaunchConfig for this geometry on `stream`."""
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block
        config.sharedMemBytes = self.smem
        config.hStream = stream
        attributes = []
        ids = driver.CUlaunchAttributeID
        if self.pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if self.cluster is not None:
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = attribute.value.clusterDim
            dims.x, dims.y, dims.z = self.cluster
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


@dataclass(slots=True)
class CudaKernel:
    """One loaded entry point of one device."""

    name: str
    context: Context
    function: Any  # CUfunction
    layout: ParamLayout
    max_threads: int
    static_smem: int  # bytes
    registers: int
    keep: object  # the CuPy kernel: unloads the module when it goes
    _dynamic_smem: int = 0  # what a launch may ask for so far, bytes
    _configs: dict[tuple[Geometry, int], Any] = field(default_factory=dict)
    _resident: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._dynamic_smem = max(DEFAULT_SMEM - self.static_smem, 0)

    def __repr__(self) -> str:
        return f"CudaKernel({self.name} on GPU {self.context.ordinal})"

    def resident_blocks(self, threads: int, smem: int, smem_limit: int) -> int:
        """Blocks of this shape on one multiprocessor; asked of the driver once for each shape."""
        found = self._resident.get((threads, smem))
        if found is None:
            found = 0
            if smem + self.static_smem <= smem_limit:
                self._allow_smem(smem, smem_limit)
                self.context.use()
                occupancy = self.context.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
                found = int(call(occupancy, self.function, threads, smem))
            self._resident[threads, smem] = found
        return found

    def resident_clusters(self, threads: int, smem: int, blocks: int, smem_limit: int) -> int:
        """Clusters of `blocks` such blocks on the whole GPU; asked of the driver once for each shape."""
        key = (threads, smem, blocks)
        found = self._resident.get(key)
        if found is None:
            found = 0
            if smem + self.static_smem <= smem_limit:
                self._allow_smem(smem, smem_limit)
                driver = self.context.driver
                config = Geometry((blocks, 1, 1), (threads, 1, 1), smem, False, (blocks, 1, 1)).config(driver, 0)
                self.context.use()
                found = int(call(driver.cuOccupancyMaxActiveClusters, self.function, config))
            self._resident[key] = found
        return found

    def abandon(self) -> None:
        """Never unload the module: its context has been lost, and CuPy would print the failure at exit."""
        module = getattr(getattr(self.keep, "kernel", None), "module", None)
        if module is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))

    def config(self, geometry: Geometry, stream: Stream, smem_limit: int) -> Any:
        """The driver's CUlaunchConfig, checked and built once for each geometry and stream.

        `smem_limit`: bytes of shared memory that a block of this GPU may have.
        """
        key = (geometry, int(stream.handle))
        found = self._configs.get(key)
        if found is None:
            geometry.check(self)
            self._allow_smem(geometry.smem, smem_limit)
            found = self._configs[key] = geometry.config(self.context.driver, stream.handle)
        return found

    def _allow_smem(self, nbytes: int, limit: int) -> None:
        if nbytes + self.static_smem > limit:
            wanted = f"{nbytes} dynamic and {self.static_smem} static bytes of shared memory"
            raise QwenRawError(f"{self.name} asks for {wanted}, a block of this GPU has {limit}")
        if nbytes > self._dynamic_smem:
            driver = self.context.driver
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            # Devices that share a GPU share the function: another may have asked for more, which must stand.
            self._dynamic_smem = int(call(driver.cuFuncGetAttribute, attribute, self.function))
            if nbytes > self._dynamic_smem:
                call(driver.cuFuncSetAttribute, self.function, attribute, nbytes)
                self._dynamic_smem = nbytes
