"""How the row-parallel products, O and down, reach the residual stream: the one place in a layer where ranks meet.

A decode or prefill step calls `product`, then `reduce`, and goes on with h. At one rank the product is added where it
is made. At several, each leaves its share, and an all-reduce adds the shares of all to every rank's h: the same bits
everywhere, because it sums in rank order. Or there is no all-reduce: the products exchange their rows themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qwen_raw.comm.measure import INLINE
from qwen_raw.comm.reduce import Reducer
from qwen_raw.device import Buffer, Device
from qwen_raw.kernels.allreduce_rows import RowsWorkspace
from qwen_raw.kernels.gemm_sm90 import Tokens
from qwen_raw.kernels.gemv import Gemv
from qwen_raw.kernels.gemv_each import GemvEach
from qwen_raw.kernels.gemv_exchange import Exchange, GemvExchange, Next
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.products import RowProducts

AHEAD = 32 << 10  # bytes of each of the next product's blocks that are fetched into L2 while ranks wait for each other
SUMS = frozenset({"o", "down", "reduce"})  # stages of a step that belong together


class Residual(Protocol):
    """What follows a row-parallel product, for one rank."""

    @property
    def path(self) -> str:
        """How a token's shares are summed, as --comm names it; "" at one rank."""

    def of_step(self, skip: frozenset[str]) -> Residual:
        """What a step that leaves out the stages `skip` uses."""

    def product(self, gemv: Gemv, h: Buffer, x: Buffer, w: Linear, *, number: int, following: Next, pdl: bool) -> None:
        """One token: queue this rank's W·x, x bf16 [K], on its way to h f32 [D].

        `number`: 0, 1, 2, … in a step, even for O, odd for down; `following`: the next product.
        """

    def products(self, gemm: RowProducts, h: Buffer, x: Tokens, w: Linear, spare: Buffer) -> None:
        """T tokens: queue this rank's x·Wᵀ, x [T, K], on its way to h f32 [T, D]; `spare`: bf16 [T, D]."""

    def each(
        self, products: GemvEach, h: Buffer, x: Buffer, w: Linear, spare: Buffer, *, number: int, pdl: bool
    ) -> None:
        """A few tokens, each with the bits that `product` and `reduce` give it: h f32 [M, D] is complete then.

        x bf16 [M, K]; `spare`: bf16 [M, D]; `number`: of the sum in the pass, as `product` has it.
        """

    def reduce(self, h: Buffer, *, pdl: bool = False, spare: Buffer | None = None) -> None:
        """Queue whatever is still missing until h is complete; `spare` as given to `products`."""

    @property
    def rows(self) -> RowsWorkspace | None:
        """What sums a chunk of the prompt by rows and norms them; None: `reduce` sums it."""

    @property
    def adds(self) -> bool:
        """Whether `products` is `add`: what is behind it is complete."""

    @property
    def capturable(self) -> bool:
        """Whether a graph can hold a step; else it must be queued anew each time."""

    def fault(self) -> str | None:
        """After a launch has failed: which rank this one waited for in vain, if it did."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank: the product is the whole, and its kernel adds it."""

    device: Device
    rows = None
    path = ""
    adds = True
    capturable = True

    def of_step(self, skip: frozenset[str]) -> Residual:
        """See Residual."""
        return self

    def product(self, gemv: Gemv, h: Buffer, x: Buffer, w: Linear, *, number: int, following: Next, pdl: bool) -> None:
        """See Residual."""
        gemv.add(self.device, h, x, w, pdl=pdl)

    def products(self, gemm: RowProducts, h: Buffer, x: Tokens, w: Linear, spare: Buffer) -> None:
        """See Residual."""
        gemm.add(self.device, h, x, w)

    def each(
        self, products: GemvEach, h: Buffer, x: Buffer, w: Linear, spare: Buffer, *, number: int, pdl: bool
    ) -> None:
        """See Residual."""
        products.add(self.device, h, x, w, pdl=pdl)

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
    small: Reducer  # of one token, or a few that are verified together
    large: Reducer | None  # of a chunk of the prompt; None: `rows` sums it
    rows: RowsWorkspace | None = None
    few: int = 1  # tokens that the small one takes
    adds = False

    @property
    def path(self) -> str:
        """See Residual."""
        return self.small.path

    def of_step(self, skip: frozenset[str]) -> Residual:
        """See Residual."""
        return self

    def product(self, gemv: Gemv, h: Buffer, x: Buffer, w: Linear, *, number: int, following: Next, pdl: bool) -> None:
        """See Residual."""
        gemv.store(self.device, self.share, x, w, pdl=pdl)

    def products(self, gemm: RowProducts, h: Buffer, x: Tokens, w: Linear, spare: Buffer) -> None:
        """See Residual."""
        gemm.store(self.device, spare, x, w)

    def each(
        self, products: GemvEach, h: Buffer, x: Buffer, w: Linear, spare: Buffer, *, number: int, pdl: bool
    ) -> None:
        """See Residual: every path sums an element as it does in a message of another length."""
        products.store(self.device, spare, x, w, pdl=pdl)
        n = (h.shape[0] * h.shape[1],)
        self.small.add(h.view(n), spare.view(n), pdl=pdl)

    def reduce(self, h: Buffer, *, pdl: bool = False, spare: Buffer | None = None) -> None:
        """See Residual."""
        if spare is None:
            self.small.add(h, self.share, pdl=pdl)
        else:
            few, n = spare.shape[0] <= self.few, (spare.shape[0] * spare.shape[1],)
            (self.small if few or self.large is None else self.large).add(h.view(n), spare.view(n), pdl=pdl)

    @property
    def capturable(self) -> bool:
        """See Residual."""
        return self.small.path != "host"

    def fault(self) -> str | None:
        """See Residual."""
        chunks = self.large if self.rows is None else self.rows.limit
        return self.small.fault() or (chunks.fault() if chunks is not None else None)


