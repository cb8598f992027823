"""Every wrong request: one line on stderr, nothing on stdout, the right exit code. Never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loaders.resolve import builtin_path
from qwen_raw.errors import QwenRawError

DRAFT = ["--draft", "tiny-shakespeare-draft"]

# arguments after `generate`, what the line must say
USAGE = [
    ([], "no prompt: give -p"),
    (["-p", ""], "the prompt is empty"),
    (["-p", "", "--chat"], "the prompt is empty"),
    (["-p", "a", "-f", "b"], "more than one prompt"),
    (["a", "-p", "b"], "more than one prompt"),
    (["-f", "missing.txt"], "cannot read the prompt file missing.txt: No such file"),
    (["-f", "."], "cannot read the prompt file .: Is a directory"),
    (["-p", "one two three four five six seven eight nine", "-c", "4"], "more than the 4 of max_model_len"),
    (["-p", "a", "-m", "no/such/folder"], "'no/such/folder' is not a folder"),
    (["-p", "a", "-m", "random:9b"], "random:9b"),
    (["-p", "a", "--tp", "3"], "tp 3 does not fit tiny-shakespeare's 4 query and 2 KV heads: use 1, 2 or 4"),
    (["-p", "a", "--tp", "2"], "tp 2 needs GPUs: the NumPy reference of device cpu is one rank"),
    (["-p", "a", "--devices", "0"], "--devices (devices=) names GPUs: it does not go with --device cpu"),
    (["-p", "a", "--devices", "0,1", "--tp", "4"], "tp 4 with 2 devices: name one GPU a rank"),
    (["-p", "a", "--devices", "0,,1"], "argument --devices: '0,,1' is not a list of GPU numbers such as 0,1"),
    (["-p", "a", "--comm", "smoke"], "invalid choice: 'smoke' (choose from "),
    (["-p", "a", "--gemm", "smoke"], "invalid choice: 'smoke' (choose from "),
    (["-p", "a", "--gemm", "cublaslt"], "gemm cublaslt needs a GPU"),
    (["-p", "a", "--gemm", "cublaslt", "--device", "sim"], "takes the place of Hopper's products only"),
    (["-p", "a", "--tp", "0"], "argument --tp/--tensor-parallel-size: 0 is less than 1"),
    (["-p", "a", "--dtype", "int3"], "invalid choice: 'int3' (choose from "),
    (["-p", "a", "--device", "tpu"], "invalid choice: 'tpu' (choose from "),
    (["-p", "a", "-c", "4k"], "max_model_len 4096 is not from 1 to 2048"),
    (["-p", "a", "-n", "0"], "argument -n/--max-tokens: at least 1, or -1 for as many as the context holds; not 0"),
    (["-p", "a", "-n", "-2"], "at least 1, or -1 for as many as the context holds; not -2"),
    (["-p", "a", "-n", "few"], "argument -n/--max-tokens: 'few' is not a whole number such as 4096 or 4k"),
    (["-p", "a", "--temp", "-1"], "temperature must be a number of at least 0"),
    (["-p", "a", "--temp", "nan"], "temperature must be a number of at least 0"),
    (["-p", "a", "--temp", "1e300"], "temperature 1e+300 is too high: use at most 1e+06"),
    (["-p", "a", "--temp", "hot"], "argument --temp/--temperature: invalid float value: 'hot'"),
    (["-p", "a", "--seed", "-1"], "seed must be from 0 to"),
    (["-p", "a", "--stop", ""], "a stop string is empty"),
    (["-p", "a", "--system", "b"], "--system needs --chat"),
    (["-p"], "argument -p/--prompt: expected one argument"),
    (["-p", "a", "--frobnicate"], "unrecognized arguments: --frobnicate (see qwen-raw generate --help)"),
    (["to", "be"], "unrecognized arguments: be; a prompt of several words needs quotes (see qwen-raw generate --help)"),
    (["-p", "a", "--quiet", "--verbose"], "not allowed with argument"),
    (["-p", "\udcff"], "argument -p/--prompt: the text is not UTF-8"),
    (["-p", "a", "--guesses", "3"], "--guesses needs --draft MODEL or --ngram N"),
    (["-p", "a", "--spec-loop", "device"], "--spec-loop needs --draft MODEL or --ngram N"),
    (["-p", "a", "--spec-verify", "exact"], "--spec-verify needs --draft MODEL or --ngram N"),
    (["-p", "a", "--ngram", "2", "--spec-verify", "steps"], "argument --spec-verify: invalid choice: 'steps'"),
    (["-p", "a", "--ngram", "2", "--spec-loop", "host"], "argument --spec-loop: invalid choice: 'host'"),
    (["-p", "a", "--ngram", "2", "--draft", "tiny-shakespeare-draft"], "not allowed with argument"),
    (["-p", "a", "--ngram", "2", "--guesses", "16"], "16 guesses a pass: 1 to 15 are possible"),
    (["-p", "a", "--ngram", "0"], "0 is less than 1"),
    (["-p", "a", "--ngram", "2147483648"], "n-grams of 2147483648 ids: 1 to 1000 are possible"),
    (["-p", "a", "--ngram", "2"], "speculation needs a GPU"),
    (["-p", "a", "--draft-device", "1"], "--draft-device needs --draft MODEL"),
    (["-p", "a", "--ngram", "2", "--draft-device", "1"], "--draft-device needs --draft MODEL"),
    (["-p", "a", *DRAFT, "--draft-device", "one"], "argument --draft-device: 'one' is not a GPU number such as 1"),
    (["-p", "a", *DRAFT, "--draft-device", "-1"], "argument --draft-device: '-1' is not a GPU number such as 1"),
    (
        ["-p", "a", *DRAFT, "--draft-device", "1"],
        "--draft-device (draft_device=) names a GPU: it does not go with --device cpu",
    ),
    (
        ["-p", "a", *DRAFT, "--draft-device", "0", "--device", "sim"],
        "draft device 0: beside 1 simulated rank it is 1: use 1",
    ),
    (["-p", "a", "--draft", "no/such"], "draft model 'no/such' is not a folder; expected a folder with config.json"),
    (["-p", "a", "--draft", "random:9b"], "draft model 'random:9b' is not random:SIZE"),
    (["-p", "a", "--ngram", "2", "--tp", "2", "--device", "sim", "--comm", "host"], "comm host cannot"),
    (
        ["-p", "a", "--draft", "random:0.5b", "--device", "sim"],
        "token 0 is '<0x00>' there and '!' in the model",
    ),
]


def one_line(text: str) -> bool:
    return text.startswith("qwen-raw: ") and text.endswith("\n") and text.count("\n") == 1


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=lambda value: " ".join(value)[:40] or "-")
def test_wrong_requests(cli: Callable[..., Any], arguments: list[str], message: str) -> None:
    ran = cli("generate", *arguments, "--device=cpu") if "--device" not in arguments else cli("generate", *arguments)
    assert message in ran.err and one_line(ran.err), ran.err
    assert (ran.code, ran.out) == (2, "")


@pytest.mark.parametrize(
    "arguments", [["-p", ""], ["-p", "a", "--no-chat", "--system", "b"], ["-p", "a", "--temp", "-1"]]
)
def test_what_no_model_could_do_loads_none(cli: Callable[..., Any], arguments: list[str]) -> None:
    ran = cli("generate", *arguments, "-m", "no/such/folder")
    assert "no/such" not in ran.err and (ran.code, ran.out) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generat", "-p", "a"], "'generat' is not a command: begin with one of generate, devices"),
        (["-p", "a"], "'-p' is not a command"),
        (["devices", "--all"], "unrecognized arguments: --all"),
    ],
)
def test_wrong_commands(cli: Callable[..., Any], arguments: list[str], message: str) -> None:
    ran = cli(*arguments)
    assert message in ran.err and one_line(ran.err), ran.err
    assert (ran.code, ran.out) == (2, "")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("model.safetensors", None, "has neither model.safetensors nor model.safetensors.index.json"),
        ("config.json", "{", "is not valid JSON"),
        ("config.json", '{"model_type": "llama"}', "llama"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("model.safetensors", "short", "model.safetensors is truncated"),
        ("generation_config.json", '{"do_sample": true, "temperature": "hot"}', "temperature is 'hot'"),
    ],
)
def test_a_model_folder_that_cannot_be_run(
    cli: Callable[..., Any], tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    """Files that are missing, damaged or not supported are one kind of mistake: what --model names is no model."""
    for source in builtin_path("tiny-shakespeare").iterdir():
        (tmp_path / source.name).symlink_to(source)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content, encoding="utf-8")
    ran = cli("generate", "-p", "a", "-m", str(tmp_path), "--device", "cpu")
    assert message in ran.err and one_line(ran.err), ran.err
    assert (ran.code, ran.out) == (2, "")


def test_prompt_that_is_not_utf8(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("naïve".encode("latin-1"))
    ran = cli("generate", "-f", str(tmp_path / "latin1.txt"))
    assert "is not UTF-8 (byte 2)" in ran.err and one_line(ran.err)
    assert (ran.code, ran.out) == (2, "")


def test_json_keeps_stdout_empty_on_errors(cli: Callable[..., Any]) -> None:
    ran = cli("generate", "-p", "", "--json")
    assert (ran.code, ran.out) == (2, "")


def test_messages_with_line_breaks_stay_one_line(cli: Callable[..., Any]) -> None:
    ran = cli("generate", "-p", "a", "--bad\nflag")
    assert one_line(ran.err)
    assert ran.code == 2


def test_a_failure_after_text_has_begun(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from qwen_raw import reference

    calls = iter([40, 41, 42])

    def choose(*_: object, **__: object) -> int:
        try:
            return next(calls)
        except StopIteration:
            raise QwenRawError("the logits for position 4 are not finite") from None

    monkeypatch.setattr(reference, "choose", choose)
    ran = cli("generate", "-p", "a", "--device", "cpu", "--quiet")
    assert (ran.code, ran.err) == (1, "qwen-raw: the logits for position 4 are not finite\n")
    assert len(ran.out) >= 3


def test_cuda_without_a_gpu_in_a_process_of_its_own() -> None:
    """No GPU is visible to the process, whatever the machine has."""
    arguments = [sys.executable, "-m", "qwen_raw", "generate", "-p", "a", "--device", "cuda"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment)
    assert one_line(ran.stderr) and "--device cpu" in ran.stderr, ran.stderr
    assert (ran.returncode, ran.stdout) == (2, "")
    ran = subprocess.run([*arguments[:-1], "auto", "--json", "-n1"], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["device"] == "cpu"
