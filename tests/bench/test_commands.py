"""The benches as commands: what they say where they cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bench", ["decode", "gemv", "stages"])
def test_a_gpu_that_is_not_there_is_one_line(bench: str) -> None:
    """CUDA_VISIBLE_DEVICES hides every GPU, on a machine that has some too."""
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{bench}"],
        cwd=ROOT,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("bench: no ") and done.stderr.count("\n") == 1
