"""House rules that a reader relies on, checked."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CUDA = ROOT / "cuda_src"
MAX_LINES = 450
SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h", ".c"}
# Who may import whom: each layer only those named (and itself). `loaders` stands beside, on config and errors.
LAYERS = {
    "loaders": {"qwen_raw.config", "qwen_raw.errors"},
    "qwen_raw.kernels": {"qwen_raw.device", "qwen_raw.errors", "qwen_raw.config", "qwen_raw.paths"},
    # The driver loads cubins, so it knows the three modules that make and read them; they know nothing of it.
    "qwen_raw.driver": {
        "qwen_raw.device",
        "qwen_raw.errors",
        "qwen_raw.kernels.compile",
        "qwen_raw.kernels.cubin",
        "qwen_raw.kernels.toolchain",
    },
}


def sources(*folders: str) -> list[Path]:
    """Source files under these folders of the repository."""
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*")) if p.suffix in SOURCE_SUFFIXES]
    assert found
    return found


def imports(path: Path) -> Iterator[str]:
    """Every module that a Python file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def code(path: Path) -> str:
    """C++ text without comments and string literals."""
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', path.read_text())
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_pytorch() -> None:
    """Neither imported nor included: the engine stands on its own kernels."""
    guilty = [
        relative(path)
        for path in sources("qwen_raw", "loaders")
        if path.suffix == ".py" and any(name.split(".")[0] in {"torch", "triton"} for name in imports(path))
    ]
    guilty += [
        relative(path) for path in sources("cuda_src") if re.search(r"#\s*include\s*<(torch|ATen)", path.read_text())
    ]
    assert not guilty


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer: str) -> None:
    allowed = LAYERS[layer] | {layer}
    guilty = [
        f"{relative(path)}: {name}"
        for path in sources(layer.replace(".", "/"))
        if path.suffix == ".py"
        for name in imports(path)
        if name.split(".")[0] in {"qwen_raw", "loaders", "bench", "tests"}
        and name != "qwen_raw.__version__"
        and not any(name == a or name.startswith(f"{a}.") for a in allowed)
    ]
    assert not guilty


def test_inline_ptx_only_in_ptx_cuh() -> None:
    """So that every instruction has one wrapper, and every wrapper a CPU twin. The simulator may switch its fibres."""
    guilty = [
        relative(path)
        for path in sources("cuda_src")
        if re.search(r"\b(__)?asm(__)?\b", code(path))
        and relative(path) != "cuda_src/include/ptx.cuh"
        and not path.is_relative_to(CUDA / "sim")
    ]
    assert not guilty


def test_no_restrict() -> None:
    """`const T* __restrict__` lets a read of what the last kernel wrote move above griddep_wait (docs/kernels.md)."""
    guilty = [
        relative(path)
        for path in sources("cuda_src")
        if re.search(r"\b(__restrict__|__restrict|__ldg)\b", code(path)) and not path.is_relative_to(CUDA / "sim")
    ]
    assert not guilty


def test_shared_memory_only_through_the_macros() -> None:
    """`__shared__` cannot be redefined for the CPU: SHARED and DYN_SHARED can."""
    guilty = [
        relative(path)
        for path in sources("cuda_src")
        if "__shared__" in code(path)
        and relative(path) != "cuda_src/include/common.cuh"
        and not path.is_relative_to(CUDA / "sim")
    ]
    assert not guilty


def test_no_file_is_too_long_to_read() -> None:
    lengths = {
        relative(p): len(p.read_text().splitlines())
        for p in sources("qwen_raw", "loaders", "cuda_src", "bench", "tests")
    }
    assert not {name: n for name, n in lengths.items() if n > MAX_LINES}


def test_every_kernel_file_has_a_launcher() -> None:
    missing = [p.stem for p in CUDA.glob("*.cu") if not (ROOT / "qwen_raw" / "kernels" / f"{p.stem}.py").is_file()]
    assert not missing


def test_every_kernel_states_its_preconditions() -> None:
    """A kernel file begins with what it computes; it, or the header with its body, with the grid and the PRECONDs."""
    guilty = []
    for path in CUDA.glob("*.cu"):
        opening, _, rest = path.read_text().partition("#include")
        bodies = [CUDA / name for name in re.findall(r'"(include/\w+\.cuh)"', rest)]
        stated = opening + "".join(body.read_text().partition("#pragma")[0] for body in bodies)
        if not opening.startswith(f"// {path.name} - ") or "PRECOND" not in stated or "grid" not in stated:
            guilty.append(path.name)
    assert not guilty


def test_the_repository_speaks_of_the_project_alone() -> None:
    """No path of some machine, no note to oneself."""
    guilty = [
        f"{relative(path)}:{number}"
        for path in [
            *sources("qwen_raw", "loaders", "cuda_src", "bench"),
            ROOT / "README.md",
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / "bench" / "results").glob("*.json"),
        ]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"/(work|root|home/\w+)/|\b(TODO|FIXME|XXX)\b", line)
    ]
    assert not guilty


def test_ci_runs_the_readmes_test_command() -> None:
    """The one command that the README gives for the tests is the one that .ci/run ends with."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = [line.strip() for block in blocks for line in block.splitlines() if "pytest" in line]
    assert commands
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == commands[0]
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
