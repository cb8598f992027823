"""Sampling parameters, and the host's choice of the next id: the definition that the GPU's sampler must equal.

Greedy: the lowest id among the maxima. Temperature: Gumbel-max, argmax(logit / temperature + noise), where the noise of
an id depends only on (seed, id, position). So a draw needs no state, no sum over the vocabulary and no second pass, and
it is the same however many GPUs share the LM head. The random bits are Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_raw.checks import flag, integer, number, text
from qwen_raw.errors import QwenRawError, UsageError

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]

PHILOX_ROUNDS = 10
PHILOX_M = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))  # multipliers of words 0 and 2
PHILOX_W = (0x9E3779B9, 0xBB67AE85)  # what each key word grows by per round
COLDEST, HOTTEST = 1e-4, 1e6  # temperatures at which logits in fp32 still mean something


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises UsageError for values that make no sense."""

    max_tokens: int | None = 128  # None: until EOS or the end of the context
    temperature: float = 0.0  # 0: greedy
    seed: int | None = None  # None: a fresh one for every generation, reported in its stats
    stop: tuple[str, ...] = ()  # text that ends the generation and is not part of it
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, or None for no limit, not {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature must be a number of at least 0, not {self.temperature}")
        if 0 < self.temperature < COLDEST:
            raise UsageError(
                f"temperature {self.temperature:g} is too close to 0: use 0 (greedy) or at least {COLDEST:g}"
            )
        if self.temperature > HOTTEST:
            raise UsageError(f"temperature {self.temperature:g} is too high: use at most {HOTTEST:g}")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise UsageError(f"seed must be from 0 to 2**64 - 1, not {self.seed}")
        if "" in self.stop:
            raise UsageError("a stop string is empty: it would end every generation before its first character")

    def _check_types(self) -> None:
        """Refuse what is of a wrong type; NumPy's scalars become Python's, any sequence of stop strings a tuple."""
        if isinstance(self.stop, str):
            raise UsageError("stop is a sequence of strings: write stop=[text], not stop=text")
        if not isinstance(self.stop, Iterable):
            raise UsageError(f"stop is {self.stop!r}, expected a sequence of strings; () for none")
        values = {
            "max_tokens": None if self.max_tokens is None else integer("max_tokens", self.max_tokens),
            "temperature": number("temperature", self.temperature),
            "seed": None if self.seed is None else integer("seed", self.seed),
            "stop": tuple(text("a stop string", stop) for stop in self.stop),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def philox4x32(counter: tuple[U32, U32, U32, U32], key: tuple[int, int]) -> tuple[U32, U32, U32, U32]:
    """Philox4x32-10: four random words per counter. Arrays of uint32 of one shape; the key is two 32-bit integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        p0, p2 = PHILOX_M[0] * c0.astype(np.uint64), PHILOX_M[1] * c2.astype(np.uint64)
        hi0, lo0 = (p0 >> np.uint64(32)).astype(np.uint32), p0.astype(np.uint32)
        hi2, lo2 = (p2 >> np.uint64(32)).astype(np.uint32), p2.astype(np.uint32)
        c0, c1, c2, c3 = hi2 ^ c1 ^ np.uint32(k0), lo2, hi0 ^ c3 ^ np.uint32(k1), lo0
        k0, k1 = (k0 + PHILOX_W[0]) & 0xFFFFFFFF, (k1 + PHILOX_W[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel_noise(vocab: int, position: int, seed: int) -> F32:
    """Standard Gumbel noise [vocab] float32 for the token at index `position` of the sequence.

    r = first word of Philox(counter = (id, position, 0, 0), key = (low, high word of seed));
    u = (r >> 9 + 0.5) * 2**-23, exact in fp32 and never 0 or 1; noise = -log(-log(u)) in fp32.
    """
    ids = np.arange(vocab, dtype=np.uint32)
    zero = np.zeros_like(ids)
    r = philox4x32((ids, np.full_like(ids, position), zero, zero), (seed & 0xFFFFFFFF, seed >> 32))[0]
    u: F32 = ((r >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    noise: F32 = -np.log(-np.log(u))
    return noise


def check_finite(logits: npt.NDArray[Any], position: int) -> None:
    """Raise QwenRawError, saying where, if any of the logits [n] that choose the token at `position` is not finite."""
    bad = np.flatnonzero(~np.isfinite(logits))
    if bad.size:
        first = int(bad[0])
        raise QwenRawError(
            f"{bad.size} of {logits.size} logits for position {position} are not finite (id {first}: {logits[first]}): "
            "the weights are damaged or the arithmetic overflowed"
        )


def choose(logits: F32, *, position: int, temperature: float, seed: int, text_vocab: int) -> int:
    """The id of the token at index `position` of the sequence, from one row of logits [V] float32.

    Ids >= text_vocab are padding and never chosen. Raises QwenRawError if a logit that counts is not finite.
    """
    row = logits[:text_vocab]
    check_finite(row, position)
    if temperature > 0:
        row = row / np.float32(temperature) + gumbel_noise(row.size, position, seed)
    return int(np.argmax(row))  # the first of equals
