"""A weight matrix on the device, and the checks that every product with it shares."""

from __future__ import annotations

from dataclasses import dataclass

from qwen_raw.device import BF16, E4M3, F32, I32, Arg, Buffer
from qwen_raw.errors import QwenRawError, require


@dataclass(frozen=True, slots=True)
class Linear:
    """W [N, K] row-major: bf16, or e4m3 with one fp32 scale per row."""

    weight: Buffer  # [N, K]
    scale: Buffer | None = None  # [N], e4m3 only

    @property
    def N(self) -> int:
        return self.weight.shape[0]

    @property
    def K(self) -> int:
        return self.weight.shape[1]

    def rows(self, first: int, n: int) -> Linear:
        """Rows first … first + n - 1, in the same memory."""
        scale = None if self.scale is None else self.scale.view((n,), first)
        return Linear(self.weight.view((n, self.K), first * self.K), scale)

    @property
    def row_bytes(self) -> int:
        """Of a row of weights."""
        return self.K * self.weight.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.scale.nbytes if self.scale else 0)


def check_linear(w: Linear, fp8: bool) -> None:
    """PRECONDs on a weight: its type, whole 16-byte packs in a row, alignment, one scale a row."""
    want, pack = (E4M3, 16) if fp8 else (BF16, 8)
    require(w.weight.dtype == want, f"weight is {w.weight.dtype}, this kernel takes {want}")
    require(w.K % pack == 0, f"weight rows of {w.K} elements are not whole 16-byte packs: need a multiple of {pack}")
    require(w.weight.ptr % 16 == 0, f"weight at {w.weight.ptr:#x} is not 16-byte aligned")
    if fp8:
        require(w.scale is not None, "fp8 weight without row scales")
        assert w.scale is not None
        check_buffer(w.scale, (w.N,), F32, "scale")


def weight_args(fp8: bool, *linears: Linear) -> list[Arg]:
    """Kernel arguments of checked weights: each followed by its scale when the type has one."""
    args: list[Arg] = []
    for w in linears:
        check_linear(w, fp8)
        args.append(w.weight)
        if w.scale is not None:
            args.append(w.scale)
    return args


def check_buffer(b: Buffer, shape: tuple[int, ...], dtype: object, name: str) -> None:
    """PRECOND: exactly this shape and type, 16-byte aligned."""
    if b.shape != shape or b.dtype != dtype:
        raise QwenRawError(f"{name} is {b.dtype}{list(b.shape)}, expected {dtype}{list(shape)}")
    if b.ptr % 16:
        raise QwenRawError(f"{name} at {b.ptr:#x} is not 16-byte aligned")


def check_span(span: Buffer) -> None:
    """PRECOND: int32 {pos0, T}, where a chunk of the prompt starts and how many of its rows are tokens.

    What it holds is read on the device only. Whoever uploads it has made sure that pos0 + T fits the cache.
    """
    require(span.shape == (2,) and span.dtype == I32, f"span is {span.dtype}{list(span.shape)}, expected int32[2]")
