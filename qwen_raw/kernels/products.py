"""Prefill's matrix products behind one interface: `mma.sync` kernels everywhere, Hopper's own where they suit.

Hopper's take bf16 inputs, and with fp8 weights e4m3 ones, with one scale a token. The other kernels take f16 after a
norm, which is more exact; they are kept for models whose rows are too short for the difference in speed to matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qwen_raw.config import ModelConfig
from qwen_raw.device import E4M3, F32, U8, Buffer, Device
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels import gemm_bf16_sm90, gemm_fp8_sm90, gemm_sm90
from qwen_raw.kernels.gemm import Gemm
from qwen_raw.kernels.gemm_bf16 import GEMM as GEMM_BF16
from qwen_raw.kernels.gemm_fp8 import GEMM as GEMM_FP8
from qwen_raw.kernels.gemm_sm90 import GemmSm90, Tokens, exponent_row
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.norm import rmsnorm, rmsnorm_bf16, rmsnorm_e4m3
from qwen_raw.kernels.quantize import MOST, quantize_tokens

SHORT = 512  # hidden sizes below keep f16 inputs
BLOCKS_FROM = 512  # tokens, from which on attention makes O's e4m3 input, with exponents


class RowProducts(Protocol):
    """The row-parallel products, O and down; x is [T, K]."""

    def add(self, dev: Device, h: Buffer, x: Tokens, w: Linear) -> None:
        """h f32 [T, N] += x·Wᵀ."""

    def store(self, dev: Device, y: Buffer, x: Tokens, w: Linear) -> None:
        """y bf16 [T, N] = x·Wᵀ."""


class Products(RowProducts, Protocol):
    """All products of a layer, and their inputs: `norm` makes that of qkv and swiglu, `quantise` that of O and down."""

    @property
    def normed(self) -> str:
        """What `norm` makes: f16, bf16 or e4m3."""

    def room(self, a: Buffer) -> Tokens:
        """The input in which values of a 16-bit buffer go into a product: the buffer itself, or codes and scales."""

    def norm(self, dev: Device, x: Tokens, h: Buffer, g: Buffer, eps: float) -> None:
        """x = RMSNorm(h f32 [T, D])·g; x from `room`."""

    def quantise(self, dev: Device, x: Tokens, a: Buffer) -> None:
        """x = a bf16 [T, K]; x from `room(a)`, and where that is `a` there is nothing to do."""

    def blocks(self, dev: Device, a: Buffer, w: Linear) -> Tokens | None:
        """Room for a 16-bit buffer's values [T, K], in its own memory, as e4m3 with exponents for `add` with w.

        None: that product takes no exponents.
        """

    def qkv(
        self,
        dev: Device,
        q: Buffer,
        k_cache: Buffer,
        v_cache: Buffer,
        x: Tokens,
        w: Linear,
        bias: Buffer,
        rope: Buffer,
        span: Buffer,
        fine: Buffer | None = None,
    ) -> None:
        """q, and the tokens' rows of both caches, from the normalised input."""

    def swiglu(self, dev: Device, act: Buffer, x: Tokens, gate: Linear, up: Linear) -> None:
        """act bf16 [T, I] from the normalised input."""

    def pushes(self, T: int) -> bool:
        """Whether `push` takes T tokens."""

    def push(self, dev: Device, parts: Sequence[Buffer], x: Tokens, w: Linear) -> None:
        """`store`, its rows dealt out to their owners' memory: bf16 [n, N] each, n the same but for the last."""

    def unquantised(self) -> Products:
        """Products of the same weights with 16-bit inputs: the function that decode computes."""


@dataclass(frozen=True, slots=True)
class MmaProducts:
    """`mma.sync`, from sm_80 on: f16 after a norm, weights widened to the input's type."""

    gemm: Gemm
    normed = "f16"

    def unquantised(self) -> Products:
        """See Products."""
        return self

    def pushes(self, T: int) -> bool:
        """See Products: they store to one place."""
        return False

    def push(self, dev: Device, parts: Sequence[Buffer], x: Tokens, w: Linear) -> None:
        """See Products."""
        raise QwenRawError("mma.sync products store to one place: pushes() says that they deal no rows out")

    def room(self, a: Buffer) -> Tokens:
        """See Products."""
        return Tokens(a)

    def norm(self, dev: Device, x: Tokens, h: Buffer, g: Buffer, eps: float) -> None:
        """See Products."""
        rmsnorm(dev, x.values, h, g, eps)

    def quantise(self, dev: Device, x: Tokens, a: Buffer) -> None:
        """See Products: `a` is the input."""

    def blocks(self, dev: Device, a: Buffer, w: Linear) -> Tokens | None:
        """See Products: they have 16-bit inputs."""
        return None

    def qkv(
        self,
        dev: Device,
        q: Buffer,
        k_cache: Buffer,
        v_cache: Buffer,
        x: Tokens,
        w: Linear,
        bias: Buffer,
        rope: Buffer,
        span: Buffer,
        fine: Buffer | None = None,
    ) -> None:
        """See Products."""
        self.gemm.qkv(dev, q, k_cache, v_cache, x.values, w, bias, rope, span, fine)

    def swiglu(self, dev: Device, act: Buffer, x: Tokens, gate: Linear, up: Linear) -> None:
        """See Products."""
        self.gemm.swiglu(dev, act, x.values, gate, up)

    def add(self, dev: Device, h: Buffer, x: Tokens, w: Linear) -> None:
        """See Products."""
        self.gemm.add(dev, h, x.values, w)

    def store(self, dev: Device, y: Buffer, x: Tokens, w: Linear) -> None:
        """See Products."""
        self.gemm.store(dev, y, x.values, w)


