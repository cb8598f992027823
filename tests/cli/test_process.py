"""What only a real process shows: Ctrl-C, a closed pipe, odd locales, the module entry point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "qwen_raw", "generate", "--device", "cpu"]
LONG = [*COMMAND, "-p", "ROMEO:", "-n", "-1", "--ignore-eos", "--temp", "0.8", "--seed", "1"]


def start(arguments: list[str], **options: object) -> subprocess.Popen[bytes]:
    def default_sigint() -> None:  # a shell that runs the tests in the background has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        preexec_fn=default_sigint,
        **options,  # type: ignore[call-overload]
    )


def test_ctrl_c_prints_what_there_is_and_the_stats() -> None:
    process = start(LONG)
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 5
    assert process.returncode == 130
    assert len(first + out) >= 20 and (first + out).decode()
    last = err.decode().splitlines()[-1]
    assert last.startswith("# TTFT") and last.endswith("interrupted")
    assert b"Traceback" not in err


def interrupted_after(seconds: float) -> dict[str, object]:
    """The report of a generation that gets SIGINT so long after it announced itself."""
    process = start([*LONG, "--json", "--model", "tiny-shakespeare"])
    assert process.stderr is not None
    while b"at most" not in process.stderr.readline():  # the line before the first token
        pass
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    report: dict[str, object] = json.loads(out)
    assert (process.returncode, report["finish_reason"]) == (130, "interrupted")
    assert b"Traceback" not in err
    return report


def test_ctrl_c_with_json() -> None:
    """However early it comes, the report is whole; a busy machine may need longer until there is a token in it."""
    for seconds in (0.3, 1.0, 3.0):
        report = interrupted_after(seconds)
        ids = report["token_ids"]
        assert isinstance(ids, list) and report["completion_tokens"] == len(ids)
        if ids:
            return
    pytest.fail("no token in three seconds")


def test_a_closed_pipe_is_no_failure() -> None:
    process = start(LONG)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=30) == 0
    assert "Traceback" not in err and "BrokenPipe" not in err
    assert err.splitlines()[-1].startswith("# TTFT")


def test_text_is_utf8_in_any_locale() -> None:
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    arguments = [*COMMAND, "-p", "naïve", "-n", "1", "--stop", "“", "--json"]
    ran = subprocess.run(arguments, capture_output=True, cwd=ROOT, env=environment, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.decode("utf-8"))["sampling"]["stop"] == ["“"]
    assert "stop '“'" in ran.stderr.decode("utf-8")


def test_installed_command_and_module_are_the_same() -> None:
    ran = subprocess.run([sys.executable, "-m", "qwen_raw", "--version"], capture_output=True, cwd=ROOT, timeout=60)
    assert ran.returncode == 0
    script = "import sys; sys.argv = ['qwen-raw', '--version']; from qwen_raw.cli.main import entry; entry()"
    installed = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=ROOT, timeout=60)
    assert (installed.returncode, installed.stdout) == (0, ran.stdout)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["generate", "-p", "ROMEO:", "-n", "3"], ["devices"]])
def test_output_that_cannot_be_written_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qwen_raw", *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "the output cannot be written" in done.stderr.splitlines()[-1]
