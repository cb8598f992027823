"""The runtime's C interface (cuda_src/sim/api.cpp) as ctypes, and what it says when a kernel fails."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from qwen_raw.errors import QwenRawError

_CODE = re.compile(r" <([^<>]+)\+0x([0-9a-f]+)>")


class SimError(QwenRawError):
    """A kernel did something that a GPU would not forgive; the message names kernel, place, block and thread."""


class Param(Structure):
    """One parameter of an entry point (struct Param of runtime.h)."""

    name: bytes
    kind: bytes
    nbytes: int
    pointee: bytes
    _fields_ = (("name", c_char_p), ("kind", c_char), ("nbytes", c_uint32), ("pointee", c_char_p))


class Entry(Structure):
    """One entry point of a kernel's shared object (struct Entry of runtime.h)."""

    name: bytes
    max_threads: int
    param_count: int
    _fields_ = (
        ("name", c_char_p),
        ("max_threads", c_int),
        ("param_count", c_int),
        ("params", POINTER(Param)),
        ("call", c_void_p),
    )


class Options(Structure):
    """A world's options (struct SimtOptions)."""

    _fields_ = (
        ("seed", c_uint64),
        ("rank_bytes", c_uint64),
        ("random", c_int),
        ("weak_links", c_int),
        ("weak_local", c_int),
        ("adversary", c_int),
        ("race", c_int),
        ("trace", c_uint64),
    )


class Argument(Structure):
    """One argument of a launch (struct SimtArgument)."""

    _fields_ = (
        ("name", c_char_p),
        ("value", c_void_p),
        ("nbytes", c_uint64),
        ("view", c_void_p),
        ("view_bytes", c_uint64),
    )


class Launch(Structure):
    """One launch (struct SimtLaunch)."""

    _fields_ = (
        ("entry", POINTER(Entry)),
        ("rank", c_int),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("smem", c_uint64),
        ("dependent", c_int),
        ("resident_limit", c_uint32),
        ("cluster", c_uint32),
        ("argument_count", c_uint32),
        ("arguments", POINTER(Argument)),
    )


class Stats(Structure):
    """Counters of a world (struct SimtStats)."""

    steps: int
    switches: int
    progress: int
    pending_stores: int
    _fields_ = (
        ("steps", c_uint64),
        ("switches", c_uint64),
        ("progress", c_uint64),
        ("pending_stores", c_uint64),
    )


