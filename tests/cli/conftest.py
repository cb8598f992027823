"""Commands run inside this process, where starting another would only cost time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from qwen_raw.cli.main import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """cli("generate", "-p", "x") → exit code and what it wrote."""

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        code = main(_sequence(arguments))
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


def _sequence(arguments: tuple[str, ...]) -> Sequence[str]:
    return list(arguments)
