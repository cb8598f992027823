"""Kernels into shared objects: what is found in a source, what the cache's key depends on, and what goes wrong."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qwen_raw import paths
from qwen_raw.device import F32
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.simt import run, toolchain
from qwen_raw.simt.build import Builder, EntryPoint
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.library import Library
from qwen_raw.simt.world import SimWorld

pytestmark = pytest.mark.skipif(run.active(), reason="builds plain kernels")

SCALE = """#include "include/common.cuh"
KERNEL(64) void scale(float* x, float factor) { x[threadIdx.x] *= factor; }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE)
    return folder


@pytest.fixture
def builder(compiler: toolchain.Compiler, folder: Path, tmp_path: Path) -> Builder:
    """Builds kernels of `folder` into an empty cache, with the runtime that the user's cache has."""
    cache = tmp_path / "cache"
    cache.mkdir()
    runtime = Builder(compiler=compiler).runtime()
    for file in (runtime, runtime.with_suffix(".json")):
        shutil.copy(file, cache)
    return Builder(cache_dir=cache, compiler=compiler, kernel_folders=(folder,))


class TestEntryPoints:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("KERNEL(32) void a(float* x, const int n) {}", EntryPoint("a", "32", ("x", "n"))),
            ("KERNEL_OCC(8 * (16 + 1), 2) void b() {}", EntryPoint("b", "8 * (16 + 1)", ())),
            (
                'extern "C" __global__ void __launch_bounds__(64) c(bf16 *__restrict__ y) {}',
                EntryPoint("c", "64", ("y",)),
            ),
            ('extern "C" __global__ void d(const float* const x, int(&r)) {}', EntryPoint("d", "0", ("x", "r"))),
            ("#define K(n) KERNEL(n) void e##n(int v)\nK(96) {}", EntryPoint("e96", "96", ("v",))),
        ],
    )
    def test_found(self, builder: Builder, tmp_path: Path, text: str, expected: EntryPoint) -> None:
        path = tmp_path / "x.cu"
        path.write_text(f'#include "include/common.cuh"\n{text}\n')
        assert builder.entry_points(path) == [expected]

    def test_every_kernel_of_the_project_has_some(self, builder: Builder) -> None:
        for path in paths.cuda_src().glob("*.cu"):
            entries = builder.entry_points(path)
            assert len(entries) == len({e.name for e in entries}) > 0
            assert all(re.fullmatch(r"[\w\s*+():<>,?=]+", e.bounds) and e.params for e in entries)

    def test_none(self, builder: Builder, tmp_path: Path) -> None:
        path = tmp_path / "empty.cu"
        path.write_text("void host() {}\n")
        with pytest.raises(QwenRawError, match=r"empty\.cu has no kernel"):
            builder.entry_points(path)


