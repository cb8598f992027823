"""Prefill's matrix products behind one interface: `mma.sync` kernels everywhere, Hopper's own where they suit.

Hopper's take bf16 inputs, and with fp8 weights e4m3 ones, with one scale a token. The other kernels take f16 after a
norm, which is more exact; they are kept for models whose rows are too short for the difference in speed to matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qwen_raw.config import ModelConfig
from qwen_raw.device import E4M3, F32, Buffer, Device
from qwen_raw.kernels import gemm_bf16_sm90, gemm_fp8_sm90, gemm_sm90
from qwen_raw.kernels.gemm import Gemm
from qwen_raw.kernels.gemm_bf16 import GEMM as GEMM_BF16
from qwen_raw.kernels.gemm_fp8 import GEMM as GEMM_FP8
from qwen_raw.kernels.gemm_sm90 import GemmSm90, Tokens
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.norm import rmsnorm, rmsnorm_bf16
from qwen_raw.kernels.quantize import quantize_rows

SHORT = 512  # hidden sizes below keep f16 inputs


class RowProducts(Protocol):
    """The row-parallel products, O and down; a is bf16 [T, K]."""

    def add(self, dev: Device, h: Buffer, a: Buffer, w: Linear) -> None:
        """h f32 [T, N] += a·Wᵀ."""

    def store(self, dev: Device, y: Buffer, a: Buffer, w: Linear) -> None:
        """y bf16 [T, N] = a·Wᵀ."""


class Products(RowProducts, Protocol):
    """All products of a layer; `norm` makes the 16-bit [T, D] input of qkv and swiglu."""

    def norm(self, dev: Device, out: Buffer, h: Buffer, g: Buffer, eps: float) -> None:
        """out = RMSNorm(h f32 [T, D])·g."""

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
        """q, and the tokens' rows of both caches, from the normalised input."""

    def swiglu(self, dev: Device, act: Buffer, a: Buffer, gate: Linear, up: Linear) -> None:
        """act bf16 [T, I] from the normalised input."""

    def unquantised(self) -> Products:
        """Products of the same weights with 16-bit inputs: the function that decode computes."""


@dataclass(frozen=True, slots=True)
class MmaProducts:
    """`mma.sync`, from sm_80 on: f16 after a norm, weights widened to the input's type."""

    gemm: Gemm

    def unquantised(self) -> Products:
        """See Products."""
        return self

    def norm(self, dev: Device, out: Buffer, h: Buffer, g: Buffer, eps: float) -> None:
        """See Products."""
        rmsnorm(dev, out, h, g, eps)

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
        """See Products."""
        self.gemm.qkv(dev, q, k_cache, v_cache, a, w, bias, rope, span, fine)

    def swiglu(self, dev: Device, act: Buffer, a: Buffer, gate: Linear, up: Linear) -> None:
        """See Products."""
        self.gemm.swiglu(dev, act, a, gate, up)

    def add(self, dev: Device, h: Buffer, a: Buffer, w: Linear) -> None:
        """See Products."""
        self.gemm.add(dev, h, a, w)

    def store(self, dev: Device, y: Buffer, a: Buffer, w: Linear) -> None:
        """See Products."""
        self.gemm.store(dev, y, a, w)


@dataclass(frozen=True, slots=True)
class Sm90Products:
    """Hopper's kernels; with fp8 weights every input is quantised first."""

    gemm: GemmSm90
    codes: Buffer | None  # e4m3 [rows · the widest input]
    scale: Buffer | None  # f32 [rows]

    def unquantised(self) -> Products:
        """See Products."""
        return self if self.codes is None else MmaProducts(GEMM_FP8)

    def _tokens(self, dev: Device, a: Buffer) -> Tokens:
        if self.codes is None or self.scale is None:
            return Tokens(a)
        q, scale = self.codes.view(a.shape), self.scale.view((a.shape[0],))
        quantize_rows(dev, q, scale, a)
        return Tokens(q, scale)

    def norm(self, dev: Device, out: Buffer, h: Buffer, g: Buffer, eps: float) -> None:
        """See Products."""
        rmsnorm_bf16(dev, out, h, g, eps)

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
        """See Products."""
        self.gemm.qkv(dev, q, k_cache, v_cache, self._tokens(dev, a), w, bias, rope, span, fine=fine)

    def swiglu(self, dev: Device, act: Buffer, a: Buffer, gate: Linear, up: Linear) -> None:
        """See Products."""
        self.gemm.swiglu(dev, act, self._tokens(dev, a), gate, up)

    def add(self, dev: Device, h: Buffer, a: Buffer, w: Linear) -> None:
        """See Products."""
        self.gemm.add(dev, h, self._tokens(dev, a), w)

    def store(self, dev: Device, y: Buffer, a: Buffer, w: Linear) -> None:
        """See Products."""
        self.gemm.store(dev, y, self._tokens(dev, a), w)


def suits_sm90(arch: str, c: ModelConfig) -> bool:
    """Whether a rank of these dimensions runs Hopper's kernels on this architecture."""
    whole = all(n % 8 == 0 for n in (c.D, c.I, c.H * c.HD))
    return arch == gemm_sm90.ARCH and c.D >= SHORT and whole and c.HD in (64, 128)


def create(dev: Device, c: ModelConfig, rows: int, *, fp8: bool, pdl: bool) -> Products:
    """What multiplies chunks of up to `rows` rows on this device. `pdl`: dependent launches."""
    if not suits_sm90(dev.arch, c):
        return MmaProducts(GEMM_FP8 if fp8 else GEMM_BF16)
    if not fp8:
        return Sm90Products(gemm_bf16_sm90.create(dev, pdl=pdl), None, None)
    widest = max(c.D, c.I, c.H * c.HD)
    return Sm90Products(gemm_fp8_sm90.create(dev, pdl=pdl), dev.empty((rows * widest,), E4M3), dev.empty((rows,), F32))
