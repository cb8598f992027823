"""The wheel: what is in it, and that it works from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a user of the installed package reaches: the kernels' sources, the built-in model, the command line's own help.
SCRIPT = """
import qwen_raw, loaders
from pathlib import Path
from qwen_raw import paths
from qwen_raw.kernels.compile import stems
here = Path(qwen_raw.__file__).parent
assert paths.cuda_src() == here / "cuda_src", paths.cuda_src()
assert "gemv_bf16" in stems()
print(here)
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, unpacked."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def _tracked(folder: str) -> set[str]:
    """The repository's files under `folder`."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in done.stdout.split("\0") if name}


def test_wheel_holds_every_file(installed: Path) -> None:
    for folder, inside in (("qwen_raw", "qwen_raw"), ("loaders", "loaders"), ("cuda_src", "qwen_raw/cuda_src")):
        names = _tracked(folder)
        assert names
        for name in names:
            packed = installed / inside / Path(name).relative_to(folder)
            assert packed.is_file() or not (ROOT / name).exists(), f"{name} is not in the wheel"
    assert not (installed / "tests").exists()


def test_wheel_works_from_any_folder(installed: Path, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(installed), "QWEN_RAW_CACHE": str(tmp_path / "cache")}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", SCRIPT).strip() == str(installed / "qwen_raw")
    text = run("-m", "qwen_raw", "generate", "--device", "cpu", "-p", "ROMEO:", "-n", "8")
    assert len(text.strip()) > 8
