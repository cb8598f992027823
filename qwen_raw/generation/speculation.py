"""What a speculative generation is asked for, and what came of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from qwen_raw.checks import integer
from qwen_raw.errors import UsageError

MOST_GUESSES = 15  # a pass verifies one row more
DEFAULT_GUESSES = 4
WINDOW = 8  # passes that are judged together
AGAIN = 64  # steps after which n-grams are tried again
MOST_NGRAM = 1000  # ids of a run that is looked up


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
        if self.ngram is not None and not 1 <= self.ngram <= MOST_NGRAM:
            raise UsageError(f"n-grams of {self.ngram} ids: 1 to {MOST_NGRAM} are possible")
        if not 1 <= self.guesses <= MOST_GUESSES:
            raise UsageError(f"{self.guesses} guesses a pass: 1 to {MOST_GUESSES} are possible")


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Of one generation, or since the runner was made."""

    passes: int  # those that guessed, and single steps
    guesses: int
    right: int
    steps: int  # passes that did not guess, because guessing did not pay

    def since(self, before: PassCounts) -> PassCounts:
        """What was counted after `before`."""
        return PassCounts(
            self.passes - before.passes,
            self.guesses - before.guesses,
            self.right - before.right,
            self.steps - before.steps,
        )

    @property
    def acceptance(self) -> float | None:
        """Share of the guesses that were right and whose predecessors were: of all that were made."""
        return self.right / self.guesses if self.guesses else None

    @property
    def mean_length(self) -> float | None:
        """Ids that a pass which guessed gave, its own one included."""
        guessed = self.passes - self.steps
        return 1 + self.right / guessed if guessed else None

    def line(self) -> str:
        """ "63 % of 40 guesses right, 3.50 ids a pass, off for 64 ids"."""
        if self.acceptance is None or self.mean_length is None:
            return "no guesses"
        off = f", off for {self.steps} ids" if self.steps else ""
        return f"{self.acceptance:.0%} of {self.guesses} guesses right, {self.mean_length:.2f} ids a pass{off}"

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return {
            "passes": self.passes,
            "guesses": self.guesses,
            "right": self.right,
            "steps": self.steps,
            "acceptance": self.acceptance,
            "mean_length": self.mean_length,
        }


class Governor:
    """Whether the next pass guesses. Off while passes give fewer ids than they cost in steps."""

    def __init__(self, cost: float | None, again: int | None) -> None:
        """`cost`: of a pass, in single steps; None: always guess. `again`: steps until it tries again; None: never."""
        self._cost, self._again = cost, again
        self._off = 0  # steps still to go; -1: for good
        self._from: tuple[int, int] | None = None  # (passes that guessed, guesses right) when the window began

    def guess(self, passes: int, right: int) -> bool:
        """For the next pass to queue. `passes`: those that have guessed so far; `right`: what they got right."""
        if self._cost is None:
            return True
        if self._off:
            self._off -= self._off > 0
            self._from = None
            return False
        if self._from is None:
            self._from = (passes, right)
        guessed, got = passes - self._from[0], right - self._from[1]
        if guessed < WINDOW:
            return True
        self._from = (passes, right)
        if 1 + got / guessed >= self._cost:
            return True
        self._off = -1 if self._again is None else self._again - 1
        return False
