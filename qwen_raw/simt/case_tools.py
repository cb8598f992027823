"""What the torture cases share: payloads, poisoned outputs between guard bands, ranks that start together or late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders.dtypes import bf16_to_f32, f32_to_bf16
from qwen_raw.device import BF16, Buffer
from qwen_raw.errors import QwenRawError
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

Array = np.ndarray[Any, Any]
GUARD, POISON = 8, 0xEE  # elements between outputs, and what every byte is before
# Words that a careless protocol would take for its sentinel, and ones that are nearly it.
TRAPS = (0x80000000, 0x80010000, 0x00008000, 0x80008000, 0x80000001, 0x8000007F, 0x00000000)


class Mismatch(QwenRawError):
    """A value that came out wrong, from kernel launch `launch` of `rank` (counted from 0)."""

    def __init__(self, message: str, rank: int, launch: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.launch = launch


@dataclass(frozen=True, slots=True)
class Case:
    """`run(world, rng)` raises Mismatch or SimError if the protocol failed under the world's schedule."""

    name: str
    run: Callable[[SimWorld, np.random.Generator], None]
    least_ranks: int
    what: str


def payload(rng: np.random.Generator, packs: int) -> Array:
    """bf16 [8·packs]: numbers between -4 and 4, a sixth of the words traps."""
    values = f32_to_bf16(rng.uniform(-4, 4, 8 * packs).astype(np.float32))
    words = values.view(np.uint32)
    chosen = rng.random(words.size) < 1 / 6
    words[chosen] = rng.choice(np.array(TRAPS, np.uint32), int(chosen.sum()))
    return values


def rank_order_sum(parts: Sequence[Array]) -> Array:
    """fp32 sums in rank order, from +0, as every all-reduce adds."""
    total = np.zeros(parts[0].size, np.float32)
    for part in parts:
        total += bf16_to_f32(part)
    return total


class Outputs:
    """Poisoned room for the results of some launches of one rank; guard bands before, between and after them."""

    def __init__(self, device: SimDevice, sizes: Sequence[int], dtype: np.dtype[Any] = BF16) -> None:
        ends = np.cumsum(np.array(sizes) + GUARD)
        self._rank = device.rank
        self._slices = [slice(int(end) - n, int(end)) for end, n in zip(ends, sizes, strict=True)]
        self._whole = device.empty((int(ends[-1]) + GUARD,), dtype)
        self._whole.fill(POISON)

    def view(self, number: int) -> Buffer:
        """Where launch `number` puts its result."""
        at = self._slices[number]
        return self._whole.view((at.stop - at.start,), at.start)

    def results(self) -> list[Array]:
        """What is in the places now."""
        whole = self._whole.download()
        return [whole[at] for at in self._slices]

    def check(self, wants: Sequence[Array], what: str, launches: Sequence[int]) -> None:
        """The results are `wants`, bit by bit, and the guard bands as they were.

        `launches`: which of the rank's kernel launches each result is from. Raises Mismatch for the first wrong one.
        """
        whole = self._whole.download()
        got = whole.view(f"u{whole.itemsize}")
        expected = np.full(whole.nbytes, POISON, np.uint8).view(got.dtype)
        for at, want in zip(self._slices, wants, strict=True):
            expected[at] = want.view(got.dtype)
        wrong = got != expected
        if not wrong.any():
            return
        for number, at in enumerate(self._slices):
            if wrong[at].any():
                i = at.start + int(np.flatnonzero(wrong[at])[0])
                raise Mismatch(
                    f"rank {self._rank}, {what} {number}: element {i - at.start} is {got[i]:#x}, "
                    f"expected {expected[i]:#x} ({wrong[at].sum()} wrong)",
                    self._rank,
                    launches[number],
                )
        raise Mismatch(f"rank {self._rank}, {what}s: a guard band was overwritten", self._rank, launches[-1])


def start(world: SimWorld, rng: np.random.Generator, queue: Callable[[int], None]) -> None:
    """queue(rank) for all ranks at once; half of the time for one of them only when the others have come to wait."""
    late = int(rng.integers(2 * world.ranks))
    for ranks in ([r for r in range(world.ranks) if r != late], [late] if late < world.ranks else []):
        with world.together():
            for rank in ranks:
                queue(rank)
    world.run()


def require_equal(got: Array, want: Array, what: str, rank: int, launch: int) -> None:
    wrong = np.flatnonzero(got.view(f"u{got.itemsize}") != want.view(f"u{want.itemsize}"))
    if wrong.size:
        i = int(wrong[0])
        message = f"rank {rank}, {what}: element {i} is {got[i]}, expected {want[i]} ({wrong.size} wrong)"
        raise Mismatch(message, rank, launch)
