"""How the row-parallel products, O and down, reach the residual stream: the one place in a layer where ranks meet.

A decode or prefill step calls `product`, then `reduce`, and goes on with h. At one rank the product is added where it
is made. At several, each leaves its share, and an all-reduce adds the shares of all to every rank's h: the same bits
everywhere, because it sums in rank order. Or there is no all-reduce: the product pushes its rows to all ranks and the
next product begins with their sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qwen_raw.comm.reduce import Reducer
from qwen_raw.device import Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.exchange import Exchange, PeerSum
from qwen_raw.kernels.gemv import Gemv
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.products import RowProducts

INLINE = "inline"  # what is asked for beside the paths of qwen_raw/comm/reduce.py


class Residual(Protocol):
    """What follows a row-parallel product, for one rank."""

    def begin(self, *, whole: bool) -> None:
        """One token: a step begins with h in memory. `whole`: no product and no sum of it will be left out."""

    def stream(self, h: Buffer) -> Buffer | PeerSum:
        """One token: where the next product finds h f32 [D]."""

    def product(self, gemv: Gemv, h: Buffer, x: Buffer, w: Linear, *, pdl: bool) -> None:
        """One token: queue this rank's W·x, x bf16 [K], on its way to h f32 [D]."""

    def products(self, gemm: RowProducts, h: Buffer, a: Buffer, w: Linear, spare: Buffer) -> None:
        """T tokens: queue this rank's A·Wᵀ, A bf16 [T, K], on its way to h f32 [T, D]; `spare`: bf16 [T, D]."""

    def reduce(self, h: Buffer, *, pdl: bool = False, spare: Buffer | None = None) -> None:
        """Queue whatever is still missing until h is complete; `spare` as given to `products`."""

    @property
    def capturable(self) -> bool:
        """Whether a graph can hold a step; else it must be queued anew each time."""

    def fault(self) -> str | None:
        """After a launch has failed: which rank this one waited for in vain, if it did."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank: the product is the whole, and its kernel adds it."""

    device: Device
    capturable = True

    def begin(self, *, whole: bool) -> None:
        """h is always in memory."""

    def stream(self, h: Buffer) -> Buffer | PeerSum:
        """See Residual."""
        return h

    def product(self, gemv: Gemv, h: Buffer, x: Buffer, w: Linear, *, pdl: bool) -> None:
        """See Residual."""
        gemv.add(self.device, h, x, w, pdl=pdl)

    def products(self, gemm: RowProducts, h: Buffer, a: Buffer, w: Linear, spare: Buffer) -> None:
        """See Residual."""
        gemm.add(self.device, h, a, w)

    def reduce(self, h: Buffer, *, pdl: bool = False, spare: Buffer | None = None) -> None:
        """Nothing is missing."""

    def fault(self) -> str | None:
        """There is nobody to wait for."""
        return None


@dataclass(frozen=True, slots=True)
class Summed:
    """Several ranks: shares in bf16, then an all-reduce."""

    device: Device
    share: Buffer  # bf16 [D], of one token
    small: Reducer  # of one token
    large: Reducer  # of a chunk of the prompt

    def begin(self, *, whole: bool) -> None:
        """h is always in memory."""

    def stream(self, h: Buffer) -> Buffer | PeerSum:
        """See Residual."""
        return h

    def product(self, gemv: Gemv, h: Buffer, x: Buffer, w: Linear, *, pdl: bool) -> None:
        """See Residual."""
        gemv.store(self.device, self.share, x, w, pdl=pdl)

    def products(self, gemm: RowProducts, h: Buffer, a: Buffer, w: Linear, spare: Buffer) -> None:
        """See Residual."""
        gemm.store(self.device, spare, a, w)

    def reduce(self, h: Buffer, *, pdl: bool = False, spare: Buffer | None = None) -> None:
        """See Residual."""
        if spare is None:
            self.small.add(h, self.share, pdl=pdl)
        else:
            n = (spare.shape[0] * spare.shape[1],)
            self.large.add(h.view(n), spare.view(n))

    @property
    def capturable(self) -> bool:
        """See Residual."""
        return self.small.path != "host"

    def fault(self) -> str | None:
        """See Residual."""
        return self.small.fault() or self.large.fault()


class Inline:
    """Several ranks, no all-reduce kernel: O and down push fp32 rows to all ranks, the next product sums them.

    A chunk of the prompt, and a step that is not whole (of a bench, or of which only keys and values are wanted), go
    the other way, `summed`: what was pushed must be taken.
    """

    def __init__(self, end: Exchange, summed: Summed) -> None:
        self._end = end
        self._summed = summed
        self._whole = False
        self._sum: PeerSum | None = None  # the last one pushed into, of the step that is being queued

    def begin(self, *, whole: bool) -> None:
        """See Residual."""
        self._whole, self._sum = whole, None

    def stream(self, h: Buffer) -> Buffer | PeerSum:
        """See Residual."""
        return self._sum or h

    def product(self, gemv: Gemv, h: Buffer, x: Buffer, w: Linear, *, pdl: bool) -> None:
        """See Residual."""
        if not self._whole:
            self._summed.product(gemv, h, x, w, pdl=pdl)
            return
        require(h.ptr == self._end.first.ptr, "a step's residual stream is where the ranks' sums go")
        half = 1 if self._sum is None else 1 - self._sum.half  # 1 after O, 0 after down
        self._sum = PeerSum(self._end, half, first=self._sum is None)
        gemv.push(self._end.dev, self._sum, x, w, pdl=pdl)

    def products(self, gemm: RowProducts, h: Buffer, a: Buffer, w: Linear, spare: Buffer) -> None:
        """See Residual."""
        self._summed.products(gemm, h, a, w, spare)

    def reduce(self, h: Buffer, *, pdl: bool = False, spare: Buffer | None = None) -> None:
        """See Residual: of a whole step nothing is missing but what the next product does."""
        if spare is not None or not self._whole:
            self._summed.reduce(h, pdl=pdl, spare=spare)

    @property
    def capturable(self) -> bool:
        """See Residual."""
        return True

    def fault(self) -> str | None:
        """See Residual."""
        return self._end.limit.fault() or self._summed.fault()
