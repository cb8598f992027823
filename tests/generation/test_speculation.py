"""What speculation may be asked for, how it is counted, and when it pauses."""

import numpy as np
import pytest

from qwen_raw.errors import UsageError
from qwen_raw.generation.speculation import (
    HOPE,
    PAUSE,
    Governor,
    PassCounts,
    Speculation,
    expected_ids,
    pass_sizes,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of the two"),
        ({"draft": "a", "ngram": 2}, "one of the two"),
        ({"ngram": 0}, "n-grams of 0 ids"),
        ({"ngram": 10**30}, "1 to 1000 are possible"),
        ({"ngram": 2, "guesses": 0}, "0 guesses a pass"),
        ({"ngram": 2, "guesses": 16}, "16 guesses a pass"),
        ({"ngram": 2, "draft_device": 1}, "draft_device is a draft model's: there is none"),
        ({"draft": "a", "draft_device": "1"}, "draft_device is '1' .str., expected an integer"),
        ({"ngram": 2, "loop": "host"}, "loop 'host' is not one of queued, device"),
        ({"draft": "a", "draft_device": 1, "loop": "device"}, "no draft model on another"),
        ({"draft": "a", "draft_device": -1}, "draft_device is -1, expected a GPU's number"),
        ({"ngram": 2, "verify": "steps"}, "verify 'steps' is not one of auto, rows, exact"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Speculation(**options)  # type: ignore[arg-type]


def test_counts() -> None:
    counts = PassCounts(30, 80, 40, 10, 55, 40.0).since(PassCounts(5, 0, 0, 5, 5, 7.5))
    assert counts == PassCounts(25, 80, 40, 5, 50, 32.5)
    assert (counts.acceptance, counts.mean_length, counts.speed_up) == (0.8, 3.0, 2.0)
    told = "50% of 80 guesses right, acceptance 0.80, 3.00 ids a pass, off for 5 ids, 2.00 times plain steps"
    assert counts.line() == told
    looped = PassCounts(30, 80, 40, 0, 55, None, 5).since(PassCounts(5, 0, 0, 0, 5, None, 3))
    assert looped.line().endswith("ids a pass, in 2 loops on the device") and looped.as_dict()["loops"] == 2
    assert PassCounts(3, 0, 0, 3).line() == "no guesses"
    exact = PassCounts(30, 80, 40, 0, 55, verify="exact").since(PassCounts(5, 0, 0, 0, verify="exact"))
    assert exact.line().endswith("ids a pass, verified bit for bit") and exact.as_dict()["verify"] == "exact"
    assert "verified by rows" in PassCounts(5, 9, 3, 0, 5, verify="rows").line()
    assert counts.as_dict()["acceptance"] == 0.8 and counts.as_dict()["speed_up"] == 2.0
    assert PassCounts(3, 6, 2, 0, 4).since(PassCounts(0, 0, 0, 0)).speed_up is None


def test_sizes_of_passes() -> None:
    assert [pass_sizes(k) for k in (1, 3, 4, 7, 15)] == [(1,), (1, 3), (1, 3, 4), (1, 3, 7), (1, 3, 7, 15)]


def chosen(governor: Governor, acceptance: float, count: int, seed: int = 0) -> list[int]:
    """What it says of `count` passes, each guess right with this probability; counts are a pass old."""
    rng, counts, said = np.random.default_rng(seed), [(0, 0)] * 2, []
    for _ in range(count):
        k = governor.choose(*counts[-2], 1000)
        said.append(k)
        draws = (rng.random(k) < acceptance).tolist()
        right = draws.index(False) if False in draws else k
        counts.append((counts[-1][0] + right, counts[-1][1] + min(right + 1, k)))
    return said


# Of 72B in fp8 with a draft of 0.5B: a pass of 7 guesses costs 1.57 steps.
COSTS = {0: 1.0, 1: 1.24, 3: 1.34, 7: 1.57}


def test_as_many_guesses_as_pay() -> None:
    for acceptance, share in ((1.0, 0.99), (0.8, 0.94), (0.5, 0.9), (0.3, 0.9), (0.1, 0.98)):
        said = chosen(Governor(COSTS, 7), acceptance, 3000)
        costs = sum(COSTS[k] for k in said)
        ids = sum(expected_ids(acceptance, k) for k in said)
        most = max(expected_ids(acceptance, k) / cost for k, cost in COSTS.items())
        assert ids / costs > share * max(most, 1.0), acceptance
    assert chosen(Governor(None, 5), 0.0, 100) == [5] * 100


@pytest.mark.parametrize("ids", [128, 1000])
def test_guessing_that_does_not_pay_costs_little(ids: int) -> None:
    """At no acceptance at all: within 3 %, tries after pauses included."""
    said = chosen(Governor(COSTS, 7), 0.0, ids)
    assert sum(COSTS[k] for k in said) < 1.03 * ids
    pauses = [len(run) for run in "".join("x" if k else "." for k in said).split("x") if run]
    assert pauses[: len(pauses) - 1] == [PAUSE * 2**i for i in range(len(pauses) - 1)]
    assert said[0] == 7 and said.count(0) < ids


def test_a_pass_has_no_more_guesses_than_ids_are_left() -> None:
    governor = Governor(COSTS, 7)
    assert [governor.choose(0, 0, room) for room in (9, 7, 6, 3, 2, 1, 0, 9)] == [7, 7, 3, 3, 1, 1, 0, 7]


def test_a_request_begins_with_what_the_last_one_saw_but_not_paused() -> None:
    governor = Governor(COSTS, 7)
    assert chosen(governor, 0.0, 20)[-1] == 0
    governor.begin(100, 200)  # counts go on
    assert governor.choose(100, 200, 50) == 7
    assert governor.choose(100, 230, 50) == 0
    governor = Governor(COSTS, 7)
    governor.choose(10, 30, 50)
    seen = governor.acceptance
    governor.begin(10, 30)
    assert governor.acceptance == seen < HOPE