@dataclass(frozen=True, slots=True)
class Sm90Products:
    """Hopper's kernels; with fp8 weights every input is quantised first."""

    gemm: GemmSm90
    codes: Buffer | None  # e4m3 [rows · the widest input]
    scale: Buffer | None  # f32 [rows]

    @property
    def normed(self) -> str:
        """See Products."""
        return "bf16" if self.codes is None else "e4m3"

    def unquantised(self) -> Products:
        """See Products."""
        return self if self.codes is None else MmaProducts(GEMM_FP8)

    def pushes(self, T: int) -> bool:
        """See Products."""
        return T > gemm_sm90.P_ROWS

    def push(self, dev: Device, parts: Sequence[Buffer], x: Tokens, w: Linear) -> None:
        """See Products."""
        self.gemm.push(dev, parts, x, w)

    def room(self, a: Buffer) -> Tokens:
        """See Products."""
        if self.codes is None or self.scale is None:
            return Tokens(a)
        return Tokens(self.codes.view(a.shape), self.scale.view((a.shape[0],)))

    def norm(self, dev: Device, x: Tokens, h: Buffer, g: Buffer, eps: float) -> None:
        """See Products."""
        if x.scale is None:
            rmsnorm_bf16(dev, x.values, h, g, eps, pdl=self.gemm.pdl)
        else:
            rmsnorm_e4m3(dev, x.values, x.scale, h, g, eps, pdl=self.gemm.pdl)

    def quantise(self, dev: Device, x: Tokens, a: Buffer) -> None:
        """See Products."""
        if x.scale is not None:
            quantize_tokens(dev, x.values, x.scale, a, pdl=self.gemm.pdl)

    def blocks(self, dev: Device, a: Buffer, w: Linear) -> Tokens | None:
        """See Products."""
        T, K = a.shape
        if self.codes is None or T < BLOCKS_FROM:
            return None
        exponents = a.view((T * K * 2,), 0, U8).view((T, exponent_row(K)), T * K)
        return Tokens(a.view((T, K), 0, E4M3), exponents=exponents)

    def qkv(
        self,
        dev: Device,
        q: Buffer,
        k_cache: Buffer,
        v_cache: Buffer,
        x: Tokens,
        w: Linear,
        bias: Buffer,
        rope: Buffer,
        span: Buffer,
        fine: Buffer | None = None,
    ) -> None:
        """See Products."""
        self.gemm.qkv(dev, q, k_cache, v_cache, x, w, bias, rope, span, fine=fine)

    def swiglu(self, dev: Device, act: Buffer, x: Tokens, gate: Linear, up: Linear) -> None:
        """See Products."""
        self.gemm.swiglu(dev, act, x, gate, up)

    def add(self, dev: Device, h: Buffer, x: Tokens, w: Linear) -> None:
        """See Products."""
        self.gemm.add(dev, h, x, w)

    def store(self, dev: Device, y: Buffer, x: Tokens, w: Linear) -> None:
        """See Products."""
        self.gemm.store(dev, y, x, w)


def suits_sm90(arch: str, c: ModelConfig) -> bool:
    """Whether a rank of these dimensions runs Hopper's kernels on this architecture."""
    whole = all(n % 8 == 0 and n <= MOST for n in (c.D, c.I, c.H * c.HD))
    return arch == gemm_sm90.ARCH and c.D >= SHORT and whole and c.HD in (64, 128)


def create(dev: Device, c: ModelConfig, rows: int, *, fp8: bool, pdl: bool) -> Products:
    """What multiplies chunks of up to `rows` rows on this device. `pdl`: dependent launches."""
    if not suits_sm90(dev.arch, c):
        return MmaProducts(GEMM_FP8 if fp8 else GEMM_BF16)
    if not fp8:
        return Sm90Products(gemm_bf16_sm90.create(dev, pdl=pdl), None, None)
    widest = max(c.D, c.I, c.H * c.HD)
    return Sm90Products(gemm_fp8_sm90.create(dev, pdl=pdl), dev.empty((rows * widest,), E4M3), dev.empty((rows,), F32))
