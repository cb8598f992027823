"""The two hand-overs as commands, on simulated devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench import kv_transfer, pipeline
from qwen_raw.errors import UsageError


@pytest.mark.parametrize("bench", [pipeline, kv_transfer])
def test_simulated_devices_give_the_ids_of_one(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sim", "2", "--prompt", "5", "--tokens", "3", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    assert bench.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("tiny-shakespeare-draft ") and printed.endswith(" 3 ids equal\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("bench", "words", "message"),
    [
        (pipeline, ["--sim", "1"], "1 device: there are 2 to 8 stages"),
        (pipeline, ["--sim", "3", "--prompt", "4", "--tokens", "3"], "3 stages of 2 layers"),
        (kv_transfer, ["--sim", "3"], "3 devices: one computes prompts"),
        (
            kv_transfer,
            ["--sim", "2", "--prompt", "4000"],
            "4256 positions are more than the 2048 of tiny-shakespeare-draft",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    bench: Any, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *words, "--output", str(tmp_path)])
    with pytest.raises(UsageError, match=message):
        bench.main()
