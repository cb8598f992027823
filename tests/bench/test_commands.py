"""The benches as commands: what they say where they cannot run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.common import RESULTS, recorded, result_arguments
from qwen_raw.cli.arguments import Parser

ROOT = Path(__file__).parents[2]
COMMANDS = [path.stem for path in sorted((ROOT / "bench").glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("bench", COMMANDS)
def test_a_wrong_request_is_one_line(bench: str) -> None:
    """argparse alone would print its usage first: `Parser` of qwen_raw.cli.arguments does not."""
    source = (ROOT / "bench" / f"{bench}.py").read_text()
    assert f'Parser("python -m bench.{bench}"' in source and "ArgumentParser" not in source
    assert re.search(r"^    command\(main\)$", source, re.MULTILINE)


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        ("torture", "--seeds 0"),
        ("decode", "--tokens -1"),
        ("gemv", "--tp x"),
        ("allreduce", "--devices 0,x"),
        ("prefill", "--prompt 0"),
        ("speculate", "--acceptance 2"),
    ],
)
def test_a_wrong_value_is_one_line(bench: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{bench}", *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"bench: argument {words.split()[0]}: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("bench", ["allreduce", "attn_decode", "decode", "gemv", "prefill", "stages"])
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
    assert "--device cpu" not in done.stderr  # which is the engine's, no bench has it


def test_results_name_no_folder_of_one_machine() -> None:
    assert recorded(["--tp", "2", "--output", "/a/b", "--tokens", "4"]) == ["--tp", "2", "--tokens", "4"]
    assert recorded(["--output=/a/b", "--no-peers"]) == ["--no-peers"]
    assert recorded(["--tp", "2", "--output"]) == ["--tp", "2"]


def test_a_run_that_does_not_say_where_leaves_the_committed_results_alone() -> None:
    parser = Parser("bench")
    result_arguments(parser, "x.json")
    folder = parser.parse_args([]).output
    assert not (Path.cwd() / folder).resolve().is_relative_to(RESULTS)
    assert parser.parse_args(["--output", str(RESULTS)]).output == RESULTS
