"""The two hand-overs as commands, on simulated devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(bench: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"bench.{bench}", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("bench", ["pipeline", "kv_transfer"])
def test_simulated_devices_give_the_ids_of_one(bench: str, tmp_path: Path) -> None:
    done = run(bench, "--sim", "2", "--prompt", "5", "--tokens", "3", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny-shakespeare-draft ") and done.stdout.endswith(" 3 ids equal\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pipeline", "--sim", "1"], "one device: there are at least two stages"),
        (["pipeline", "--sim", "3", "--prompt", "4", "--tokens", "3"], "3 stages of 2 layers"),
        (["kv_transfer", "--sim", "3"], "3 devices: one computes prompts"),
        (["kv_transfer", "--sim", "2", "--prompt", "4000"], "has 2048 positions, 4256 were asked for"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    done = run(*words, "--output", str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1
