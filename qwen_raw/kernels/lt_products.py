"""Prefill's products by cuBLASLt where it is chosen: its product, and a small kernel behind it for what ours fuse.

Which of the two computes a product is said by a table of measured times (gemm_winners.json, made by
`python -m bench.gemm_choice`), by shape and tokens; a shape that it lacks is ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_raw.config import ModelConfig
from qwen_raw.device import BF16, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.cublaslt import CublasLt, Shape
from qwen_raw.kernels.gemm_sm90 import Tokens
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.qkv_finish import qkv_finish
from qwen_raw.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from qwen_raw.kernels.products import Products, Sm90Products

MARGIN = 0.97  # of our time: where cuBLASLt takes more, it is not worth loading
TABLE = Path(__file__).with_name("gemm_winners.json")
Takes = Callable[[str, int, int, int], bool]  # (operation, T, N, K): whether cuBLASLt computes it


@cache
def table() -> dict[str, Any]:
    """What was measured: {"environment", "rows": [{dtype, op, N, K, tokens, own_us, cublaslt_us}, …]}."""
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


def by_table(fp8: bool) -> Takes:
    """cuBLASLt where the measured times nearest to T say that it is faster."""
    times: dict[tuple[str, int, int], list[tuple[int, bool]]] = {}
    for row in table()["rows"]:
        if row["dtype"] == ("fp8" if fp8 else "bf16"):
            faster = row["cublaslt_us"] is not None and row["cublaslt_us"] < MARGIN * row["own_us"]
            times.setdefault((row["op"], row["N"], row["K"]), []).append((row["tokens"], faster))

    def takes(op: str, T: int, N: int, K: int) -> bool:
        measured = times.get((op, N, K))
        return measured is not None and min(measured, key=lambda m: abs(math.log(m[0] / T)))[1]

    return takes


def always(op: str, T: int, N: int, K: int) -> bool:
    """cuBLASLt everywhere."""
    return True


def shapes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """(N, K) of a rank's products; N counts gate's and up's rows. O and down are both "add" or "store"."""
    heads = (c.H + 2 * c.KV) * c.HD
    return {"qkv": (heads, c.D), "swiglu": (2 * c.I, c.D), "o": (c.D, c.H * c.HD), "down": (c.D, c.I)}


def chosen(takes: Takes, c: ModelConfig, rows: int) -> dict[str, tuple[int, int]]:
    """Of `shapes`, those of which cuBLASLt computes some number of tokens up to `rows`."""
    tokens = [1 << i for i in range(rows.bit_length())]

    def any_of(name: str, N: int, K: int) -> bool:
        ops = (name,) if name in ("qkv", "swiglu") else ("add", "store")
        return any(takes(op, T, N, K) for op in ops for T in tokens)

    return {name: shape for name, shape in shapes(c).items() if any_of(name, *shape)}


@dataclass(frozen=True, slots=True)
class LtProducts:
    """cuBLASLt where `takes` says so and it has an algorithm, which it must if `strict`; else `own`."""

    own: Sm90Products
    lt: CublasLt
    takes: Takes
    wide: Buffer  # bf16: what a kernel behind a product reads
    strict: bool = True

    @staticmethod
    def create(
        dev: Device, own: Sm90Products, lt: CublasLt, takes: Takes, c: ModelConfig, rows: int, *, strict: bool
    ) -> LtProducts:
        """For up to `rows` rows of a rank."""
        behind = [N for name, (N, _) in chosen(takes, c, rows).items() if name in ("qkv", "swiglu")]
        return LtProducts(own, lt, takes, dev.empty((rows * max(behind, default=0) or 1,), BF16), strict)

    def _theirs(self, op: str, x: Tokens, w: Linear, parts: int = 1) -> bool:
        """Whether cuBLASLt computes this; `parts`: products of w's shape."""
        T = x.values.shape[0]
        if not self.takes(op, T, parts * w.N, w.K):
            return False
        return self.strict or self.lt.has(Shape(w.scale is not None, op == "add", T, w.N, w.K))

    @property
    def normed(self) -> str:
        """See Products."""
        return self.own.normed

    def pushes(self, T: int) -> bool:
        """See Products: what cuBLASLt stores lies in one place."""
        return not self.strict and self.own.pushes(T)

    def push(self, dev: Device, parts: Sequence[Buffer], x: Tokens, w: Linear) -> None:
        """See Products."""
        self.own.push(dev, parts, x, w)

    def unquantised(self) -> Products:
        """See Products."""
        return self if self.own.codes is None else self.own.unquantised()

    def room(self, a: Buffer) -> Tokens:
        """See Products."""
        return self.own.room(a)

    def norm(self, dev: Device, x: Tokens, h: Buffer, g: Buffer, eps: float) -> None:
        """See Products."""
        self.own.norm(dev, x, h, g, eps)

    def quantise(self, dev: Device, x: Tokens, a: Buffer) -> None:
        """See Products."""
        self.own.quantise(dev, x, a)

    def blocks(self, dev: Device, a: Buffer, w: Linear) -> Tokens | None:
        """See Products: cuBLASLt takes none."""
        return None if self._theirs("add", Tokens(a), w) else self.own.blocks(dev, a, w)

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
        T = x.values.shape[0]
        if not self._theirs("qkv", x, w):
            return self.own.qkv(dev, q, k_cache, v_cache, x, w, bias, rope, span, fine)
        y = self.wide.view((T, w.N))
        self.lt.store(y, x, w)
        qkv_finish(dev, q, k_cache, v_cache, y, bias, rope, span, fine)

    def swiglu(self, dev: Device, act: Buffer, x: Tokens, gate: Linear, up: Linear) -> None:
        """See Products."""
        T = x.values.shape[0]
        if not self._theirs("swiglu", x, gate, 2):
            return self.own.swiglu(dev, act, x, gate, up)
        require((gate.N, gate.K) == (up.N, up.K), f"gate is {gate.weight.shape}, up is {up.weight.shape}")
        halves = [self.wide.view((T, gate.N), part * T * gate.N) for part in range(2)]
        for half, w in zip(halves, (gate, up), strict=True):
            self.lt.store(half, x, w)
        swiglu(dev, act, *halves)

    def add(self, dev: Device, h: Buffer, x: Tokens, w: Linear) -> None:
        """See Products."""
        if not self._theirs("add", x, w):
            return self.own.add(dev, h, x, w)
        self.lt.add(h, x, w)

    def store(self, dev: Device, y: Buffer, x: Tokens, w: Linear) -> None:
        """See Products."""
        if not self._theirs("store", x, w):
            return self.own.store(dev, y, x, w)
        self.lt.store(y, x, w)
