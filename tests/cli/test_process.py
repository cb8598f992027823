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


# As at a user's: test runners like to unset the buffering that hides where a failed write shows.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
QWEN_RAW = "-m qwen_raw"
GENERATE = "-m qwen_raw generate --device cpu -p ROMEO: -n 3"
TORTURE = "-m qwen_raw.simt.torture"


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python command` with the shell's redirections."""
    line = f'"{sys.executable}" {command}'
    return subprocess.run(
        line, shell=True, cwd=ROOT, env=BUFFERED | variables, capture_output=True, text=True, timeout=120, check=False
    )


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
WRITERS = (f"{QWEN_RAW} --help", f"{QWEN_RAW} devices", f"{TORTURE} --list")
CLOSED, NO_SPACE = "standard output is closed", "the output cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (f"{GENERATE} >&-", 1, CLOSED),
        *((f"{command} >&-", 1, CLOSED) for command in WRITERS),
        ("-m bench.decode >&-", 1, CLOSED),
        (f"{QWEN_RAW} generate --device cpu - <&-", 2, "standard input is closed: there is no prompt to read"),
        *(
            pytest.param(f"{command} >/dev/full", 1, NO_SPACE, marks=FULL)
            for command in (*WRITERS, GENERATE, f"{GENERATE} --json")
        ),
        (f"{TORTURE}", 2, "torture: name what to run: allreduce_lamport"),
        (f"{TORTURE} signal --seeds few", 2, "argument --seeds: invalid int value: 'few'"),
        ("-m qwen_raw.simt.run", 2, "simt.run: name what to run"),
    ],
)
def test_one_line_and_a_code(command: str, code: int, message: str) -> None:
    """Standard streams that are closed or full, and commands other than `qwen-raw`."""
    done = shell(command)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("# ")]
    assert len(lines) == 1 and message in lines[0], done.stderr
    assert (done.returncode, done.stdout) == (code, "")


@FULL
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", [f"{QWEN_RAW} --help", f"{QWEN_RAW} generate --help", f"{QWEN_RAW} --version", "-m bench.torture --help"]
)
def test_help_that_cannot_be_written(command: str, unbuffered: str) -> None:
    """With Python's buffer it fails when that is flushed, without in argparse, which would not say so."""
    done = shell(f"{command} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and NO_SPACE in done.stderr


@pytest.mark.parametrize("command", WRITERS)
def test_a_reader_that_leaves_is_no_failure(command: str) -> None:
    done = shell(f"{command} | true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("redirection", ["2>&-", pytest.param("2>/dev/full", marks=FULL)])
def test_without_stderr_the_text_is_still_alone_on_stdout(redirection: str) -> None:
    done = shell(f"{GENERATE} {redirection}")
    assert (done.returncode, done.stdout) == (0, shell(f"{GENERATE} -q").stdout)
    assert shell(f"{QWEN_RAW} generate --frobnicate {redirection}").returncode == 2


def test_status_lines_begin_lines_where_both_streams_are_one() -> None:
    lines = shell(f"{GENERATE} 2>&1").stdout.splitlines()
    text = shell(f"{GENERATE} -q").stdout
    assert lines[2:-1] == text.splitlines() and lines[-1].startswith("# TTFT")
