"""What surrounds every command: each thing that can go wrong is one line and an exit code; a bug stays a traceback."""

from __future__ import annotations

import errno

import pytest

from qwen_raw.cli.process import guarded
from qwen_raw.errors import QwenRawError, UsageError

PROBLEMS = [
    (UsageError("no prompt"), 2, "no prompt"),
    (QwenRawError("two\nlines"), 1, "two lines"),
    (MemoryError(), 1, "not enough memory"),
    (MemoryError("24 GiB"), 1, "not enough memory: 24 GiB"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "not enough memory: Cannot allocate memory"),
    (OSError(errno.ENOSPC, "No space left on device"), 1, "the output cannot be written: No space left on device"),
    (FileNotFoundError(errno.ENOENT, "No such file", "k.so"), 1, "k.so: No such file"),
    (OSError("/cache/k.so: file too short"), 1, "/cache/k.so: file too short"),
    (KeyboardInterrupt(), 130, "interrupted"),
]


@pytest.mark.parametrize(("error", "code", "line"), PROBLEMS, ids=lambda value: repr(value)[:30])
def test_problems(error: BaseException, code: int, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise error

    assert guarded("bench", work) == code
    assert capfd.readouterr() == ("", f"bench: {line}\n")


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded("bench", lambda: 1 // 0)


def test_the_code_of_the_work_is_the_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert guarded("bench", lambda: 3) == 3
    assert capfd.readouterr() == ("", "")
