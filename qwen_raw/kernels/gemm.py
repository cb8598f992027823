"""Launchers of include/gemm.cuh's kernels, shared by gemm_bf16 and gemm_fp8."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_raw.device import BF16, F32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import Linear, check_buffer, check_linear

THREADS, BM, BN = 256, 64, 128


@dataclass(frozen=True, slots=True)
class Gemm:
    """One weight type's kernels: C = A·Wᵀ, A bf16 [T, K]."""

    stem: str
    fp8: bool

    def _launch(self, dev: Device, op: str, columns: int, a: Buffer, linears: list[Linear], args: list[Arg]) -> None:
        T, K = a.shape
        for w in linears:
            check_linear(w, self.fp8)
        check_buffer(a, (T, linears[0].K), BF16, "a")
        N = linears[0].N
        rows = (T + BM - 1) // BM
        require(
            0 < rows <= 65535, f"{T} rows need {rows} row blocks, the grid takes 1 to 65535: send the rows in chunks"
        )
        kernel = dev.kernel(self.stem, f"gemm_{op}_{'fp8' if self.fp8 else 'bf16'}")
        dims = [np.int32(n) for n in (T, N, K)]
        dev.launch(kernel, ((N + columns - 1) // columns, rows, 1), (THREADS, 1, 1), [*args, *dims])

    def _weights(self, *linears: Linear) -> list[Arg]:
        return [b for w in linears for b in (w.weight, w.scale) if b is not None]

    def bias(self, dev: Device, out: Buffer, a: Buffer, w: Linear, bias: Buffer | None) -> None:
        """out bf16 [T, N] = A·Wᵀ + bias f32 [N] (or no bias)."""
        check_buffer(out, (a.shape[0], w.N), BF16, "out")
        if bias is not None:
            check_buffer(bias, (w.N,), F32, "bias")
        self._launch(dev, "bias", BN, a, [w], [out, a, *self._weights(w), bias if bias is not None else np.uint64(0)])

    def add(self, dev: Device, h: Buffer, a: Buffer, w: Linear) -> None:
        """h f32 [T, N] += A·Wᵀ."""
        check_buffer(h, (a.shape[0], w.N), F32, "h")
        self._launch(dev, "add", BN, a, [w], [h, a, *self._weights(w)])

    def swiglu(self, dev: Device, act: Buffer, a: Buffer, gate: Linear, up: Linear) -> None:
        """act bf16 [T, I] = silu(A·Wgᵀ)·(A·Wuᵀ)."""
        require((gate.N, gate.K) == (up.N, up.K), f"gate is {gate.weight.shape}, up is {up.weight.shape}")
        check_buffer(act, (a.shape[0], gate.N), BF16, "act")
        self._launch(dev, "swiglu", BN // 2, a, [gate, up], [act, a, *self._weights(gate, up)])

    def logits(self, dev: Device, out: Buffer, a: Buffer, w: Linear) -> None:
        """out f32 [T, V] = A·Wᵀ."""
        check_buffer(out, (a.shape[0], w.N), F32, "logits")
        self._launch(dev, "logits", BN, a, [w], [out, a, *self._weights(w)])