class TestCache:
    def test_found_again(self, builder: Builder) -> None:
        first = builder.kernel("scale")
        stamp = first.stat().st_mtime_ns
        assert builder.kernel("scale") == first
        assert first.stat().st_mtime_ns == stamp
        meta = json.loads(first.with_suffix(".json").read_text())
        assert meta["stem"] == "scale" and meta["compiler"] == builder.compiler.version

    def test_no_drafts_are_left(self, builder: Builder) -> None:
        entry = builder.kernel("scale")
        assert not [p.name for p in entry.parent.iterdir() if p.name.startswith(".")]

    @pytest.mark.parametrize("what", ["source", "flags", "compiler", "variant", "defines"])
    def test_the_key_depends_on(self, builder: Builder, folder: Path, what: str) -> None:
        before = builder.kernel("scale")
        compiler = builder.compiler
        changed = {
            "source": builder,
            "flags": replace(builder, compiler=replace(compiler, machine_flags=(*compiler.machine_flags, "-DX"))),
            "compiler": replace(builder, compiler=replace(compiler, version="another")),
            "variant": replace(builder, variant="race"),
            "defines": replace(builder, defines=("X=1",)),
        }[what]
        if what == "source":
            (folder / "scale.cu").write_text(SCALE + "// more\n")
        if what in ("flags", "compiler"):  # the runtime depends on these too: do not build it, compare names
            assert changed.runtime_name() != builder.runtime_name()
            return
        assert changed.kernel("scale") != before

    def test_the_key_depends_on_headers(self, compiler: toolchain.Compiler, tmp_path: Path) -> None:
        names = set()
        for comment in ("", "// changed\n"):
            root = tmp_path / f"src{len(comment)}"
            shutil.copytree(paths.cuda_src(), root)
            header = root / "sim" / "fiber.h"
            header.write_text(header.read_text() + comment)
            names.add(Builder(source_root=root, compiler=compiler).runtime_name())
        assert len(names) == 2

    @pytest.mark.parametrize("damage", ["truncated", "gone", "no description"])
    def test_a_damaged_entry_is_built_again(self, builder: Builder, damage: str) -> None:
        entry = builder.kernel("scale")
        whole = entry.read_bytes()
        if damage == "truncated":
            entry.write_bytes(whole[: len(whole) // 2])
        elif damage == "gone":
            entry.unlink()
        else:
            entry.with_suffix(".json").unlink()
        assert builder.kernel("scale") == entry
        assert entry.stat().st_size > len(whole) // 2

    @pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
    def test_no_folder_can_be_written(self, builder: Builder) -> None:
        assert builder.cache_dir
        builder.cache_dir.chmod(0o500)
        with pytest.raises(QwenRawError, match="no folder for compiled kernels can be written"):
            builder.kernel("scale")


def test_a_kernel_folder_comes_before_the_project(compiler: toolchain.Compiler, folder: Path) -> None:
    """A file of the same stem stands in for the project's kernel; its includes are the project's."""
    (folder / "signal.cu").write_text(SCALE)
    library = Library(kernel_folders=(folder,), host_compiler=compiler)
    library.kernel("signal", "scale")
    with pytest.raises(QwenRawError, match="has no kernel signal_put: it has scale"):
        library.kernel("signal", "signal_put")


class TestErrors:
    def test_compile_error_has_file_and_line(self, builder: Builder, folder: Path) -> None:
        (folder / "scale.cu").write_text(SCALE.replace("factor;", "facto;"))
        with pytest.raises(QwenRawError, match=r"scale\.cu:2:\d+: error: .*facto"):
            builder.kernel("scale")

    def test_shared_memory_without_the_macro(self, builder: Builder, folder: Path) -> None:
        (folder / "scale.cu").write_text(SCALE.replace("{ x", "{ __shared__ float s[2]; x"))
        with pytest.raises(QwenRawError, match="SHARED_MEMORY_IS_DECLARED_WITH_THE_MACROS"):
            builder.kernel("scale")

    def test_unknown_stem(self, builder: Builder) -> None:
        with pytest.raises(QwenRawError, match=r"there is no kernel file nonesuch\.cu .* gemv_bf16"):
            builder.kernel("nonesuch")

    def test_unknown_entry(self, new_device: Callable[..., SimDevice]) -> None:
        with pytest.raises(QwenRawError, match=r"has no kernel nonesuch: it has .*vector_add"):
            new_device().kernel("basics", "nonesuch")

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        with pytest.raises(UsageError, match=r"needs a C\+\+17 compiler; tried g\+\+ \(not found\), clang\+\+"):
            toolchain.find_compiler()

    def test_a_compiler_that_cannot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(UsageError, match=r"false \(no C\+\+17\)"):
            toolchain.find_compiler()

    def test_another_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platform, "system", lambda: "Darwin")
        with pytest.raises(UsageError, match="runs on Linux, this is Darwin"):
            toolchain.find_compiler()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-DSIMT_UCONTEXT", "no fma"])
def test_portable_builds_give_the_same_bits(compiler: toolchain.Compiler, folder: Path, flag: str) -> None:
    """The switch through ucontext, for other processors; and libm's fmaf, for those without the instruction."""
    flags = () if flag == "no fma" else (*compiler.machine_flags, flag)
    x = np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)
    results = []
    for host_compiler in (compiler, replace(compiler, machine_flags=flags)):
        kernels = (Path(__file__).parent / "kernels",)
        library = Library(kernel_folders=kernels, host_compiler=host_compiler)
        for seed in (None, 1):
            with SimWorld(seed=seed, library=library) as world:
                device = SimDevice(world=world)
                out = device.empty((3,), F32)
                kernel = device.kernel("basics", "block_norms")
                device.launch(kernel, (3, 1, 1), (96, 1, 1), [out, device.array(x), np.int32(300)])
                results.append(out.download())
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    np.testing.assert_allclose(results[0], (x.astype(np.float64) ** 2).sum(1), rtol=1e-5)


def signatures(path: Path) -> dict[str, str]:
    """Functions at file scope of a header: name → "return type(parameter types)"."""
    text = re.sub(r"//[^\n]*", "", path.read_text())
    found = {}
    for kind, name, params in re.findall(
        r"^(?:DEVICE|inline) ([\w ]+?) (\w+)\(((?:[^()]|\([^()]*\))*)\) \{", text, re.M
    ):
        types = [
            re.sub(r"\s*\b\w+$|\(&\w+\)", lambda m: "&" if "&" in m[0] else "", p.strip()) for p in params.split(", ")
        ]
        found[name] = f"{kind}({', '.join(t for t in types if t and t != 'SIMT_PLACE' and 'SIMT_PLACE' not in t)})"
    return found


def test_every_ptx_wrapper_has_a_twin() -> None:
    wrappers = signatures(paths.cuda_src() / "include" / "ptx.cuh")
    twins = signatures(paths.cuda_src() / "sim" / "ptx_cpu.h")
    assert len(wrappers) > 15
    assert {name: twins.get(name) for name in wrappers} == wrappers
