"""cuda_src/X.cu → cubin, through NVRTC and a cache on disk.

An entry's key is the SHA-256 of everything the result depends on: the source, every project header that it includes,
the options, the architecture, and the versions of NVRTC and of the CUDA headers. An entry is three files beside each
other (.cu, .json, .cubin), each written under another name and renamed; whoever renames last wins, all wrote the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from qwen_raw import paths
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels import cubin, toolchain

OPTIONS = ("-std=c++17", "-lineinfo", "--fmad=true")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ERROR = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<what>(?:catastrophic )?error.*)$")


def stems(source_root: Path | None = None) -> list[str]:
    """The names of all kernel files."""
    return sorted(path.stem for path in (source_root or paths.cuda_src()).glob("*.cu"))


def build(
    stem: str,
    arch: str,
    *,
    source_root: Path | None = None,
    cache_dir: Path | None = None,
    defines: Iterable[str] = (),
) -> Path:
    """The cubin of `stem`.cu for `arch` (such as "sm_90a"): from the cache, or compiled into it.

    `defines`: "NAME=VALUE" each. `cache_dir`: instead of the user's cache.
    Raises QwenRawError: for a compile error with file and line, for missing headers with the places searched.
    """
    root = source_root or paths.cuda_src()
    path = root / f"{stem}.cu"
    if not path.is_file():
        raise QwenRawError(f"there is no kernel file {path}: the kernels are {', '.join(stems(root))}")
    source = path.read_text()
    included = project_headers(path, root)
    version = toolchain.nvrtc_version()
    headers = toolchain.cuda_headers(version[0])
    options = (*OPTIONS, f"--gpu-architecture={arch}", *(f"-D{define}" for define in defines))
    facts = {
        "stem": stem,
        "arch": arch,
        "options": options,
        "nvrtc": version,
        "cuda_headers": headers.version,
        "source": source,
        "headers": [(header.relative_to(root).as_posix(), header.read_text()) for header in included],
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    name = f"{stem}.{arch}.{key[:20]}"

    folders = [cache_dir] if cache_dir else list(cache_folders())
    for folder in folders:
        if _is_whole(folder / name):
            return _file(folder / name, "cubin")
    include = tuple(f"-I{folder}" for folder in (root / "include", *headers.folders))
    began = time.monotonic()
    try:
        image, log = toolchain.compile_cubin(source.encode(), str(path.resolve()), (*options, *include))
    except toolchain.CompileError as error:
        raise QwenRawError(_first_errors(error, root.resolve(), f"{stem}.cu for {arch}")) from error
    facts |= {
        "headers": [header.relative_to(root).as_posix() for header in included],
        "include": include,
        "seconds": round(time.monotonic() - began, 2),
        "log": log,
        "cubin_sha256": hashlib.sha256(image).hexdigest(),
        "resources": {kernel: asdict(r) for kernel, r in cubin.parse(image, stem).items()},
    }
    del facts["source"]
    return _publish(folders, name, source, facts, image)


def project_headers(path: Path, root: Path) -> list[Path]:
    """Every header that `path` includes in quotes, directly or not.

    A name is looked up beside the including file, then in `root`/include. Conditional compilation is ignored: a header
    that another compiler would skip counts too. One that does not exist is left to the compiler to complain about.
    """
    found: set[Path] = set()
    pending = [path]
    while pending:
        current = pending.pop()
        for name in _INCLUDE.findall(current.read_text()):
            for folder in (current.parent, root / "include"):
                header = Path(os.path.normpath(folder / name))
                if header.is_file() and header.is_relative_to(root):
                    if header not in found:
                        found.add(header)
                        pending.append(header)
                    break
    return sorted(found)


def cache_folders() -> Iterator[Path]:
    """Where cubins are looked for, and the first of these that can be written is where they are put.

    $QWEN_RAW_CACHE, or $XDG_CACHE_HOME/qwen-raw, or ~/.cache/qwen-raw; then a private folder for temporary files.
    """
    chosen = os.environ.get("QWEN_RAW_CACHE")
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if chosen:
        yield Path(chosen)
    elif os.path.isabs(xdg):
        yield Path(xdg) / "qwen-raw"
    else:
        home = os.path.expanduser("~")
        if os.path.isabs(home):
            yield Path(home) / ".cache" / "qwen-raw"
    private = _private_folder()
    if private is not None:
        yield private


def _private_folder() -> Path | None:
    """A folder under the system's temporary one that only this user can write; None if the name is someone else's."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    folder = Path(tempfile.gettempdir()) / f"qwen-raw-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    ours = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and status.st_mode & 0o077 == 0)
    return folder if stat.S_ISDIR(status.st_mode) and ours else None


def _file(entry: Path, suffix: str) -> Path:
    return entry.with_name(f"{entry.name}.{suffix}")


def _is_whole(entry: Path) -> bool:
    """Whether the entry is there and its cubin is the one that its .json describes."""
    try:
        meta = json.loads(_file(entry, "json").read_bytes())
        digest = hashlib.sha256(_file(entry, "cubin").read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False  # absent, unreadable or cut short: it is built again
    return isinstance(meta, dict) and meta.get("cubin_sha256") == digest


def _publish(folders: list[Path], name: str, source: str, facts: dict[str, object], image: bytes) -> Path:
    """Writes an entry into the first folder that takes it; the cubin last, so that a reader finds its .json."""
    files = {"cu": source.encode(), "json": json.dumps(facts, indent=1).encode(), "cubin": image}
    failures = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for suffix, content in files.items():
                _replace(_file(folder / name, suffix), content)
        except OSError as error:
            if _is_whole(folder / name):  # another process was faster and holds the file open
                return _file(folder / name, "cubin")
            failures.append(f"{folder} ({error.strerror or error})")
            continue
        return _file(folder / name, "cubin")
    raise QwenRawError(f"no folder for compiled kernels can be written: {', '.join(failures)}; set QWEN_RAW_CACHE")


def _replace(target: Path, content: bytes) -> None:
    draft = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(content)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _first_errors(error: toolchain.CompileError, root: Path, what: str, most: int = 5) -> str:
    """The compiler's first error as "cuda_src/x.cu:12: error: …" with its source line, and the next ones' headlines."""
    lines = error.log.splitlines()
    shown: list[str] = []
    for index, line in enumerate(lines):
        match = _ERROR.match(line)
        if match is None:
            continue
        file = Path(match["file"])
        place = Path(root.name) / file.relative_to(root) if file.is_relative_to(root) else file
        shown.append(f"{place}:{match['line']}: {match['what']}")
        if len(shown) == 1 and index + 1 < len(lines):
            shown.append(lines[index + 1].rstrip())
        if len(shown) > most:
            break
    if not shown:  # not about a line: an option, an architecture that this NVRTC does not know
        shown = [f"{what} does not compile: {error}", *lines[:most]]
    return "\n".join(shown)
