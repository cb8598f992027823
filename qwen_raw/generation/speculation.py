"""What a speculative generation is asked for, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_raw.checks import integer
from qwen_raw.errors import UsageError

MOST_GUESSES = 15  # a pass verifies one row more
DEFAULT_GUESSES = 7
HOPE, WEIGHT = 0.8, 2.0  # the acceptance before any guess has been compared, and for how many compared that counts
FADE = 0.97  # of what has been seen, with each guess compared since
PAUSE, LONGEST = 128, 1024  # steps until guessing is tried again, twice as many each time that it lost at once
SURE = 32  # guesses compared since a pause after which the next one is short again
VERIFY = ("auto", "rows", "exact")  # how a pass is verified: docs/speculation.md
LOOPS = ("queued", "device")  # passes are queued by the host, or repeat themselves on the device where that is possible
MOST_NGRAM = 1000  # ids of a run that is looked up


@dataclass(frozen=True, slots=True)
class Speculation:
    """Guess ids, then verify them all in one pass: by a draft model, or by what followed the same ids before.

    Raises UsageError for what makes no sense.
    """

    draft: str | os.PathLike[str] | None = None  # a model, as `qwen_raw.load` takes it
    ngram: int | None = None  # look up runs of up to so many ids in the text so far
    guesses: int = DEFAULT_GUESSES  # a pass has at the most
    draft_device: int | None = None  # the GPU of the draft model, on a stream of its own; None: in rank 0's stream
    loop: str = "queued"  # how passes follow each other, one of LOOPS
    verify: str = "auto"  # one of VERIFY: "exact" gives the bits of single steps, "rows" is faster for large models

    def __post_init__(self) -> None:
        if (self.draft is None) == (self.ngram is None):
            raise UsageError("speculation takes a draft model or n-grams, one of the two")
        if self.draft is not None and not isinstance(self.draft, str | os.PathLike):
            raise UsageError(f"draft is {self.draft!r}, expected a model as load takes it")
        object.__setattr__(self, "ngram", None if self.ngram is None else integer("ngram", self.ngram))
        object.__setattr__(self, "guesses", integer("guesses", self.guesses))
        if self.draft_device is not None:
            if self.draft is None:
                raise UsageError("draft_device is a draft model's: there is none")
            object.__setattr__(self, "draft_device", integer("draft_device", self.draft_device))
            if self.draft_device < 0:
                raise UsageError(f"draft_device is {self.draft_device}, expected a GPU's number")
            if self.loop != "queued":
                raise UsageError(
                    "a loop on one device has no draft model on another: use --spec-loop queued, or no --draft-device"
                )
        if self.ngram is not None and not 1 <= self.ngram <= MOST_NGRAM:
            raise UsageError(f"n-grams of {self.ngram} ids: 1 to {MOST_NGRAM} are possible")
        if self.loop not in LOOPS:
            raise UsageError(f"loop {self.loop!r} is not one of {', '.join(LOOPS)}")
        if self.verify not in VERIFY:
            raise UsageError(f"verify {self.verify!r} is not one of {', '.join(VERIFY)}")
        if not 1 <= self.guesses <= MOST_GUESSES:
            raise UsageError(f"{self.guesses} guesses a pass: 1 to {MOST_GUESSES} are possible")


def pass_sizes(most: int) -> tuple[int, ...]:
    """How many guesses a pass may have, ascending: with the last id they fill what the products take at once."""
    return (*(k for k in (1, 3, 7) if k < most), most)


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Of one generation, or since the runner was made."""

    passes: int  # that gave ids, those without guesses among them
    guesses: int
    right: int
    steps: int  # passes that did not guess, because guessing did not pay
    compared: int = 0  # guesses whose predecessors were all right
    cost: float | None = None  # of all passes, in single steps; None where nobody measured it
    loops: int = 0  # launches of passes that repeat themselves on the device; 0: the host queued each
    verify: str = ""  # how passes were verified: "exact", "rows" or "chunk"; "": nobody said

    def since(self, before: PassCounts) -> PassCounts:
        """What was counted after `before`."""
        return PassCounts(
            self.passes - before.passes,
            self.guesses - before.guesses,
            self.right - before.right,
            self.steps - before.steps,
            self.compared - before.compared,
            None if self.cost is None or before.cost is None else self.cost - before.cost,
            self.loops - before.loops,
            self.verify,
        )

    @property
    def acceptance(self) -> float | None:
        """Share that was right, of the guesses whose predecessors were."""
        return self.right / self.compared if self.compared else None

    @property
    def mean_length(self) -> float | None:
        """Ids that a pass which guessed gave, its own one included."""
        guessed = self.passes - self.steps
        return 1 + self.right / guessed if guessed else None

    @property
    def speed_up(self) -> float | None:
        """How many steps the ids would have taken, over what the passes cost in steps."""
        return (self.passes + self.right) / self.cost if self.cost else None

    def line(self) -> str:
        """ "63% of 40 guesses right, acceptance 0.80, 3.50 ids a pass, off for 64 ids, 1.90 times plain steps"."""
        if self.acceptance is None or self.mean_length is None:
            return "no guesses"
        parts = [
            f"{self.right / self.guesses:.0%} of {self.guesses} guesses right",
            f"acceptance {self.acceptance:.2f}",
            f"{self.mean_length:.2f} ids a pass",
        ]
        if self.verify:
            parts.append("verified bit for bit" if self.verify == "exact" else f"verified by {self.verify}")
        if self.steps:
            parts.append(f"off for {self.steps} ids")
        if self.loops:
            parts.append(f"in {self.loops} loop{'s' if self.loops > 1 else ''} on the device")
        if self.speed_up is not None:
            parts.append(f"{self.speed_up:.2f} times plain steps")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return {
            "passes": self.passes,
            "guesses": self.guesses,
            "compared": self.compared,
            "right": self.right,
            "steps": self.steps,
            "acceptance": self.acceptance,
            "mean_length": self.mean_length,
            "speed_up": self.speed_up,
            "loops": self.loops,
            "verify": self.verify,
        }