class Runtime:
    """The loaded simulator. Calls hold the interpreter's lock: one simulation runs at a time in a process."""

    def __init__(self, path: Path) -> None:
        lib = ctypes.PyDLL(str(path))
        self.path = path
        self._lib = lib
        lib.simt_world_create.restype = c_void_p
        lib.simt_world_create.argtypes = [c_int, POINTER(Options)]
        lib.simt_world_destroy.argtypes = [c_void_p]
        lib.simt_allocate.restype = c_void_p
        lib.simt_allocate.argtypes = [c_void_p, c_int, c_uint64]
        lib.simt_release.argtypes = [c_void_p, c_void_p]
        lib.simt_memory_used.restype = c_uint64
        lib.simt_memory_used.argtypes = [c_void_p, c_int]
        lib.simt_launch.argtypes = [c_void_p, POINTER(Launch)]
        lib.simt_copy.argtypes = [c_void_p, c_int, c_void_p, c_void_p, c_uint64]
        lib.simt_fill.argtypes = [c_void_p, c_int, c_void_p, c_int, c_uint64]
        lib.simt_advance.argtypes = [c_void_p, c_int]
        lib.simt_rank_idle.argtypes = [c_void_p, c_int]
        lib.simt_host_synced.argtypes = [c_void_p, c_int]
        lib.simt_error.restype = c_char_p
        lib.simt_error.argtypes = [c_void_p]
        lib.simt_stuck.restype = c_uint64
        lib.simt_stuck.argtypes = [c_void_p, c_char_p, c_uint64]
        lib.simt_trace.restype = c_uint64
        lib.simt_trace.argtypes = [c_void_p, c_char_p, c_uint64]
        lib.simt_find.argtypes = [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_uint64)]
        lib.simt_stats.argtypes = [c_void_p, POINTER(Stats)]

    def world_create(self, ranks: int, options: Options) -> int:
        """A new world's handle."""
        handle: int | None = self._lib.simt_world_create(ranks, byref(options))
        if not handle:
            raise QwenRawError(f"a simulated world has 1 to 8 ranks, not {ranks}")
        return handle

    def world_destroy(self, world: int) -> None:
        """Frees the world and all its memory."""
        self._lib.simt_world_destroy(world)

    def allocate(self, world: int, rank: int, nbytes: int) -> int:
        """The address of new memory filled with 0xff, or 0 when the rank's memory is full."""
        return int(self._lib.simt_allocate(world, rank, nbytes) or 0)

    def release(self, world: int, ptr: int) -> None:
        """Frees memory; any later access to it is reported."""
        self._lib.simt_release(world, ptr)

    def memory_used(self, world: int, rank: int) -> int:
        """Bytes in use on a rank."""
        return int(self._lib.simt_memory_used(world, rank))

    def launch(self, world: int, launch: Launch) -> None:
        """Queues a launch."""
        self._lib.simt_launch(world, byref(launch))

    def copy(self, world: int, rank: int, to: int, source: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        """Queues a copy of a contiguous host array, taken now."""
        self._lib.simt_copy(world, rank, to, source.ctypes.data, source.nbytes)

    def fill(self, world: int, rank: int, to: int, byte: int, nbytes: int) -> None:
        """Queues a fill."""
        self._lib.simt_fill(world, rank, to, byte, nbytes)

    def advance(self, world: int, *, waiting: bool) -> int:
        """Runs until nothing can run: 0 all done, 1 something waits, 2 failed. `waiting`: polls' deadlines may pass."""
        return int(self._lib.simt_advance(world, waiting))

    def rank_idle(self, world: int, rank: int) -> bool:
        """Whether everything queued on the rank has finished."""
        return bool(self._lib.simt_rank_idle(world, rank))

    def host_synced(self, world: int, rank: int) -> None:
        """The host has waited for the rank: orders what it launches from now on after what the rank has done."""
        self._lib.simt_host_synced(world, rank)

    def error(self, world: int) -> str:
        """Why the world failed, with code addresses turned into file and line."""
        return symbolise((self._lib.simt_error(world) or b"").decode(errors="replace"))

    def stuck(self, world: int) -> str:
        """Who waits for what."""
        return self._text(self._lib.simt_stuck, world)

    def trace(self, world: int) -> str:
        """The remembered events, one a line, oldest first."""
        return self._text(self._lib.simt_trace, world)

    def _text(self, function: Any, world: int) -> str:
        size = int(function(world, None, 0)) + 1
        text = ctypes.create_string_buffer(size)
        function(world, text, size)
        return text.value.decode(errors="replace")

    def find(self, world: int, ptr: int) -> tuple[int, int] | None:
        """(start, bytes) of the live allocation that holds `ptr`."""
        begin, nbytes = c_void_p(), c_uint64()
        if not self._lib.simt_find(world, ptr, byref(begin), byref(nbytes)):
            return None
        return int(begin.value or 0), int(nbytes.value)

    def stats(self, world: int) -> Stats:
        """Counters since the world began."""
        stats = Stats()
        self._lib.simt_stats(world, byref(stats))
        return stats


def symbolise(text: str) -> str:
    """Replaces each " <file+0xoffset>" by ", at source:line", as far as addr2line knows it."""
    tool = shutil.which("addr2line")

    def place(match: re.Match[str]) -> str:
        if tool is None:
            return ""
        # One byte back: the address is that of the instruction after a call.
        address = hex(int(match[2], 16) - 1)
        done = subprocess.run([tool, "-e", match[1], address], capture_output=True, text=True, check=False)
        line = done.stdout.strip().split(" ")[0]
        return "" if done.returncode or line.startswith("?") else f", at {line.lstrip('./')}"

    return _CODE.sub(place, text)
