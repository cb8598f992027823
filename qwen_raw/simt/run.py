"""Runs Python with AddressSanitizer's library in the process, as simulated devices with sanitize="address" need it.

`python -m qwen_raw.simt.run script.py …` or `… -m pytest tests/simt`: everything after the module's name goes to a new
interpreter. Instrumented kernels cannot be loaded into an ordinary one, because the library must come first of all.
A bad access ends the process with the sanitizer's report, which begins with the simulated thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from qwen_raw.cli.process import guarded
from qwen_raw.errors import UsageError
from qwen_raw.simt.toolchain import Compiler, find_compiler

# Python's own allocations are never freed at exit; fibres are no stacks that use-after-return checks understand.
ASAN_OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1"


def active() -> bool:
    """Whether this process has AddressSanitizer's library in it."""
    return hasattr(ctypes.CDLL(None), "__asan_init")


def environment(compiler: Compiler) -> dict[str, str]:
    """The environment under which an interpreter starts with the library that belongs to `compiler`.

    Raises UsageError if that compiler has none.
    """
    name = "libasan.so" if compiler.gnu else "libclang_rt.asan-x86_64.so"
    path = Path(compiler.run([f"-print-file-name={name}"], "asking for AddressSanitizer").strip())
    if not path.is_absolute():
        raise UsageError(f"{compiler.path} has no {name}: install the compiler's sanitizer libraries")
    return {**os.environ, "LD_PRELOAD": str(path.resolve()), "ASAN_OPTIONS": ASAN_OPTIONS}


def main(arguments: Sequence[str]) -> int:
    """Replaces this process by `python arguments…` under AddressSanitizer; where it cannot, the exit code."""
    return guarded("simt.run", lambda: _main(arguments))


def _main(arguments: Sequence[str]) -> NoReturn:
    if not arguments:
        raise UsageError("name what to run: python -m qwen_raw.simt.run (script.py | -m module | -c code) …")
    os.execve(sys.executable, [sys.executable, *arguments], environment(find_compiler()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
