"""Launchers of include/gemm.cuh's kernels, shared by gemm_bf16 and gemm_fp8."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_raw.device import BF16, F32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.kv_cache import cache_args
from qwen_raw.kernels.linear import Linear, check_buffer, check_linear, check_span

THREADS, BM, BN = 256, 64, 128


@dataclass(frozen=True, slots=True)
class Gemm:
    """One weight type's kernels: C = A·Wᵀ, A [T, K] in 16 bits: f16 for normed inputs (qkv, swiglu), bf16 elsewhere."""

    stem: str
    fp8: bool

    def _launch(
        self, dev: Device, op: str, columns: int, a: Buffer, linears: list[Linear], args: list[Arg], dims: list[int]
    ) -> None:
        """`columns`: of blocks; `dims` follow the pointers as int32."""
        T = a.shape[0]
        for w in linears:
            check_linear(w, self.fp8)
        check_buffer(a, (T, linears[0].K), BF16, "a")
        rows = (T + BM - 1) // BM
        require(0 < rows <= 65535, f"{T} rows need {rows} row blocks, 1 to 65535 are possible: send the rows in chunks")
        kernel = dev.kernel(self.stem, f"gemm_{op}_{'fp8' if self.fp8 else 'bf16'}")
        dev.launch(kernel, (columns, rows, 1), (THREADS, 1, 1), [*args, *(np.int32(n) for n in dims)])

    def _weights(self, *linears: Linear) -> list[Arg]:
        return [b for w in linears for b in (w.weight, w.scale) if b is not None]

    def qkv(
        self,
        dev: Device,
        q: Buffer,
        k_cache: Buffer,
        v_cache: Buffer,
        a: Buffer,
        w: Linear,
        bias: Buffer,
        rope: Buffer,
        span: Buffer,
        fine: Buffer | None = None,
    ) -> None:
        """q bf16 [T, H, HD], and rows pos0 … of both caches [KV, max_len, HD], from A f16 [T, K].

        Caches are bf16, or e4m3 with `fine` (qwen_raw/kernels/kv_cache.py).
        bias f32 [N]; rope f32 [max_len, HD/2, 2], {cos, sin}; span int32 [2]: {pos0, how many of the T rows are
        tokens}; the others are written nowhere.
        """
        (T, H, HD), (KV, max_len, _) = q.shape, k_cache.shape
        require(
            w.N == (H + 2 * KV) * HD, f"QKV weight has {w.N} rows, {H} + 2·{KV} heads of {HD} are {(H + 2 * KV) * HD}"
        )
        require(HD % 2 == 0, f"head_dim {HD} is odd")
        check_buffer(q, (a.shape[0], H, HD), BF16, "q")
        cache = cache_args(k_cache, v_cache, fine, KV, max_len, HD)
        check_buffer(bias, (w.N,), F32, "bias")
        check_buffer(rope, (max_len, HD // 2, 2), F32, "rope")
        check_span(span)
        args = [*cache.with_pointers(q), a, *self._weights(w), bias, rope, span]
        self._launch(dev, "qkv", -(-w.N // BN), a, [w], args, [T, H, KV, HD, max_len, int(cache.e4m3), w.K])

    def add(self, dev: Device, h: Buffer, a: Buffer, w: Linear) -> None:
        """h f32 [T, N] += A·Wᵀ, A bf16 [T, K]."""
        check_buffer(h, (a.shape[0], w.N), F32, "h")
        dims = [a.shape[0], w.N, w.K]
        self._launch(dev, "add", -(-w.N // BN), a, [w], [h, a, *self._weights(w)], dims)

    def store(self, dev: Device, y: Buffer, a: Buffer, w: Linear) -> None:
        """y bf16 [T, N] = A·Wᵀ, A bf16 [T, K]: a rank's share of a row-parallel product."""
        check_buffer(y, (a.shape[0], w.N), BF16, "y")
        dims = [a.shape[0], w.N, w.K]
        self._launch(dev, "store", -(-w.N // BN), a, [w], [y, a, *self._weights(w)], dims)

    def swiglu(self, dev: Device, act: Buffer, a: Buffer, gate: Linear, up: Linear) -> None:
        """act bf16 [T, I] = silu(A·Wgᵀ)·(A·Wuᵀ), A f16 [T, K]."""
        require((gate.N, gate.K) == (up.N, up.K), f"gate is {gate.weight.shape}, up is {up.weight.shape}")
        check_buffer(act, (a.shape[0], gate.N), BF16, "act")
        args, dims = [act, a, *self._weights(gate, up)], [a.shape[0], gate.N, gate.K]
        self._launch(dev, "swiglu", -(-2 * gate.N // BN), a, [gate, up], args, dims)

    def f32(self, dev: Device, c: Buffer, a: Buffer, w: Linear) -> None:
        """c f32 [T, N] = A·Wᵀ, A bf16 [T, K] (bf16 weights only)."""
        check_buffer(c, (a.shape[0], w.N), F32, "c")
        dims = [a.shape[0], w.N, w.K]
        self._launch(dev, "f32", -(-w.N // BN), a, [w], [c, a, *self._weights(w)], dims)
