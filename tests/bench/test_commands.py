"""The benches as commands: what they say where they cannot run."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from bench.common import RESULTS, recorded, result_arguments
from qwen_raw.cli.arguments import Parser
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import UsageError

ROOT = Path(__file__).parents[2]
COMMANDS = [path.stem for path in sorted((ROOT / "bench").glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("bench", COMMANDS)
def test_a_wrong_request_is_one_line(bench: str) -> None:
    """argparse alone would print its usage first: `Parser` of qwen_raw.cli.arguments does not."""
    source = (ROOT / "bench" / f"{bench}.py").read_text()
    assert f'Parser("python -m bench.{bench}"' in source and "ArgumentParser" not in source
    assert re.search(r"^    command\(main\)$", source, re.MULTILINE)


WRONG = [
    ("torture", "--seeds 0", "argument --seeds: 0 is less than 1"),
    ("decode", "--output README.md", "argument --output: 'README.md': README.md is not a folder"),
    ("torture", "--output README.md/x", "argument --output: 'README.md/x': README.md is not a folder"),
    ("decode", "--tokens -1", "argument --tokens: -1 is less than 1"),
    ("decode", "--model no/such", "model 'no/such' is not a folder"),
    ("decode", "--model random:7b:fp4", "model 'random:7b:fp4' ends in 'fp4', expected bf16, fp8 or a seed"),
    ("decode", "--model random:7b --tp 3", "tp 3 does not fit random:7b's"),
    ("decode", "--model random:7b --context 33k", "33920 positions are more than the 32768 of random:7b"),
    ("decode", "--comm smoke", "argument --comm: invalid choice: 'smoke'"),
    ("decode", "--tp 2 --devices 0", "tp 2 with 1 devices"),
    ("prefill", "--prompt 0", "argument --prompt: 0 is less than 1"),
    ("prefill", "--model random:9b", "random:9b"),
    ("prefill", "--comm smoke", "argument --comm: invalid choice"),
    ("prefill", "--gemm fast", "argument --gemm: invalid choice"),
    ("prefill_stages", "--comm host", "argument --comm: invalid choice"),
    ("prefill_stages", "--model random:7b --tp 3", "tp 3 does not fit random:7b's"),
    ("gemm_choice", "--tp 3", "tp 3 does not fit random:7b's"),
    ("gemm", "--tp 3", "tp 3 does not fit random:7b's"),
    ("gemv", "--tp x", "argument --tp: 'x' is not a whole number"),
    ("gemv", "--tp 8", "tp 8 does not fit random:7b's"),
    ("gemv_rows", "--rows 17", "argument --rows: invalid choice: 17"),
    ("gemv_rows", "--tp 5", "tp 5 does not fit random:7b's"),
    ("attn_decode", "--cluster 3", "argument --cluster: invalid choice: 3"),
    ("attn_decode", "--keys 100", "argument --keys: 100 keys: a power of two, at least 128"),
    ("attn_prefill", "--heads 28/3/128", "argument --heads: '28/3/128': query heads, a divisor"),
    ("allreduce", "--devices 0,x", "argument --devices: '0,x' is not a list of GPU numbers"),
    ("allreduce", "--devices 0", "1 devices: 2 to 8 ranks sum"),
    ("allreduce", "--bytes 1000", "argument --bytes: 1000 bytes are not whole packs of 16"),
    ("allreduce_rows", "--devices 0", "1 devices: 2 to 8 ranks sum"),
    ("allreduce_rows", "--hidden 100", "argument --hidden: 100 is not a multiple of 16, up to 8192"),
    ("signal", "--devices 0,0,0", "3 devices: a channel has two ends"),
    ("signal", "--bytes 20", "argument --bytes: 20 bytes are not whole packs of 16"),
    ("pipeline", "--devices 0", "1 device: there are 2 to 8 stages, as in --devices 0,0"),
    ("pipeline", "--tokens 2", "2 tokens: at least 3 are timed"),
    ("kv_transfer", "--devices 0,0,0", "3 devices: one computes prompts, the other decodes"),
    ("kv_transfer", "--model tiny-shakespeare --prompt 2000", "2256 positions are more than the"),
    ("scaling", "--tp 2", "random:7b:bf16 splits into [2] of --tp: one degree alone does not say what stays"),
    ("scaling", "--reduce-us nan", "argument --reduce-us: 'nan' is not a number of at least 0"),
    ("soak", "--slower -1", "argument --slower: '-1' is not a number of at least 0"),
    ("soak", "--tp 3", "tp 3 does not fit small's"),
    ("soak", "--model tiny-shakespeare --tokens 2k", "2248 positions are more than the"),
    ("skew", "--model random:7b --tp 3", "tp 3 does not fit random:7b's"),
    ("skew", "--model no/such", "model 'no/such' is not a folder"),
    ("speculate", "--acceptance 2", "argument --acceptance: "),
    ("speculate", "--guesses 16", "16 guesses a pass: 1 to 15 are possible"),
    ("speculate", "--draft tiny", "model 'tiny' is not a folder"),
    ("stages", "--context 40k", "positions are more than the"),
    ("startup", "--model random", "random"),
    ("perplexity", "--tokens 1", "argument --tokens: 1 is less than 2"),
]


@pytest.mark.parametrize(("bench", "words", "message"), WRONG, ids=lambda value: value)
def test_a_wrong_value_is_said_before_a_gpu_is_looked_for(
    bench: str, words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(self: CudaDevice, *_: object) -> NoReturn:
        raise AssertionError("a GPU was looked for")

    monkeypatch.setattr(CudaDevice, "__init__", look)
    monkeypatch.setattr(sys, "argv", [bench, *words.split()])
    with pytest.raises(UsageError) as caught:
        importlib.import_module(f"bench.{bench}").main()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("bench", "words"), [("torture", "--seeds 0"), ("decode", "--tokens -1")])
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
