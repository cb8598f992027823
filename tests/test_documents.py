"""What the documents say can be typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_raw.cli import devices, generate
from qwen_raw.cli.main import main
from qwen_raw.simt import torture
from qwen_raw.simt.known_bad import VARIANTS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TORTURE = ["python", "-m", "qwen_raw.simt.torture"]


def commands() -> Iterator[list[str]]:
    """The words of every command in the documents' ```sh blocks, each part of a pipe or of && by itself."""
    for document in DOCUMENTS:
        for block in re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = [re.split(r"^[&|]+$", word) for word in shlex.split(line, comments=True)]
                yield from _split(["" if len(word) > 1 else word[0] for word in words])


def _split(words: list[str]) -> Iterator[list[str]]:
    while "" in words:
        yield words[: words.index("")]
        words = words[words.index("") + 1 :]
    yield words


COMMANDS = list(commands())


def test_commands_are_found() -> None:
    assert {"pip", "qwen-raw", "python"} <= {words[0] for words in COMMANDS}


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[0] == "qwen-raw"], ids=" ".join)
def test_qwen_raw_has_these_flags(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (generate, devices):
        monkeypatch.setattr(command, "run", lambda args: 0)
    assert main(words[1:]) == 0


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[:3] == TORTURE], ids=" ".join)
def test_torture_has_these_flags_and_names(words: list[str]) -> None:
    arguments = torture._parser().parse_args(words[3:])
    assert arguments.list or torture.setting_of(arguments.kernel, arguments.ranks)


@pytest.mark.parametrize(
    "words", [w for w in COMMANDS if w[:2] == ["python", "-m"] and w[2].startswith("bench.")], ids=" ".join
)
def test_benches_have_these_flags(words: list[str]) -> None:
    """Without a GPU a bench parses its arguments and then says that there is none."""
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("bench: no "), done.stderr


def test_every_mistake_is_described() -> None:
    """Each known-bad variant, by name, in the document that says how mistakes show."""
    described = (ROOT / "docs" / "races.md").read_text()
    assert not [name for name in VARIANTS if f"`{name}`" not in described]
