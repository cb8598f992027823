"""cuda_src/X.cu → a shared object for the CPU, through the host's C++ compiler and a cache on disk.

An entry's key is the SHA-256 of everything the result depends on: the source, every project header (the simulator's
included), the flags, the compiler's version and the CUDA headers' version. It is published by renaming, .json first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from qwen_raw import paths
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.compile import cache_folders, project_headers, stems
from qwen_raw.simt import toolchain
from qwen_raw.simt.toolchain import Compiler, Variant

_ENTRY = re.compile(r"SIMT_SCAN_ENTRY")
_NAME = re.compile(r"\s*(?:void\s+)?(\w+)\s*\(")  # of the kernel, or the macro that stands for its launch bounds


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One kernel of a .cu file, as the preprocessor shows it: `bounds` is a C++ expression, "0" for none."""

    name: str
    bounds: str
    params: tuple[str, ...]


@dataclass
class Builder:
    """Compiles the runtime, and kernels in one variant. `source_root`: where include/, sim/ and the .cu files are."""

    variant: Variant = "plain"
    source_root: Path = field(default_factory=paths.cuda_src)
    cache_dir: Path | None = None
    compiler: Compiler = field(default_factory=toolchain.find_compiler)
    kernel_folders: tuple[
        Path, ...
    ] = ()  # where a stem is looked for first: kernels of tests, variants of the real ones
    defines: tuple[str, ...] = ()  # "NAME" or "NAME=VALUE"

    def runtime(self) -> Path:
        """The simulator's own shared object."""
        sources = sorted((self.source_root / "sim").glob("*.cpp"))
        name, facts = self._runtime_entry()
        return self._entry(name, facts, lambda out: self._compile_runtime(sources, name, out))

    def runtime_name(self) -> str:
        """The cache entry of the simulator, which need not be there."""
        return self._runtime_entry()[0]

    def kernel(self, stem: str) -> Path:
        """The shared object of `stem`.cu, linked against `runtime()`.

        Raises QwenRawError: for an unknown stem, or for a compile error with file and line.
        """
        path = self._source(stem)
        runtime = self.runtime()
        sim = self.source_root / "sim"
        included = [*_headers(path, self.source_root), *sorted(sim.glob("*.h")), *sorted(sim.glob("crt/*.h"))]
        facts = self._facts(stem, self.compiler.kernel_flags(self.variant), [path, *included])
        facts["runtime"] = runtime.name
        facts["defines"] = self.defines
        if self.variant == "race":  # its undefined-behaviour reports hold the source's whole path
            facts["folder"] = str(path.resolve().parent)
        facts["cuda_headers"] = toolchain.cuda_headers().version
        name = _entry_name(stem, self.variant, facts)
        return self._entry(name, facts, lambda out: self._compile_kernel(path, runtime, out))

    def prebuild(self, names: Iterable[str] | None = None, jobs: int | None = None) -> None:
        """Brings `names` (default: every kernel of the project) into the cache, several at a time."""
        self.runtime()
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            for _ in pool.map(self.kernel, stems(self.source_root) if names is None else names):
                pass

    def entry_points(self, path: Path) -> list[EntryPoint]:
        """The kernels in `path`, found by running only the preprocessor over it.

        Raises QwenRawError if there are none.
        """
        text = self.compiler.run(
            [
                "-std=c++17",
                "-E",
                "-P",
                "-DSIMT_SCAN",
                *self._defines(),
                *self._includes(cuda=False),
                "-x",
                "c++",
                str(path),
            ],
            path.name,
        )
        found = [_parse_entry(text, match.end(), path.name) for match in _ENTRY.finditer(text)]
        if not found:
            raise QwenRawError(f'{path.name} has no kernel: an entry point is extern "C" __global__ void name(…)')
        return found

    def _source(self, stem: str) -> Path:
        for folder in (*self.kernel_folders, self.source_root):
            if (folder / f"{stem}.cu").is_file():
                return folder / f"{stem}.cu"
        known = ", ".join(stems(self.source_root))
        raise QwenRawError(f"there is no kernel file {stem}.cu in {self.source_root}: the kernels are {known}")

    def _includes(self, *, cuda: bool) -> list[str]:
        root = self.source_root.resolve()
        own = [f"-I{root}", f"-I{root / 'include'}", f"-I{root / 'sim'}"]
        folders = toolchain.cuda_headers().folders if cuda else ()
        return [*own, *(argument for folder in folders for argument in ("-isystem", str(folder)))]

    def _runtime_entry(self) -> tuple[str, dict[str, object]]:
        folder = self.source_root / "sim"
        files = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
        facts = self._facts("simt", self.compiler.runtime_flags(), files)
        return _entry_name("simt", "runtime", facts), facts

    def _defines(self) -> list[str]:
        return [f"-D{define}" for define in self.defines]

    def _facts(self, stem: str, flags: tuple[str, ...], files: list[Path]) -> dict[str, object]:
        contents = [(file.name, file.read_text()) for file in files]
        return {"stem": stem, "flags": flags, "compiler": self.compiler.version, "files": contents}

    def _compile_runtime(self, sources: list[Path], soname: str, out: Path) -> None:
        flags = self.compiler.runtime_flags()

        def compile_one(source: Path, unit: Path) -> None:
            self.compiler.run([*flags, "-c", str(source), "-o", str(unit)], f"the simulator ({source.name})")

        with tempfile.TemporaryDirectory(prefix="qwen-raw-") as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            units = [Path(folder) / f"{source.stem}.o" for source in sources]
            for _ in pool.map(compile_one, sources, units):
                pass  # map's results raise what a compilation raised
            link = ["-shared", "-Wl,-z,defs", f"-Wl,-soname,{soname}.so", "-ldl", "-o", str(out)]
            self.compiler.run([*map(str, units), *link], "the simulator")

    def _compile_kernel(self, path: Path, runtime: Path, out: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="qwen-raw-") as folder:
            stub, unit = Path(folder) / f"{path.stem}.cpp", Path(folder) / f"{path.stem}.o"
            stub.write_text(_stub(path.resolve(), self.entry_points(path)))
            # Reports and debug information name files relative to the sources.
            roots = (f"{self.source_root.resolve()}/", f"{path.resolve().parent}/")
            flags = [*self.compiler.kernel_flags(self.variant), f"-ffile-prefix-map={folder}=."]
            flags += [f"-ffile-prefix-map={root}=" for root in roots]
            self.compiler.run(
                [*flags, *self._defines(), *self._includes(cuda=True), "-c", str(stub), "-o", str(unit)],
                f"{path.name} for the simulator",
                folder,
            )
            # Of the sanitizers' libraries only AddressSanitizer's is linked: the runtime has the others' call-backs.
            sanitizers = [f for f in flags if f.startswith("-fsanitize=address")]
            self.compiler.run(
                ["-shared", "-Wl,-z,now", *sanitizers, str(unit), str(runtime), "-o", str(out)], path.name
            )

    def _entry(self, name: str, facts: dict[str, object], compile_to: Callable[[Path], None]) -> Path:
        folders = [self.cache_dir] if self.cache_dir else list(cache_folders())
        for folder in folders:
            if _is_whole(folder / f"{name}.so"):
                return folder / f"{name}.so"
        failures = []
        for folder in folders:
            draft = folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.so"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                draft.touch()
            except OSError as error:
                failures.append(f"{folder} ({error.strerror or error})")
                continue
            began = time.monotonic()
            try:
                compile_to(draft)
                _publish(draft, folder / f"{name}.so", facts, time.monotonic() - began)
            finally:
                draft.unlink(missing_ok=True)
            return folder / f"{name}.so"
        raise QwenRawError(f"no folder for compiled kernels can be written: {', '.join(failures)}; set QWEN_RAW_CACHE")


