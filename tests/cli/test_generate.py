"""`qwen-raw generate`: where things are printed, where the prompt comes from, which values are in effect."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qwen_raw
from loaders.resolve import builtin_path
from qwen_raw import SamplingParams
from qwen_raw.cli import status

CPU = ("--device", "cpu")


def printed(text: str) -> str:
    """How stdout shows it: what comes next begins a line."""
    return text if text.endswith("\n") or not text else f"{text}\n"


@pytest.fixture(scope="module")
def text() -> str:
    """What the built-in model says after "ROMEO:" in 12 tokens."""
    with qwen_raw.load(device="cpu") as engine:
        return engine.generate("ROMEO:", SamplingParams(max_tokens=12)).text


def test_text_alone_on_stdout(cli: Callable[..., Any], text: str) -> None:
    ran = cli("generate", "-p", "ROMEO:", "-n", "12", *CPU)
    assert (ran.code, ran.out) == (0, printed(text))
    lines = ran.err.splitlines()
    assert all(line.startswith("# ") for line in lines)
    assert "greedy, at most 12 new" in lines[-2]
    for part in ("TTFT", "ms", "tok/s (11 after the first in", "GB/s of weights", "host syncs 0", "logits ", "length"):
        assert part in lines[-1]
    assert "ceiling" not in lines[-1]  # nobody measured this machine's


@pytest.mark.parametrize(
    "spelling",
    [
        ["ROMEO:"],
        ["--prompt=ROMEO:"],
        ["-p", "ROMEO:", "--max_model_len", "1k", "--tensor_parallel_size=1"],
        ["-p", "ROMEO:", "-c", "1K", "--model", "tiny-shakespeare"],
        ["-p", "ROMEO:", "--ctx_size", "1024", "--no-chat", "--dtype", "auto", "--temperature", "0"],
    ],
)
def test_spellings(cli: Callable[..., Any], text: str, spelling: list[str]) -> None:
    assert cli("generate", *spelling, "-n", "12", *CPU, "-q").out == printed(text)


@pytest.mark.parametrize("arguments", [["-"], ["-p", "-"], ["-f", "-"]])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_prompt_from_stdin(
    cli: Callable[..., Any], text: str, arguments: list[str], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"ROMEO:{end}".encode())))
    assert cli("generate", *arguments, "-n", "12", *CPU).out == printed(text)


def test_prompt_from_a_file(cli: Callable[..., Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("ROMEO:\n", encoding="utf-8")
    assert cli("generate", "-f", str(tmp_path / "prompt.txt"), "-n", "12", *CPU).out == printed(text)


def test_underscores_in_values_stay(cli: Callable[..., Any]) -> None:
    ran = cli("generate", "-p", "a", "--stop=--max_tokens", "--json", "-n", "1", *CPU)
    assert json.loads(ran.out)["sampling"]["stop"] == ["--max_tokens"]


def test_json_report(cli: Callable[..., Any], text: str) -> None:
    ran = cli("generate", "-p", "ROMEO:", "-n", "12", "--json", *CPU)
    report = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    assert report["text"] == text and len(report["token_ids"]) == report["completion_tokens"] == 12
    assert report["model"] == "tiny-shakespeare" and report["dtype"] == "bf16" and report["quant"] is None
    assert (report["tp"], report["device"], report["finish_reason"], report["seed"]) == (1, "cpu", "length", None)
    assert report["prompt_tokens"] == 5
    for seconds in ("load_s", "prompt_s", "decode_s"):
        assert 0 < report[seconds] < 60
    assert report["decode_tps"] == pytest.approx(11 / report["decode_s"])
    assert report["prompt_tps"] == pytest.approx(5 / report["prompt_s"])
    assert report["peak_bytes"] == [pytest.approx(23.4e6, rel=0.05)]
    assert {"device_name", "driver", "logits_hash", "sampling"} <= report.keys()


def test_temperature_and_seed(cli: Callable[..., Any]) -> None:
    arguments = ("generate", "-p", "KING", "-n", "10", "--temp", "1.0", "--json", *CPU)
    one, two, other = (json.loads(cli(*arguments, "--seed", seed).out) for seed in ("7", "7", "8"))
    assert one["text"] == two["text"] and one["logits_hash"] == two["logits_hash"]
    assert one["text"] != other["text"]
    fresh = cli(*arguments)
    seed = json.loads(fresh.out)["seed"]
    assert f"temperature 1, seed {seed}, at most 10 new" in fresh.err
    assert json.loads(cli(*arguments, "--seed", str(seed)).out)["text"] == json.loads(fresh.out)["text"]


def test_a_seed_without_draws_is_named(cli: Callable[..., Any]) -> None:
    arguments = ("generate", "-p", "KING", "-n", "2", "--seed", "7", *CPU)
    assert "note: greedy draws nothing, so seed 7 has no effect" in cli(*arguments).err
    assert "has no effect" not in cli(*arguments, "--temp", "1").err


def test_stop_strings(cli: Callable[..., Any], text: str) -> None:
    middle = text[len(text) // 2 :][:3]
    ran = cli("generate", "-p", "ROMEO:", "-n", "12", "--stop", "no such text", "--stop", middle, *CPU)
    assert ran.out == printed(text[: text.index(middle)])
    assert ran.err.rstrip().endswith("stop")


def test_no_limit_fills_the_context(cli: Callable[..., Any]) -> None:
    ran = cli("generate", "-p", "ROMEO:", "-n", "-1", "-c", "32", "--ignore-eos", "--json", *CPU)
    report = json.loads(ran.out)
    assert report["prompt_tokens"] + report["completion_tokens"] == 32
    assert report["finish_reason"] == "length"


def test_a_full_context_is_explained(cli: Callable[..., Any]) -> None:
    ran = cli("generate", "-p", "ROMEO:", "-c", "5", *CPU)
    assert (ran.code, ran.out) == (0, "")
    assert "the prompt fills the context of 5" in ran.err


def test_how_much_is_said(cli: Callable[..., Any]) -> None:
    arguments = ("generate", "-p", "a", "-n", "2", *CPU)
    assert cli(*arguments, "--quiet").err == ""
    stats = cli(*arguments, "--quiet", "--stats").err
    assert stats.count("\n") == 1 and "TTFT" in stats
    normal, verbose = cli(*arguments).err, cli(*arguments, "--verbose").err
    assert verbose.count("\n") > normal.count("\n")
    assert "EOS ids [4093, 4095]" in verbose


def test_sampling_defaults_that_are_not_followed_are_named(cli: Callable[..., Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(builtin_path("tiny-shakespeare-draft"), tmp_path / "model"))
    said = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(said), encoding="utf-8")
    ran = cli("generate", "-m", str(folder), "-p", "a", "-n", "2", *CPU)
    assert "temperature 0.7, seed" in ran.err
    assert "asks for top_k 20, top_p 0.8, repetition_penalty 1.1, which this version does not apply" in ran.err


def test_chat(cli: Callable[..., Any]) -> None:
    ran = cli("generate", "-p", "Who's there?", "--chat", "--system", "Answer.", "-n", "4", *CPU)
    assert ran.code == 0
    assert "in the chat template" in ran.err


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="needs a C++17 compiler")
def test_simulated_kernels_say_the_same(cli: Callable[..., Any]) -> None:
    arguments = ("generate", "-m", "tiny-shakespeare-draft", "-p", "ROMEO:", "-n", "3", "-c", "32")
    simulated = cli(*arguments, "--device", "sim")
    assert simulated.code == 0, simulated.err
    assert simulated.out == cli(*arguments, "--device", "cpu").out
    assert "simulated on the CPU: this is slow" in simulated.err


def test_no_progress_bar_where_nobody_looks(cli: Callable[..., Any]) -> None:
    with status.Status().loading() as progress:
        assert progress is None
    assert "\x1b" not in cli("generate", "-p", "a", "-n", "1", *CPU).err


def test_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with status.Status().loading() as progress:
        assert progress is not None
        progress("reading", 1, 2)
        progress("reading", 2, 2)
    captured = capsys.readouterr()
    assert "reading" in captured.err and captured.out == ""
    with status.Status(quiet=True).loading() as progress:
        assert progress is None


def test_help_and_version(cli: Callable[..., Any]) -> None:
    alone = cli()
    assert alone.code == 0 and "generate" in alone.out and "devices" in alone.out
    assert cli("--help").out == alone.out
    assert cli("--version").out == f"qwen-raw {qwen_raw.__version__}\n"
    helped = cli("generate", "--help")
    assert helped.code == 0 and "--max-tokens" in helped.out and helped.err == ""


def test_devices(cli: Callable[..., Any]) -> None:
    ran = cli("devices")
    assert ran.code == 0 and ran.err == ""
    assert [line.split()[0] for line in ran.out.splitlines()][-2:] == ["cpu", "sim"] and "cuda" in ran.out
    report = json.loads(cli("devices", "--json").out)
    assert report["cpu"]["cores"] >= 1
    assert (report["cublaslt"]["version"] is None) == (report["cublaslt"]["problem"] is not None)
    assert bool(report["gpus"]) == (report["no_gpu_because"] is None)
    assert (report["sim"]["compiler"] is None) == (report["sim"]["problem"] is not None)


def test_devices_say_why_nothing_can_be_simulated(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "sim     none: the simulator needs a C++17 compiler; tried no-such-compiler" in cli("devices").out


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="needs a C++17 compiler")
def test_ranks_generate_what_one_does(cli: Callable[..., Any]) -> None:
    """The whole way through, on simulated ranks; the report says how many."""
    arguments = ["generate", "-p", "First", "-n", "3", "--device", "sim", "-c", "32", "--json"]
    one, two = (json.loads(cli(*arguments, *more).out) for more in ([], ["--tp", "2", "--comm", "lamport"]))
    assert two["token_ids"] == one["token_ids"] and (one["tp"], two["tp"]) == (1, 2)
    assert two["device_name"] == "SIMT simulator, 2 ranks"


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="needs a C++17 compiler")
def test_a_rank_that_stalls_is_one_line(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are never launched: the other one gives up, and says for whom it waited."""
    monkeypatch.setattr("qwen_raw.model.runner.Step.launch", lambda step: step.graphs[0].launch())
    ran = cli("generate", "-p", "First", "-n", "3", "--device", "sim", "--tp", "2", "-c", "32", "--quiet")
    assert ran.code == 1 and ran.err.count("\n") == 1
    assert ran.err.startswith("qwen-raw: rank 0 waited 10000 ms for rank 1 in call "), ran.err


GUESSED = (["--ngram", "2", "--tp", "2"], ["--draft", "tiny-shakespeare-draft", "--guesses", "2"])


@pytest.mark.parametrize("way", GUESSED)
def test_speculation_changes_no_id_and_is_told(cli: Callable[..., Any], way: list[str]) -> None:
    request = ("generate", "-p", "ROMEO:", "-n", "5", "--device", "sim", "-c", "32", "--json")
    plain, guessed = (json.loads(cli(*request, *more).out) for more in ([], way))
    assert guessed["token_ids"] == plain["token_ids"]
    assert plain["speculation"] is None
    said = guessed["speculation"]
    assert said["right"] + said["passes"] == 4
    assert "guesses right" in cli(*request[:-1], *way).err
