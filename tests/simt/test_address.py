"""Kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a process that carries the sanitizer's library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_raw.errors import UsageError
from qwen_raw.simt import run, toolchain
from qwen_raw.simt.world import SimWorld

HERE = Path(__file__).parent
KERNELS = ("small", "sample", "gemv", "gemm", "attn", "async", "clusters", "basics")
SHORT = [*(f"tests/simt/test_{name}.py" for name in KERNELS), "tests/comm/test_collectives.py"]
ALL = ["tests/simt", "tests/comm"]
pytestmark = pytest.mark.skipif(run.active(), reason="starts such a process itself")

BUG = """
import sys
from pathlib import Path
import numpy as np
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.library import Library
from qwen_raw.simt.world import SimWorld

library = Library("address", kernel_folders=(Path(sys.argv[1]),))
device = SimDevice(world=SimWorld(sanitize="address", library=library))
kernel = device.kernel("bugs", sys.argv[2])
args = [device.array(np.full(32, int(sys.argv[3]), np.dtype(sys.argv[4])))]
args += [np.int32(32)] * (len(kernel.params) - 1)
device.launch(kernel, (1, 1, 1), (int(sys.argv[5]), 1, 1), args, smem=128)
"""


@pytest.fixture(scope="module")
def sanitizer(compiler: toolchain.Compiler) -> None:
    try:
        run.environment(compiler)
    except UsageError as error:
        pytest.skip(str(error))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m qwen_raw.simt.run arguments…` from the project's folder."""
    root = HERE.parent.parent
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "qwen_raw.simt.run", *arguments]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("sanitizer")
@pytest.mark.parametrize(
    ("name", "value", "dtype", "threads", "expected"),
    [
        ("writes_past_the_end", "0", "float32", "64", ["ERROR: AddressSanitizer", "in writes_past_the_end"]),
        ("past_static_shared", "0", "float32", "32", ["AddressSanitizer: use-after-poison", "in past_static_shared"]),
        ("past_dynamic_shared", "0", "float32", "32", ["ERROR: AddressSanitizer", "thread (31,0,0)"]),
        ("local_array_overrun", "9", "int32", "1", ["AddressSanitizer: stack-buffer-overflow", "thread (0,0,0)"]),
        ("shifts_too_far", "33", "int32", "1", ["shift by a negative number or by too many bits", "thread (0,0,0)"]),
    ],
)
def test_report(name: str, value: str, dtype: str, threads: str, expected: list[str]) -> None:
    done = python("-c", BUG, str(HERE / "kernels"), name, value, dtype, threads)
    assert done.returncode == 1
    for text in [*expected, f"kernel {name}, block (0,0,0)"]:
        assert text in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it compiles kernels and runs a second pytest, on a busy machine too
@pytest.mark.usefixtures("sanitizer")
@pytest.mark.parametrize("paths", [SHORT, pytest.param(ALL, marks=pytest.mark.exhaustive)], ids=["short", "all"])
def test_kernels(paths: list[str]) -> None:
    done = python("-m", "pytest", *paths, "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout


def test_refused_in_an_ordinary_process(compiler: toolchain.Compiler) -> None:
    with pytest.raises(UsageError, match=r"python -m qwen_raw\.simt\.run"):
        SimWorld(sanitize="address")


def test_race_and_address_exclude_each_other(compiler: toolchain.Compiler) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        SimWorld(race=True, sanitize="address")
