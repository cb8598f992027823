"""Stop strings: whatever pieces the text comes in, exactly the text before the first one is shown."""

import random

import pytest

from qwen_raw.generation.stop import StopStrings


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    stop = StopStrings(stops)
    shown = "".join(stop.feed(piece) for piece in pieces)
    return shown + stop.flush(), stop.stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "want", "stopped"),
    [
        (["there"], ["re", "he"], "t", True),  # the first in the text, not in the list
        (["th", "e", "re"], ["re", "he"], "t", True),
        (["a<", "|en", "d|>b"], ["<|end|>"], "a", True),  # over three pieces
        (["Hello"], ["Hel"], "", True),  # a beginning of the answer
        (["Hel"], ["Hello"], "Hel", False),  # held back, then flushed
        (["xab"], ["abcd", "b"], "xa", True),  # "abcd" might have come, and did not
        (["xab", "cd"], ["abcd", "b"], "x", True),  # it did
        (["aaab"], ["aab"], "a", True),  # overlaps with its own beginning
        (["abc", "def"], [], "abcdef", False),
        (["", "ab", ""], ["c"], "ab", False),
    ],
)
def test_cases(pieces: list[str], stops: list[str], want: str, stopped: bool) -> None:
    assert run(pieces, stops) == (want, stopped)


def test_any_split_gives_the_text_before_the_first_stop() -> None:
    rng = random.Random(11)
    for _ in range(3000):
        text = "".join(rng.choices("ab\n", k=rng.randrange(0, 14)))
        stops = ["".join(rng.choices("ab\n", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(4)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        starts = [text.find(stop) for stop in stops if stop in text]
        want = text[: min(starts)] if starts else text
        assert run(pieces, stops) == (want, bool(starts)), (pieces, stops)


def test_nothing_of_a_stop_string_is_ever_shown() -> None:
    """At every moment, what has been shown is a beginning of the final text."""
    rng = random.Random(12)
    for _ in range(500):
        text = "".join(rng.choices("ab", k=12))
        stop = StopStrings(["aba", "bbb"])
        final, shown = run(list(text), ["aba", "bbb"])[0], ""
        for char in text:
            shown += stop.feed(char)
            assert final.startswith(shown)


def test_no_more_than_needed_is_held_back() -> None:
    stop = StopStrings(["\n\nUser:"])
    assert stop.feed("words, and a newline\n") == "words, and a newline"
    assert stop.feed("\nUs") == ""
    assert stop.feed("ually") == "\n\nUsually"


def test_text_after_a_stop_is_ignored() -> None:
    stop = StopStrings(["x"])
    assert stop.feed("1x2") == "1"
    assert stop.feed("3") == ""
    assert stop.flush() == ""
    assert stop.stopped
