"""cuBLASLt through ctypes: the algorithm that its own heuristics choose, on our buffers; graphs may capture it.

(CuPy's cuBLAS refuses to be called while a stream is captured.)
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

from qwen_raw.device import E4M3, Buffer
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.cublaslt import (
    COMPUTE_32F,
    DESC_A_SCALE,
    DESC_B_SCALE,
    DESC_FAST_ACCUM,
    DESC_TRANSA,
    OP_T,
    PREF_WORKSPACE,
    R_8F_E4M3,
    R_16BF,
    R_32F,
    WORKSPACE,
    Heuristic,
    load_library,
    version,
)


def library() -> Any:
    """The library that the product would load too.

    Raises QwenRawError where there is none.
    """
    try:
        return load_library()
    except QwenRawError as error:
        raise QwenRawError("cuBLASLt is not installed: pip install nvidia-cublas, or --no-peers") from error


class CublasLt:
    """One handle, with a workspace."""

    def __init__(self, workspace: Buffer) -> None:
        self.lib, self.workspace, self.handle = library(), workspace, c_void_p()
        self._call("cublasLtCreate", byref(self.handle))

    @property
    def version(self) -> int:
        return version(self.lib)

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self.lib, name)(*args)
        if status:
            raise QwenRawError(f"{name} failed with status {status}")

    def _attribute(self, desc: c_void_p, key: int, value: Any) -> None:
        self._call("cublasLtMatmulDescSetAttribute", desc, key, byref(value), c_size_t(ctypes.sizeof(value)))

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        args = (kind, c_uint64(rows), c_uint64(columns), c_int64(rows))
        self._call("cublasLtMatrixLayoutCreate", byref(layout), *args)
        return layout

    def product(self, T: int, N: int, K: int, *, fp8: bool, scale: Buffer | None, choice: int = 0) -> Product:
        """c[T, N] bf16 = x[T, K]·w[N, K]ᵀ; e4m3 with one scale a matrix, at `scale`, and fast accumulation."""
        desc, pref = c_void_p(), c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(desc), COMPUTE_32F, R_32F)
        self._attribute(desc, DESC_TRANSA, c_int(OP_T))
        kind = R_8F_E4M3 if fp8 else R_16BF
        if fp8:
            assert scale is not None
            self._attribute(desc, DESC_A_SCALE, c_void_p(scale.ptr))
            self._attribute(desc, DESC_B_SCALE, c_void_p(scale.ptr))
            self._attribute(desc, DESC_FAST_ACCUM, ctypes.c_int8(1))
        layouts = [self._layout(kind, K, N), self._layout(kind, K, T), self._layout(R_16BF, N, T)]
        self._call("cublasLtMatmulPreferenceCreate", byref(pref))
        size = c_uint64(WORKSPACE)
        self._call("cublasLtMatmulPreferenceSetAttribute", pref, PREF_WORKSPACE, byref(size), c_size_t(8))
        results, count = (Heuristic * 8)(), c_int()
        w, x, c = layouts
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self.handle,
            desc,
            w,
            x,
            c,
            c,
            pref,
            8,
            ctypes.byref(results),
            byref(count),
        )
        if count.value <= choice:
            raise QwenRawError(f"cuBLASLt has no algorithm number {choice} for {T} × {N} × {K}")
        return Product(self, desc, layouts, results[choice])


class Product:
    """One shape, ready to run."""

    def __init__(self, lt: CublasLt, desc: c_void_p, layouts: list[c_void_p], found: Heuristic) -> None:
        self.lt, self.desc, self.layouts, self.found = lt, desc, layouts, found
        self.alpha, self.beta = c_float(1.0), c_float(0.0)

    def launch(self, c: Buffer, x: Buffer, w: Buffer, stream: int) -> None:
        """Queue it."""
        lw, lx, lc = self.layouts
        self.lt._call(
            "cublasLtMatmul",
            self.lt.handle,
            self.desc,
            byref(self.alpha),
            c_void_p(w.ptr),
            lw,
            c_void_p(x.ptr),
            lx,
            byref(self.beta),
            c_void_p(c.ptr),
            lc,
            c_void_p(c.ptr),
            lc,
            byref(self.found, 0),
            c_void_p(self.lt.workspace.ptr),
            c_size_t(WORKSPACE),
            c_void_p(stream),
        )


def open_cublaslt(dev: CudaDevice, wanted: bool) -> tuple[CublasLt | None, dict[str, Any]]:
    """cuBLASLt or None, and what the results say of it: its version, or why it is missing, which is printed too."""
    if not wanted:
        return None, {"cublaslt": "not asked for"}
    try:
        lt = CublasLt(dev.empty((WORKSPACE,), E4M3))
    except QwenRawError as error:
        print(f"# {error}")
        return None, {"cublaslt": str(error)}
    return lt, {"cublaslt": lt.version}
