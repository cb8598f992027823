"""Perplexity of a text: how surprised a model is by each next token, and what a rounding of its weights changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_raw.errors import UsageError

Logits = Callable[[Sequence[int]], npt.NDArray[np.float32]]  # ids [T] → logits [T, V] after each


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Over `tokens` predicted tokens; `nll`: the mean of -ln p, nats a token."""

    tokens: int
    nll: float

    @property
    def value(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll)


def negative_log_likelihood(logits: npt.NDArray[np.float32], targets: Sequence[int]) -> npt.NDArray[np.float64]:
    """-ln softmax(logits)[target], in float64: logits [T, V], targets [T] → [T] nats."""
    wide: npt.NDArray[np.float64] = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    total: npt.NDArray[Any] = np.log(np.exp(wide).sum(axis=1))
    picked: npt.NDArray[np.float64] = total - wide[np.arange(len(targets)), np.asarray(targets)]
    return picked


def perplexity(logits: Logits, ids: Sequence[int], window: int = 512) -> Perplexity:
    """Of ids[1:], in windows of `window` tokens that do not overlap; each starts from an empty context.

    Every token but the first is predicted once, the first of a window from the last token of the window before.
    Raises UsageError for fewer than two ids.
    """
    if len(ids) < 2 or window < 1:
        raise UsageError(f"perplexity of {len(ids)} tokens in windows of {window}: it takes two tokens, windows of one")
    total = 0.0
    for start in range(0, len(ids) - 1, window):
        part = list(ids[start : start + window + 1])
        total += float(negative_log_likelihood(logits(part[:-1]), part[1:]).sum())
    return Perplexity(len(ids) - 1, total / (len(ids) - 1))
