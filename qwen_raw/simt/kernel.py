"""Loaded kernels and the check of a launch: what CUDA would refuse, and what it would only misread, is refused here."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qwen_raw.device import Dim
from qwen_raw.errors import QwenRawError
from qwen_raw.simt.native import Argument, Entry, Launch, Param

MAX_THREADS = 1024
MAX_BLOCK: Dim = (1024, 1024, 64)
MAX_GRID: Dim = (2**31 - 1, 65535, 65535)
THREADS_PER_SM, BLOCKS_PER_SM, SMEM_PER_SM = 2048, 32, 228 << 10


@dataclass(frozen=True)
class SimParam:
    """One parameter: `kind` p(ointer), i, u, f or s(truct); `pointee` the dtype that a pointer's memory must have."""

    name: str
    kind: str
    nbytes: int
    pointee: str


@dataclass(frozen=True, eq=False)
class SimKernel:
    """One entry point of a loaded kernel."""

    name: str
    params: tuple[SimParam, ...]
    max_threads: int  # of its __launch_bounds__; 0 without
    entry: Any  # ctypes pointer to Entry
    names: tuple[bytes, ...]  # kept alive for the runtime's reports


class Module:
    """The shared object of one .cu file."""

    def __init__(self, path: Path) -> None:
        lib = ctypes.PyDLL(str(path))
        lib.simt_entries.restype = ctypes.POINTER(Entry)
        self._lib = lib  # stays loaded as long as its kernels
        entries = lib.simt_entries()
        self.kernels = {k.name: k for k in (_load(entries, i) for i in range(lib.simt_entry_count()))}


def _load(entries: Any, index: int) -> SimKernel:
    entry: Entry = entries[index]
    raw: list[Param] = [entry.params[i] for i in range(entry.param_count)]
    params = tuple(SimParam(p.name.decode(), p.kind.decode(), p.nbytes, p.pointee.decode()) for p in raw)
    return SimKernel(
        entry.name.decode(),
        params,
        entry.max_threads,
        ctypes.pointer(entry),
        tuple(p.name for p in raw),
    )


@dataclass(frozen=True)
class Bound:
    """One argument, ready to be passed: its bytes, and the memory it gives access to."""

    value: bytes
    views: tuple[tuple[int, int], ...] = ()  # (address, bytes)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A checked launch that can be queued any number of times; it keeps its buffers alive."""

    launch: Launch
    keep: tuple[object, ...]


def check_geometry(kernel: SimKernel, grid: Dim, block: Dim, smem: int, smem_limit: int, cluster: Dim | None) -> None:
    """Raises QwenRawError for a launch that CUDA would refuse."""
    shape = f"{kernel.name}: grid {grid}, block {block}, {smem} bytes of shared memory"
    threads = block[0] * block[1] * block[2]
    if min(*grid, *block) < 1:
        raise QwenRawError(f"{shape}: every dimension is at least 1")
    if threads > MAX_THREADS or any(b > most for b, most in zip(block, MAX_BLOCK, strict=True)):
        raise QwenRawError(f"{shape}: a block has at most {MAX_THREADS} threads and {MAX_BLOCK} a dimension")
    if kernel.max_threads and threads > kernel.max_threads:
        raise QwenRawError(f"{shape}: the kernel was compiled for at most {kernel.max_threads} threads a block")
    if any(g > most for g, most in zip(grid, MAX_GRID, strict=True)):
        raise QwenRawError(f"{shape}: a grid has at most {MAX_GRID} blocks a dimension")
    if cluster is not None and (cluster[1:] != (1, 1) or not 1 <= cluster[0] <= 8 or grid[0] % cluster[0]):
        raise QwenRawError(f"{shape}: clusters of {cluster} are not rows of 1 to 8 blocks that divide the grid")
    if not 0 <= smem <= smem_limit:
        raise QwenRawError(f"{shape}: the limit is {smem_limit} bytes a block")


def resident_blocks(block: Dim, smem: int, sm_count: int) -> int:
    """Blocks that a GPU of `sm_count` SMs would hold at once, registers aside."""
    warps = -(-block[0] * block[1] * block[2] // 32)
    per_sm = min(THREADS_PER_SM // (32 * warps), SMEM_PER_SM // (smem + 1024), BLOCKS_PER_SM)
    return max(1, per_sm) * sm_count


def check_value(kernel: SimKernel, param: SimParam, value: np.generic | np.ndarray[Any, Any]) -> bytes:
    """The bytes of a by-value argument.

    Raises QwenRawError if its dtype is not the parameter's.
    """
    if value.nbytes == param.nbytes and param.kind in ("s", value.dtype.kind):
        return value.tobytes()
    what = f"{kernel.name}: argument {param.name}"
    if param.kind == "p":
        raise QwenRawError(f"{what} is a pointer: pass a buffer, not {type(value).__name__}")
    if value.nbytes != param.nbytes:
        raise QwenRawError(f"{what} takes {param.nbytes} bytes, got {value.nbytes} ({value.dtype}{list(value.shape)})")
    names = {"i": "a signed integer", "u": "an unsigned integer", "f": "a float"}
    raise QwenRawError(f"{what} is {names[param.kind]} of {param.nbytes} bytes, got {value.dtype}")


def check_pointer(kernel: SimKernel, param: SimParam, dtype: np.dtype[Any]) -> None:
    """Raises QwenRawError if memory of `dtype` is passed for a pointer to something else."""
    if param.kind == "p" and param.pointee in ("any", _name(dtype)):
        return
    what = f"{kernel.name}: argument {param.name}"
    if param.kind != "p":
        raise QwenRawError(f"{what} is no pointer: pass a number, not a buffer")
    raise QwenRawError(f"{what} points to {param.pointee}, got a buffer of {dtype.name}")


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy puts it together each time


def prepare(
    kernel: SimKernel,
    rank: int,
    geometry: tuple[Dim, Dim, int],
    bound: Sequence[Bound],
    *,
    dependent: bool,
    resident_limit: int,
    cluster: int,
    keep: Sequence[object],
) -> Prepared:
    """The C structures of a launch. A struct's pointers give access to whole allocations, under the struct's name."""
    grid, block, smem = geometry
    extra = [(i, view) for i, b in enumerate(bound) for view in b.views[1:]]
    arguments = (Argument * max(1, len(bound) + len(extra)))()
    values = ctypes.create_string_buffer(b"".join(b.value for b in bound))
    at = ctypes.addressof(values)
    for i, b in enumerate(bound):
        view = b.views[0] if b.views else (0, 0)
        arguments[i] = Argument(kernel.names[i], at, len(b.value), *view)
        at += len(b.value)
    for j, (i, view) in enumerate(extra):
        arguments[len(bound) + j] = Argument(kernel.names[i], at, 0, *view)
    launch = Launch(
        kernel.entry,
        rank,
        grid,
        block,
        smem,
        dependent,
        resident_limit,
        cluster,
        len(bound) + len(extra),
        ctypes.cast(arguments, ctypes.POINTER(Argument)),
    )
    return Prepared(launch, (kernel, arguments, values, *keep))