def expected_ids(acceptance: float, guesses: int) -> float:
    """That a pass gives, its own one included, if each guess is right with this probability: 1 + a + … + a^guesses."""
    return sum(acceptance**i for i in range(guesses + 1))


class Governor:
    """How many guesses the next pass has: as many as give the most ids for their cost; none while plain steps do.

    It goes by counts that the host reads anyway, one pass old or two. Requests follow each other: what was seen in one
    is what the next begins with, but for a pause.
    """

    def __init__(self, costs: Mapping[int, float] | None, most: int) -> None:
        """`costs`: of a pass in single steps, by its guesses. None: always `most` guesses."""
        self._costs, self._most = costs, most
        self._seen = (0, 0)
        self._paused, self._pause, self._since = 0, PAUSE, 0
        self._hope()

    def _hope(self) -> None:
        self._right, self._compared, self._since = HOPE * WEIGHT, WEIGHT, 0

    @property
    def acceptance(self) -> float:
        """As estimated now."""
        return self._right / self._compared

    @property
    def paused(self) -> bool:
        """Whether the next pass has no guesses, whatever is seen meanwhile."""
        return self._paused > 0

    @property
    def hopeless(self) -> bool:
        """Whether nothing seen so far lets the next pass guess."""
        return self._costs is not None and (self._paused > 0 or max(self._gains().values()) <= 1)

    def _gains(self) -> dict[int, float]:
        assert self._costs is not None
        return {k: expected_ids(self.acceptance, k) / cost for k, cost in self._costs.items() if k}

    def begin(self, right: int, compared: int) -> None:
        """A request begins; guesses right and compared so far."""
        self._seen = (right, compared)
        if self._paused:
            self._paused = 0
            self._hope()

    def choose(self, right: int, compared: int, room: int) -> int:
        """Guesses of the next pass, of which `room` at the most can be of use."""
        if self._costs is None:
            return self._most
        self._learn(right - self._seen[0], compared - self._seen[1])
        self._seen = (right, compared)
        if self._paused:
            self._paused -= 1
            if not self._paused:
                self._hope()
            return 0
        gains = self._gains()
        if max(gains.values()) <= 1:
            self._paused = self._pause - 1
            self._pause = min(2 * self._pause, LONGEST)
            return 0
        useful = {k: gain for k, gain in gains.items() if k <= room and gain > 1}
        return max(useful, key=lambda k: useful[k], default=0)

    def _learn(self, right: int, compared: int) -> None:
        kept = FADE**compared
        self._right, self._compared = self._right * kept + right, self._compared * kept + compared
        self._since += compared
        if self._since >= SURE:
            self._pause = PAUSE
