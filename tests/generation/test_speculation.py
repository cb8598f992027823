"""What speculation may be asked for, how it is counted, and when it pauses."""

import pytest

from qwen_raw.errors import UsageError
from qwen_raw.generation.speculation import WINDOW, Governor, PassCounts, Speculation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of the two"),
        ({"draft": "a", "ngram": 2}, "one of the two"),
        ({"ngram": 0}, "n-grams of 0 ids"),
        ({"ngram": 10**30}, "1 to 1000 are possible"),
        ({"ngram": 2, "guesses": 0}, "0 guesses a pass"),
        ({"ngram": 2, "guesses": 16}, "16 guesses a pass"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Speculation(**options)  # type: ignore[arg-type]


def test_counts() -> None:
    counts = PassCounts(30, 80, 40, 10).since(PassCounts(5, 0, 0, 5))
    assert counts == PassCounts(25, 80, 40, 5)
    assert (counts.acceptance, counts.mean_length) == (0.5, 3.0)
    assert counts.line() == "50% of 80 guesses right, 3.00 ids a pass, off for 5 ids"
    assert PassCounts(3, 0, 0, 3).line() == "no guesses"
    assert counts.as_dict()["acceptance"] == 0.5


def passes_of(governor: Governor, count: int, right_a_pass: int) -> list[bool]:
    """What it says of `count` passes of which each that guesses gets so many right."""
    said, passes, right = [], 0, 0
    for _ in range(count):
        said.append(governor.guess(passes, right))
        passes += said[-1]
        right += said[-1] * right_a_pass
    return said


def test_guessing_that_pays_goes_on() -> None:
    assert all(passes_of(Governor(2.0, 10), 100, right_a_pass=1))
    assert all(passes_of(Governor(None, None), 100, right_a_pass=0))


def test_guessing_that_does_not_pay_pauses() -> None:
    said = passes_of(Governor(1.5, 10), 3 * (WINDOW + 10), right_a_pass=0)
    assert said == 3 * ([True] * WINDOW + [False] * 10)
    assert passes_of(Governor(1.5, None), 100, right_a_pass=0) == [True] * WINDOW + [False] * (100 - WINDOW)
