"""NVRTC and the CUDA headers it needs: found, matched to each other, and named in full when they are not.

NVRTC itself ships no cuda_bf16.h and no nv/target; those come from the wheels nvidia-cuda-runtime and
nvidia-cuda-cccl, or from a CUDA toolkit.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_raw.errors import QwenRawError, UsageError

# A header of each of the two folders that are needed.
_RUNTIME, _CCCL = "cuda_bf16.h", "nv/target"


@dataclass(frozen=True, slots=True)
class Headers:
    """Include folders, and the version that the runtime's headers state (12090 for 12.9)."""

    folders: tuple[Path, ...]
    version: int


class CompileError(QwenRawError):
    """NVRTC refused a source; `log` is what it said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def nvrtc() -> Any:
    """The module cuda.bindings.nvrtc.

    Raises UsageError where it or its library is not installed.
    """
    try:
        from cuda.bindings import nvrtc as module

        module.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"the CUDA compiler NVRTC is not installed ({_first_line(error)}): reinstall qwen-raw"
        ) from error
    return module


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC library that is loaded."""
    _, major, minor = nvrtc().nvrtcVersion()
    return int(major), int(minor)


def compile_cubin(source: bytes, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Compiles `source`, called `name` in messages, to a cubin; returns it with the compiler's log.

    Quoted includes are looked up beside the file `name`. Raises CompileError.
    """
    module = nvrtc()
    program = _checked(module, module.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = module.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _log(module, program)
        if int(status) != 0:
            raise CompileError(f"{name}: {module.nvrtcGetErrorString(status)[1].decode()}", log)
        cubin = bytearray(_checked(module, module.nvrtcGetCUBINSize(program)))
        _checked(module, module.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), log
    finally:
        _checked(module, module.nvrtcDestroyProgram(program))


def cuda_headers(major: int) -> Headers:
    """The include folders with cuda_bf16.h, cuda_fp8.h and nv/target of CUDA `major`.

    Raises QwenRawError with every place that was searched and what to install.
    """
    searched: list[str] = []
    runtime: Path | None = None
    cccl: Path | None = None
    version = 0
    for folder in _candidates(major):
        if folder in map(Path, searched):
            continue
        searched.append(str(folder))
        if runtime is None and (folder / _RUNTIME).is_file():
            stated = header_version(folder)
            if stated // 1000 == major:
                runtime, version = folder, stated
            else:
                searched[-1] += f" (CUDA {stated // 1000}.{stated % 1000 // 10})"
        if cccl is None and (folder / _CCCL).is_file():
            cccl = folder
    if runtime is None or cccl is None:
        missing = " and ".join(n for n, found in ((_RUNTIME, runtime), (_CCCL, cccl)) if found is None)
        suffix = "-cu12" if major == 12 else ""
        raise QwenRawError(
            f"the CUDA {major} headers are missing ({missing}); looked in {', '.join(searched) or 'no folder'}. "
            f"Fix: pip install nvidia-cuda-runtime{suffix} nvidia-cuda-cccl{suffix}, or set CUDA_HOME"
        )
    return Headers((runtime,) if runtime == cccl else (runtime, cccl), version)


def header_version(folder: Path) -> int:
    """CUDART_VERSION as stated in `folder`; 0 if nothing states it."""
    path = folder / "cuda_runtime_api.h"
    text = path.read_text(errors="replace") if path.is_file() else ""
    match = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def _candidates(major: int) -> Iterator[Path]:
    """Wheels first, since they come with NVRTC; then the toolkit that the environment names; then the usual one."""
    wheels = ("cuda_runtime", "cuda_cccl") if major == 12 else (f"cu{major}",)
    for root in _nvidia_wheels():
        for wheel in wheels:
            yield root / wheel / "include"
            yield root / wheel / "include" / "cccl"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield from _toolkit(Path(os.environ[variable]))
    yield from _toolkit(Path("/usr/local/cuda"))


def _toolkit(root: Path) -> Iterator[Path]:
    for folder in (root / "include", root / "targets" / "x86_64-linux" / "include"):
        yield folder
        yield folder / "cccl"


def _nvidia_wheels() -> list[Path]:
    """Folders of the namespace package `nvidia`, into which NVIDIA's wheels install."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []


def _checked(module: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise QwenRawError(f"NVRTC: {module.nvrtcGetErrorString(status)[1].decode()}")
    return values[0] if values else None


def _log(module: Any, program: Any) -> str:
    log = bytearray(_checked(module, module.nvrtcGetProgramLogSize(program)))
    _checked(module, module.nvrtcGetProgramLog(program, log))
    return log.rstrip(b"\0 \n").decode(errors="replace")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