@dataclass(frozen=True, slots=True)
class Inline:
    """Several ranks, no all-reduce of a token: O and down exchange their rows and add the sums (include/exchange.cuh).

    A chunk of the prompt goes the other way, `summed`, and so does a step that leaves some of it out: the exchange's
    sums must alternate.
    """

    end: Exchange
    few: Exchange  # of a few tokens
    kernels: GemvExchange
    summed: Summed
    path = INLINE
    adds = False
    capturable = True

    @property
    def rows(self) -> RowsWorkspace | None:
        """See Residual."""
        return self.summed.rows

    def of_step(self, skip: frozenset[str]) -> Residual:
        """See Residual."""
        return self.summed if skip & SUMS else self

    def product(self, gemv: Gemv, h: Buffer, x: Buffer, w: Linear, *, number: int, following: Next, pdl: bool) -> None:
        """See Residual."""
        self.kernels.add(self.end, number, h, x, w, ahead=following.struct(self.end.dev, AHEAD), pdl=pdl)

    def products(self, gemm: RowProducts, h: Buffer, x: Tokens, w: Linear, spare: Buffer) -> None:
        """See Residual."""
        self.summed.products(gemm, h, x, w, spare)

    def each(
        self, products: GemvEach, h: Buffer, x: Buffer, w: Linear, spare: Buffer, *, number: int, pdl: bool
    ) -> None:
        """See Residual."""
        products.exchange(self.few, number, h, x, w, pdl=pdl)

    def reduce(self, h: Buffer, *, pdl: bool = False, spare: Buffer | None = None) -> None:
        """See Residual: of a token nothing is missing."""
        if spare is not None:
            self.summed.reduce(h, pdl=pdl, spare=spare)

    def fault(self) -> str | None:
        """See Residual."""
        return self.end.limit.fault() or self.few.limit.fault() or self.summed.fault()
