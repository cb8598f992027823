"""Compiling without a GPU: every kernel for every architecture without spills; cache, errors, cubin reader."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import qwen_raw
from qwen_raw import paths
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels import compile as nvrtc
from qwen_raw.kernels import cubin, toolchain

pytest.importorskip("cuda.bindings", reason="the CUDA packages are not installed")

NVRTC = toolchain.nvrtc_version()
ARCHS = ("sm_80", "sm_90a", "sm_100")
PLAIN = 'extern "C" __global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2.0f; }\n'
# More live values than the launch bound leaves registers for.
SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* p, int n) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; i++) a[i] = p[i * n + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 64; i++)
#pragma unroll
    for (int j = 0; j < 64; j += 7) a[i] = fmaf(a[j], a[i], 1.0f);
#pragma unroll
  for (int i = 0; i < 64; i++) p[i * n + threadIdx.x] = a[i];
}
struct Odd { char c[3]; double d; short s; };
extern "C" __global__ void __launch_bounds__(96) tame(float* p, Odd o, char c, short s, long long n) {
  __shared__ float shared[100];
  shared[threadIdx.x] = p[threadIdx.x] + o.d;
  __syncthreads();
  p[threadIdx.x] = shared[n] + c + s;
}
"""


def every_kernel() -> list[tuple[str, str]]:
    """(stem, arch): all of them; *_sm90 uses instructions that only sm_90a has."""
    return [(stem, arch) for stem in nvrtc.stems() for arch in ARCHS if not stem.endswith("_sm90") or arch == "sm_90a"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A source folder with one kernel that includes a header that includes a header."""
    folder = tmp_path / "cuda_src"
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "inner.cuh").write_text("#define SCALE 2.0f\n")
    (folder / "include" / "outer.cuh").write_text('#pragma once\n#  include "inner.cuh"\n')
    body = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= SCALE; }\n'
    (folder / "scale.cu").write_text('#include "include/outer.cuh"\n' + body)
    (folder / "twice.cu").write_text(PLAIN)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache, so that everything is really compiled."""
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.parametrize(("stem", "arch"), every_kernel())
def test_every_kernel_compiles_without_spills(stem: str, arch: str, cache: Path) -> None:
    path = nvrtc.build(stem, arch, cache_dir=cache)
    table = cubin.resources(path)
    assert table, f"{stem}.cu has no kernel"
    spilling = {name: r.local_bytes for name, r in table.items() if r.local_bytes or r.stack_bytes}
    assert not spilling, f"bytes of local memory per thread: {spilling}"
    log = json.loads(path.with_suffix(".json").read_text())["log"]
    assert "serialized" not in log, f"warpgroup products wait for each other: {log}"


@pytest.mark.parametrize("header", ["cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "nv/target"])
def test_cuda_headers_are_found(header: str, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(f"#include <{header}>\n{PLAIN}")
    path = nvrtc.build("k", "sm_80", source_root=tmp_path, cache_dir=tmp_path)
    assert cubin.resources(path)["twice"].params == (8, 4)


def test_entry_holds_source_and_facts(root: Path, tmp_path: Path) -> None:
    path = nvrtc.build("scale", "sm_80", source_root=root, cache_dir=tmp_path / "c")
    assert sorted(p.suffix for p in (tmp_path / "c").iterdir()) == [".cu", ".cubin", ".json"]
    assert path.with_suffix(".cu").read_text() == (root / "scale.cu").read_text()
    meta = json.loads(path.with_suffix(".json").read_text())
    assert meta["headers"] == ["include/inner.cuh", "include/outer.cuh"]
    assert "--gpu-architecture=sm_80" in meta["options"] and meta["nvrtc"] == list(toolchain.nvrtc_version())
    assert meta["resources"]["scale"]["registers"] == cubin.resources(path)["scale"].registers


def test_key_covers_everything_that_matters(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(arch: str = "sm_80", defines: tuple[str, ...] = ()) -> Path:
        return nvrtc.build("scale", arch, source_root=root, cache_dir=tmp_path / "c", defines=defines)

    first = build()
    written = first.stat().st_mtime_ns
    assert build() == first and first.stat().st_mtime_ns == written  # from the cache
    moved = shutil.copytree(root, tmp_path / "elsewhere")
    assert nvrtc.build("scale", "sm_80", source_root=moved, cache_dir=tmp_path / "c") == first
    seen = {first, build("sm_90a"), build(defines=("UNUSED=1",))}
    (root / "include" / "inner.cuh").write_text("#define SCALE 3.0f\n")
    changed = build()
    seen.add(changed)
    assert changed.read_bytes() != first.read_bytes()
    (root / "scale.cu").write_text((root / "scale.cu").read_text() + "// more\n")
    seen.add(build())
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (NVRTC[0], 99))
    seen.add(build())
    monkeypatch.undo()
    headers = toolchain.cuda_headers(NVRTC[0])
    other = toolchain.Headers(headers.folders, headers.version + 10)
    monkeypatch.setattr(toolchain, "cuda_headers", lambda _major: other)
    seen.add(build())
    assert len(seen) == 7


def test_project_headers_ignores_what_is_not_there(root: Path) -> None:
    (root / "include" / "outer.cuh").write_text(
        '#if defined(HOST)\n#include "../sim/absent.h"\n#else\n#include <cuda_bf16.h>\n#include "inner.cuh"\n#endif\n'
    )
    found = nvrtc.project_headers(root / "scale.cu", root)
    assert [p.name for p in found] == ["inner.cuh", "outer.cuh"]


@pytest.mark.parametrize("where", ["scale.cu", "include/inner.cuh"])
def test_compile_error_has_file_and_line(where: str, root: Path, tmp_path: Path) -> None:
    (root / where).write_text((root / where).read_text() + "\n\n__device__ int broken() { return missing_name; }\n")
    line = (root / where).read_text().splitlines().index("__device__ int broken() { return missing_name; }") + 1
    with pytest.raises(QwenRawError) as caught:
        nvrtc.build("scale", "sm_80", source_root=root, cache_dir=tmp_path / "c")
    first, second, *_ = str(caught.value).splitlines()
    assert first == f'cuda_src/{where}:{line}: error: identifier "missing_name" is undefined'
    assert second.strip() == "__device__ int broken() { return missing_name; }"
    assert not list((tmp_path / "c").glob("*"))


def test_errors_that_are_about_no_line(root: Path, tmp_path: Path) -> None:
    with pytest.raises(QwenRawError, match=r"twice\.cu for sm_77 does not compile"):
        nvrtc.build("twice", "sm_77", source_root=root, cache_dir=tmp_path)
    with pytest.raises(QwenRawError, match=r"no kernel file .*thrice\.cu: the kernels are scale, twice"):
        nvrtc.build("thrice", "sm_80", source_root=root, cache_dir=tmp_path)


def test_missing_headers_name_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    major = NVRTC[0]
    old = tmp_path / "old"
    old.mkdir()
    (old / "cuda_bf16.h").touch()
    (old / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION {(major - 1) * 1000 + 40}\n")
    monkeypatch.setattr(toolchain, "_candidates", lambda _major: iter([tmp_path / "nothing", old]))
    suffix = "-cu12" if major == 12 else ""
    expected = (
        rf"CUDA {major} headers are missing \(cuda_bf16\.h and nv/target\); "
        rf"looked in .*nothing, .*old \(CUDA {major - 1}\.4\)\. "
        rf"Fix: pip install nvidia-cuda-runtime{suffix} nvidia-cuda-cccl{suffix}, or set CUDA_HOME"
    )
    with pytest.raises(QwenRawError, match=expected):
        toolchain.cuda_headers(major)


def test_a_toolkit_serves_where_the_wheels_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    major = NVRTC[0]
    include = tmp_path / "toolkit" / "include"
    (include / "cccl" / "nv").mkdir(parents=True)
    (include / "cccl" / "nv" / "target").touch()
    (include / "cuda_bf16.h").touch()
    (include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {major}010\n")
    monkeypatch.setattr(toolchain, "_nvidia_wheels", lambda: [])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    headers = toolchain.cuda_headers(major)
    assert headers == toolchain.Headers((include, include / "cccl"), major * 1000 + 10)


def test_home_that_cannot_be_written(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is a file stands for a read-only one: root may write anywhere else."""
    home = tmp_path / "home"
    home.write_text("")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for name in ("QWEN_RAW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    path = nvrtc.build("twice", "sm_80", source_root=root)
    assert path.parent.parent == temporary and path.parent.stat().st_mode & 0o777 == 0o700
    assert nvrtc.build("twice", "sm_80", source_root=root) == path
    path.parent.chmod(0o777)  # now anybody could put a cubin there
    with pytest.raises(QwenRawError, match=r"no folder for compiled kernels can be written: .*set QWEN_RAW_CACHE"):
        nvrtc.build("scale", "sm_80", source_root=root)


def test_cache_folders_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("QWEN_RAW_CACHE", str(tmp_path / "mine"))
    assert next(nvrtc.cache_folders()) == tmp_path / "mine"
    monkeypatch.delenv("QWEN_RAW_CACHE")
    assert next(nvrtc.cache_folders()) == tmp_path / "xdg" / "qwen-raw"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, by the XDG specification
    assert next(nvrtc.cache_folders()) == tmp_path / ".cache" / "qwen-raw"


@pytest.mark.parametrize("damage", ["truncate", "flip", "no json", "bad json", "foreign json", "no cubin"])
def test_damaged_entry_is_built_again(damage: str, root: Path, tmp_path: Path) -> None:
    path = nvrtc.build("twice", "sm_80", source_root=root, cache_dir=tmp_path)
    good, meta = path.read_bytes(), path.with_suffix(".json")
    match damage:
        case "truncate":
            path.write_bytes(good[:1000])
        case "flip":
            path.write_bytes(good[:700] + bytes([good[700] ^ 1]) + good[701:])
        case "no json":
            meta.unlink()
        case "bad json":
            meta.write_bytes(meta.read_bytes()[:50])
        case "foreign json":
            meta.write_text("[]")
        case "no cubin":
            path.unlink()
    assert nvrtc.build("twice", "sm_80", source_root=root, cache_dir=tmp_path) == path
    assert path.read_bytes() == good
    assert json.loads(meta.read_text())["stem"] == "twice"


def test_eight_processes_at_once(root: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from qwen_raw.kernels import compile, cubin\n"
        "p = compile.build('twice', 'sm_90a', source_root=Path(sys.argv[1]), cache_dir=Path(sys.argv[2]))\n"
        "print(p, cubin.resources(p)['twice'].registers)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(qwen_raw.__file__).parents[1])}
    command = [sys.executable, "-c", script, str(root), str(tmp_path / "c")]
    children = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(8)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert all(child.returncode == 0 for child in children), outputs
    assert len({out for out, _ in outputs}) == 1
    assert len(list((tmp_path / "c").iterdir())) == 3  # no drafts left behind


def test_threads_may_compile_at_once(root: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        built = list(
            pool.map(
                lambda i: nvrtc.build("twice", "sm_80", source_root=root, cache_dir=tmp_path / "c", defines=[f"N={i}"]),
                range(4),
            )
        )
    assert len({path.name for path in built}) == 4
    assert {cubin.resources(path)["twice"].params for path in built} == {(8, 4)}


@pytest.mark.parametrize("arch", [*ARCHS, "sm_120"])
def test_resources_are_what_the_assembler_says(arch: str) -> None:
    """Against the assembler's own report, and the parameters as declared."""
    options = (*nvrtc.OPTIONS, f"--gpu-architecture={arch}", "--ptxas-options=-v")
    image, log = toolchain.compile_cubin(SPILL.encode(), "spill.cu", options)
    table = cubin.parse(image)
    entry = r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores"
    report = re.findall(entry + r".*?Used (\d+) registers(.*?)$", log, re.DOTALL | re.MULTILINE)
    assert {name for name, *_ in report} == {"spill", "tame"} == set(table)
    for name, frame, spilled, registers, rest in report:
        shared = re.search(r"(\d+) bytes smem", rest)
        r = table[name]
        assert (r.local_bytes, r.registers) == (int(frame), int(registers))
        assert r.static_smem == (int(shared.group(1)) if shared else 0)
        assert (int(spilled) > 0) == (name == "spill") == (r.local_bytes > 0)
    assert table["tame"].params == (8, 24, 1, 2, 8) and table["tame"].max_threads == 96
    assert table["spill"].max_threads == 1024


def test_half_a_cubin_is_refused(root: Path, tmp_path: Path) -> None:
    image = nvrtc.build("scale", "sm_90a", source_root=root, cache_dir=tmp_path).read_bytes()
    for length in [0, 3, 40, 64, *range(100, len(image), 97)]:
        with pytest.raises(QwenRawError, match=r"x\.cubin is not a whole cubin"):
            cubin.parse(image[:length], "x.cubin")


def test_sources_are_where_the_package_says() -> None:
    assert set(nvrtc.stems()) == {path.stem for path in paths.cuda_src().glob("*.cu")} and "embed" in nvrtc.stems()
