"""The driver layer against a libcuda without a GPU (fake_cuda.c), each scenario in a process of its own.

What it shows is what the layer asks of the driver: which calls, with which arguments, in which order, and how it
answers their failures. That the real driver likes them is for test_gpu.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qwen_raw

HERE = Path(__file__).parent
SCENARIOS = [
    line.split("(")[0].removeprefix("def ")
    for line in (HERE / "fake_scenarios.py").read_text().splitlines()
    if line.startswith("def scenario_")
]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake libcuda.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the fake driver needs Linux and a C compiler")
    pytest.importorskip("cuda.bindings")
    target = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(target),
        "fake_cuda.c",
        "-ldl",
    ]
    subprocess.run(command, check=True, cwd=HERE)
    return target


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(library: Path, name: str) -> None:
    command = [sys.executable, str(HERE / "fake_scenarios.py"), str(library), name]
    env = os.environ | {"PYTHONPATH": str(Path(qwen_raw.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == f"{name} passed"
    assert "Exception ignored" not in done.stderr, done.stderr
