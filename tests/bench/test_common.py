"""bench.common: clock work, on a made-up clock, and what a result depends on."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import common, perplexity


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


def test_an_environment_names_what_computed() -> None:
    gpu: Any = SimpleNamespace(name="NVIDIA H200", driver="580.1")
    with_gpu, without = common.environment(gpu, "abc"), common.environment(None, None)
    assert (with_gpu["gpu"], with_gpu["driver"], with_gpu["commit"]) == ("NVIDIA H200", "580.1", "abc")
    assert without["cpu"] and "gpu" not in without and without["packages"].keys() == with_gpu["packages"].keys()


def test_perplexity_is_written_with_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--device=cpu", "--model=tiny-shakespeare-draft", "--tokens=5", "--commit=abc", f"--output={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["perplexity", *words])
    assert perplexity.main() == 0
    found = json.loads((tmp_path / "perplexity.json").read_text())
    assert found["environment"].keys() >= {"cpu", "cores", "python", "packages", "commit", "time", "text"}
    assert [row["kv"] for row in found["rows"]] == ["bf16", "bf16", "fp8", "fp8"]
