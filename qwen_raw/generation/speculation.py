"""What a speculative generation is asked for, and what came of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from qwen_raw.checks import integer
from qwen_raw.errors import UsageError

MOST_GUESSES = 15  # a pass verifies one row more
DEFAULT_GUESSES = 4


@dataclass(frozen=True, slots=True)
class Speculation:
    """Guess ids, then verify them all in one pass: by a draft model, or by what followed the same ids before.

    Raises UsageError for what makes no sense.
    """

    draft: str | os.PathLike[str] | None = None  # a model, as `qwen_raw.load` takes it
    ngram: int | None = None  # look up runs of up to so many ids in the text so far
    guesses: int = DEFAULT_GUESSES  # a pass

    def __post_init__(self) -> None:
        if (self.draft is None) == (self.ngram is None):
            raise UsageError("speculation takes a draft model or n-grams, one of the two")
        if self.draft is not None and not isinstance(self.draft, str | os.PathLike):
            raise UsageError(f"draft is {self.draft!r}, expected a model as load takes it")
        object.__setattr__(self, "ngram", None if self.ngram is None else integer("ngram", self.ngram))
        object.__setattr__(self, "guesses", integer("guesses", self.guesses))
        if self.ngram is not None and self.ngram < 1:
            raise UsageError(f"n-grams of {self.ngram} ids: at least 1")
        if not 1 <= self.guesses <= MOST_GUESSES:
            raise UsageError(f"{self.guesses} guesses a pass: 1 to {MOST_GUESSES} are possible")


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Of one generation, or since the runner was made."""

    passes: int
    guesses: int
    right: int

    def since(self, before: PassCounts) -> PassCounts:
        """What was counted after `before`."""
        return PassCounts(self.passes - before.passes, self.guesses - before.guesses, self.right - before.right)

    @property
    def acceptance(self) -> float | None:
        """Share of the guesses that were right and whose predecessors were: of all that were made."""
        return self.right / self.guesses if self.guesses else None

    @property
    def mean_length(self) -> float | None:
        """Ids that a pass gave, its own one included."""
        return 1 + self.right / self.passes if self.passes else None

    def line(self) -> str:
        """ "63 % of 40 guesses right, 3.5 ids a pass"."""
        if self.acceptance is None or self.mean_length is None:
            return "no guesses"
        return f"{self.acceptance:.0%} of {self.guesses} guesses right, {self.mean_length:.2f} ids a pass"

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return {
            "passes": self.passes,
            "guesses": self.guesses,
            "right": self.right,
            "acceptance": self.acceptance,
            "mean_length": self.mean_length,
        }