def _headers(path: Path, root: Path) -> list[Path]:
    if path.is_relative_to(root):
        return project_headers(path, root)
    # A kernel from elsewhere: its own includes are found in the project's include folder.
    return sorted((root / "include").glob("*.cuh"))


def _entry_name(stem: str, variant: str, facts: dict[str, object]) -> str:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{stem}.sim-{variant}.{key[:20]}"


def _parse_entry(text: str, start: int, file: str) -> EntryPoint:
    bounds = "0"
    while match := _NAME.match(text, start):
        parts = _split(text, match.end())
        if match[1] != "SIMT_SCAN_BOUNDS":
            names = [_parameter_name(part) for part in parts]
            return EntryPoint(match[1], bounds, tuple(name for name in names if name))
        bounds = parts[0]
        start = match.end() + sum(len(part) + 1 for part in parts)
    raise QwenRawError(f"{file}: cannot read the kernel at {text[start : start + 60]!r}")


def _split(text: str, start: int) -> list[str]:
    """The comma-separated parts from `start` to the parenthesis that closes there; commas inside brackets stay."""
    parts, depth, begin = [], 0, start
    for index in range(start, len(text)):
        c = text[index]
        if (c == "," and depth == 0) or (c == ")" and depth == 0):
            parts.append(text[begin:index])
            begin = index + 1
            if c == ")":
                return parts
        depth += (c in "([{<") - (c in ")]}>")
    raise QwenRawError("a parameter list is not closed")


def _parameter_name(declaration: str) -> str:
    words = re.findall(r"\w+", declaration)
    return words[-1] if words else ""


def _stub(path: Path, entries: list[EntryPoint]) -> str:
    lines = []
    for entry in entries:
        names = "".join(f', "{name}"' for name in entry.params) or ', ""'
        lines.append(f"  SIMT_ENTRY({entry.name}, ({entry.bounds}){names})")
    return f'#include "{path}"\n#include "entry.h"\nSIMT_ENTRIES(\n' + ",\n".join(lines) + ")\n"


def _is_whole(path: Path) -> bool:
    """Whether the shared object is there and is the one that its .json describes."""
    try:
        meta = json.loads(path.with_suffix(".json").read_bytes())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False  # absent, unreadable or cut short: it is built again
    return isinstance(meta, dict) and meta.get("sha256") == digest


def _publish(draft: Path, target: Path, facts: dict[str, object], seconds: float) -> None:
    digest = hashlib.sha256(draft.read_bytes()).hexdigest()
    meta = {key: value for key, value in facts.items() if key != "files"}
    meta |= {"sha256": digest, "seconds": round(seconds, 2)}
    note = draft.with_suffix(".json")
    try:
        note.write_text(json.dumps(meta, indent=1))
        os.replace(note, target.with_suffix(".json"))
    finally:
        note.unlink(missing_ok=True)
    os.replace(draft, target)
