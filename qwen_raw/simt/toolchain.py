"""The host's C++ compiler and the headers it needs: found, asked for its version, and named in full when missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels import toolchain as cuda

Variant = Literal["plain", "race", "address"]

_COMMON = (
    "-std=c++17",
    "-g1",
    "-fPIC",
    "-fno-plt",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # products and sums are fused where the kernel says fmaf, nowhere else
    "-fno-strict-aliasing",  # kernels look at memory as 16-byte packs
    "-fno-math-errno",
    "-fno-threadsafe-statics",  # one operating-system thread
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
)
# Undefined behaviour is reported by call-backs in the runtime; "vptr" and "object-size" would need more than that.
_UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize=vptr,object-size", "-fno-sanitize-recover=all")
_KERNEL: dict[Variant, tuple[str, ...]] = {
    "plain": ("-O2",),
    "race": ("-O1", "-fsanitize=thread", *_UNDEFINED),
    "address": ("-O1", "-fsanitize=address", *_UNDEFINED),
}
CUDA_MAJORS = (12, 13)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++17 compiler: its path, what it says of itself, and the flags that suit this machine."""

    path: str
    version: str
    machine_flags: tuple[str, ...]
    gnu: bool

    def kernel_flags(self, variant: Variant) -> tuple[str, ...]:
        """How a kernel's translation unit is compiled."""
        return (*_COMMON, *self._own(), *_KERNEL[variant], *self.machine_flags)

    def runtime_flags(self) -> tuple[str, ...]:
        """How the simulator itself is compiled: one for all variants, never instrumented."""
        return (*_COMMON, *self._own(), "-O2", *self.machine_flags)

    def _own(self) -> tuple[str, ...]:
        # Unique symbols would be shared between kernels that are loaded side by side.
        return ("-fno-gnu-unique",) if self.gnu else ()

    def run(self, arguments: list[str], what: str, folder: str | None = None) -> str:
        """Runs the compiler, in `folder`, and returns its standard output.

        Raises QwenRawError with the compiler's first errors.
        """
        done = subprocess.run([self.path, *arguments], capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode != 0:
            lines = done.stderr.splitlines()
            errors = [line for line in lines if "error" in line or "undefined reference" in line]
            raise QwenRawError("\n".join([f"{what} does not compile with {self.path}:", *(errors or lines)[:6]]))
        return done.stdout


def find_compiler() -> Compiler:
    """$CXX, or the first of g++, clang++ and c++ that compiles C++17.

    Raises UsageError if there is none, or on a system that is not Linux.
    """
    if platform.system() != "Linux":
        raise UsageError(f"the simulator runs on Linux, this is {platform.system()}")
    chosen = os.environ.get("CXX", "")
    tried = []
    for name in [chosen] if chosen else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        if path is None:
            tried.append(f"{name} (not found)")
            continue
        check = ["-std=c++17", "-fsyntax-only", "-x", "c++", os.devnull]
        if subprocess.run([path, *check], capture_output=True, check=False).returncode != 0:
            tried.append(f"{path} (no C++17)")
            continue
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        return Compiler(path, said.splitlines()[0] if said else path, _machine_flags(), "clang" not in said)
    raise UsageError(
        f"the simulator needs a C++17 compiler; tried {', '.join(tried)}. Install g++ or set CXX to a compiler"
    )


def _machine_flags() -> tuple[str, ...]:
    """-mfma where the processor has it (fmaf is then one instruction), AVX2 beside it; else libm's, as exact."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:  # not Linux: the portable code is right, only slower
        return ()
    return tuple(f"-m{feature}" for feature in ("fma", "avx2", "f16c") if feature in flags)


def cuda_headers() -> cuda.Headers:
    """The folders with cuda_bf16.h and cuda_fp8.h, of CUDA 12 or else 13.

    Raises QwenRawError with what was searched.
    """
    failures = []
    for major in CUDA_MAJORS:
        try:
            return cuda.cuda_headers(major)
        except QwenRawError as error:
            failures.append(error)
    raise failures[0]
