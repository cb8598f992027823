"""NVIDIA's cuBLASLt through ctypes, where it is installed: another way to multiply, never required.

Its heuristics choose an algorithm when a product of some shape is first asked for, which is while kernels are loaded,
and the product runs once then, so that its code is loaded too. Captures only queue. Needs no launcher of ours: an e4m3
product takes a scale for each row of both operands (cuBLASLt 12.9 and newer), and h += x·Wᵀ is its beta.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

from qwen_raw.device import BF16, E4M3, F32, Buffer, Device
from qwen_raw.errors import QwenRawError, require
from qwen_raw.kernels.gemm_sm90 import Tokens
from qwen_raw.kernels.linear import Linear, check_buffer, check_linear

# cublasLt.h and library_types.h.
R_32F, R_16BF, R_8F_E4M3, COMPUTE_32F, OP_T = 0, 14, 28, 68, 1
DESC_TRANSA, DESC_A_SCALE, DESC_B_SCALE, DESC_FAST_ACCUM, DESC_A_SCALE_MODE, DESC_B_SCALE_MODE = 3, 17, 18, 25, 31, 32
SCALE_OUTER_VECTOR, PREF_WORKSPACE = 3, 1
WORKSPACE = 32 << 20
ROW_SCALES = 120900  # the first version that takes a scale a row
MISSING = "cuBLASLt is not installed: pip install 'qwen-raw[cublas]', or leave gemm at auto or own"


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def load_library() -> Any:
    """The library of CUDA 13 or 12, wherever its wheel or the toolkit has put it.

    Raises QwenRawError, one line, where there is none.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, RuntimeError, OSError) as error:
        raise QwenRawError(MISSING) from error


def version(lib: Any) -> int:
    """120900 is 12.9.0."""
    lib.cublasLtGetVersion.restype = c_size_t
    return int(lib.cublasLtGetVersion())


def version_text(number: int) -> str:
    """12.9.0"""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@dataclass(frozen=True, slots=True)
