"""bench.common's clock work, on a made-up clock."""

from collections.abc import Callable
from typing import Any

import pytest

from bench import common


def test_work_in_turns_after_a_moment_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs before the settling time is over is not reported; then each piece of work runs once a round."""
    done: list[str] = []
    clock = [0.0]

    def time_ms(devices: Any, work: Callable[[], None], *, repeats: int, warmup: int) -> common.Timing:
        work()
        clock[0] += 0.25
        return common.Timing((clock[0],))

    monkeypatch.setattr(common, "time_ms", time_ms)
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])
    dev: Any = None
    a, b = common.time_in_turns(dev, [lambda: done.append("a"), lambda: done.append("b")], repeats=2, settle_s=0.6)
    assert done == ["a", "b"] * 4  # two rounds until 0.6 s are over, two that count
    assert (a.samples, b.samples) == ((1.25, 1.75), (1.5, 2.0))