class Shape:
    """A product [T, K]·[N, K]ᵀ: of e4m3 or bf16, added to fp32 or stored as bf16."""

    fp8: bool
    add: bool
    T: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{'e4m3' if self.fp8 else 'bf16'} {self.T} × {self.N} × {self.K}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How cuBLASLt computes one shape. Its objects are small and live as long as the process."""

    desc: c_void_p
    weights: c_void_p
    tokens: c_void_p
    out: c_void_p
    found: Heuristic


@dataclass(frozen=True, slots=True)
class CublasLt:
    """One device's handle, with a workspace that one stream uses at a time."""

    dev: Device
    lib: Any
    handle: c_void_p
    workspace: Buffer
    plans: dict[Shape, Plan | None] = field(default_factory=dict)  # None: it has no algorithm
    loaded: set[Shape] = field(default_factory=set)  # that have run

    @staticmethod
    def create(dev: Device, lib: Any) -> CublasLt:
        """A handle on this device."""
        made = CublasLt(dev, lib, c_void_p(), dev.empty((WORKSPACE,), E4M3))
        dev.queue_library(lambda _: made._call("cublasLtCreate", byref(made.handle)), [], loading=True)
        return made

    @property
    def takes_fp8(self) -> bool:
        """Whether it can multiply e4m3 with one scale a row."""
        return version(self.lib) >= ROW_SCALES

    def has(self, shape: Shape) -> bool:
        """Whether it can compute this at all. Asked for the first time, not during a capture."""
        if shape not in self.plans:
            self.dev.queue_library(lambda _: self._choose(shape), [], loading=True)
        return self.plans[shape] is not None

    def add(self, h: Buffer, x: Tokens, w: Linear) -> None:
        """h f32 [T, N] += x·Wᵀ."""
        check_buffer(h, (x.values.shape[0], w.N), F32, "h")
        self._launch(h, x, w, add=True)

    def store(self, c: Buffer, x: Tokens, w: Linear) -> None:
        """c bf16 [T, N] = x·Wᵀ."""
        check_buffer(c, (x.values.shape[0], w.N), BF16, "c")
        self._launch(c, x, w, add=False)

    def _launch(self, out: Buffer, x: Tokens, w: Linear, *, add: bool) -> None:
        fp8 = w.scale is not None
        check_linear(w, fp8)
        T, K = x.values.shape
        check_buffer(x.values, (T, w.K), E4M3 if fp8 else BF16, "x")
        buffers = [out, x.values, w.weight, self.workspace]
        if w.scale is not None:
            require(x.scale is not None, "e4m3 tokens without scales")
            assert x.scale is not None
            check_buffer(x.scale, (T,), F32, "the tokens' scale")
            buffers += [x.scale, w.scale]
        shape = Shape(fp8, add, T, w.N, K)
        if not self.has(shape):
            raise QwenRawError(f"cuBLASLt has no algorithm for {shape}: gemm own has")
        plan, new = self.plans[shape], shape not in self.loaded
        assert plan is not None

        def queue(stream: int) -> None:
            if w.scale is not None and x.scale is not None:
                self._attribute(plan.desc, DESC_A_SCALE, c_void_p(w.scale.ptr))
                self._attribute(plan.desc, DESC_B_SCALE, c_void_p(x.scale.ptr))
            self._call(
                "cublasLtMatmul",
                self.handle,
                plan.desc,
                byref(c_float(1.0)),
                c_void_p(w.weight.ptr),
                plan.weights,
                c_void_p(x.values.ptr),
                plan.tokens,
                byref(c_float(1.0 if add else 0.0)),
                c_void_p(out.ptr),
                plan.out,
                c_void_p(out.ptr),
                plan.out,
                byref(plan.found),
                c_void_p(self.workspace.ptr),
                c_size_t(WORKSPACE),
                c_void_p(stream),
            )

        self.dev.queue_library(queue, buffers, loading=new)
        self.loaded.add(shape)

    def _choose(self, shape: Shape) -> None:
        """The heuristics' first choice. Column-major for cuBLASLt: out [N, T] = Wᵀ [K, N]ᵀ · x [K, T]."""
        desc, pref = c_void_p(), c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(desc), COMPUTE_32F, R_32F)
        self._attribute(desc, DESC_TRANSA, c_int(OP_T))
        if shape.fp8:
            require(self.takes_fp8, f"cuBLASLt {version_text(version(self.lib))} takes no scale a row: 12.9 does")
            self._attribute(desc, DESC_A_SCALE_MODE, c_int(SCALE_OUTER_VECTOR))
            self._attribute(desc, DESC_B_SCALE_MODE, c_int(SCALE_OUTER_VECTOR))
            self._attribute(desc, DESC_FAST_ACCUM, ctypes.c_int8(1))
            for key in (DESC_A_SCALE, DESC_B_SCALE):  # that there are some; which, each launch says
                self._attribute(desc, key, c_void_p(self.workspace.ptr))
        kind = R_8F_E4M3 if shape.fp8 else R_16BF
        weights = self._layout(kind, shape.K, shape.N)
        tokens = self._layout(kind, shape.K, shape.T)
        out = self._layout(R_32F if shape.add else R_16BF, shape.N, shape.T)
        self._call("cublasLtMatmulPreferenceCreate", byref(pref))
        size, found, count = c_uint64(WORKSPACE), Heuristic(), c_int()
        self._call("cublasLtMatmulPreferenceSetAttribute", pref, PREF_WORKSPACE, byref(size), c_size_t(8))
        asked = [self.handle, desc, weights, tokens, out, out, pref, 1, byref(found), byref(count)]
        status = self.lib.cublasLtMatmulAlgoGetHeuristic(*asked)
        self._call("cublasLtMatmulPreferenceDestroy", pref)
        self.plans[shape] = None if status or count.value < 1 else Plan(desc, weights, tokens, out, found)

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self._call("cublasLtMatrixLayoutCreate", byref(layout), kind, c_uint64(rows), c_uint64(columns), c_int64(rows))
        return layout

    def _attribute(self, desc: c_void_p, key: int, value: Any) -> None:
        self._call("cublasLtMatmulDescSetAttribute", desc, key, byref(value), c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self.lib, name)(*args)
        if status:
            raise QwenRawError(f"{name} failed with status {status}")
