"""What every bench shares: the read ceiling, event timing, and the JSON that a quoted figure must come from."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from loaders.synthetic import random_config
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.cli.process import guarded
from qwen_raw.device import U32
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import UsageError
from qwen_raw.kernels.bandwidth import read_all
from qwen_raw.kernels.synthetic import synthetic_bf16
from qwen_raw.observe.machine import cpu_cores, cpu_name
from qwen_raw.placement import degree

RESULTS = Path(__file__).parent / "results"  # what documents quote
OUTPUT = Path("results")  # of runs that do not say: an interrupted one must not take the place of those
SETTLE_S = 1.5  # of work before times that are differences of others, or a record
PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "numpy")


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of repeated runs."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (max(self.samples) - min(self.samples)) / self.median


def command(main: Callable[[], int]) -> NoReturn:
    """Run a bench and exit with its code; an error is one line on stderr, 2 for a wrong request, 1 for a failure."""
    sys.exit(guarded("bench", main))


def time_ms(
    devices: CudaDevice | Sequence[CudaDevice],
    work: Callable[[], None],
    *,
    repeats: int,
    warmup: int = 1,
    before: Callable[[], None] | None = None,
) -> Timing:
    """Event time of `work`, each repeat on its own; what `work` queues is all that is timed. The slowest device's.

    `before`: queued ahead of each repeat, not timed.
    """
    devs = devices if isinstance(devices, Sequence) else [devices]
    for _ in range(warmup):
        work()
    samples = []
    for _ in range(repeats):
        if before is not None:
            before()
        pairs = [(dev.event(), dev.event()) for dev in devs]
        for dev, (begin, _) in zip(devs, pairs, strict=True):
            begin.record(dev.stream)
        work()
        for dev, (_, end) in zip(devs, pairs, strict=True):
            end.record(dev.stream)
        samples.append(max(end.elapsed_ms(begin) for begin, end in pairs))
        for pair in pairs:
            for event in pair:
                event.close()
    return Timing(tuple(samples))


def time_in_turns(
    devices: CudaDevice | Sequence[CudaDevice],
    works: Sequence[Callable[[], None]],
    *,
    repeats: int,
    settle_s: float = SETTLE_S,
) -> list[Timing]:
    """Event times of several pieces of work, one repeat of each at a time, so that a clock that drifts drifts for all.

    `settle_s`: seconds for which the work runs untimed first: clocks of an idle GPU are not yet those that last.
    """

    def once(work: Callable[[], None]) -> float:
        return time_ms(devices, work, repeats=1, warmup=0).median

    until = time.perf_counter() + settle_s
    settled = False
    while not settled:
        for work in works:
            once(work)
        settled = time.perf_counter() >= until
    rounds = [[once(work) for work in works] for _ in range(repeats)]
    return [Timing(samples) for samples in zip(*rounds, strict=True)]


def ranks_of(tp: int | None, ordinals: Sequence[int] | None) -> Sequence[int]:
    """The GPU of each rank: those that are named, or 0, 1, …"""
    if ordinals is not None and tp is not None and tp != len(ordinals):
        raise UsageError(f"tp {tp} with {len(ordinals)} devices: name one GPU a rank, or leave one out")
    return ordinals or range(tp or 1)


@contextmanager
def open_gpus(tp: int | None, ordinals: Sequence[int] | None) -> Iterator[list[CudaDevice]]:
    """One device a rank, on the GPUs that are named or 0, 1, …; closed after the block."""
    with ExitStack() as stack:
        yield [stack.enter_context(CudaDevice(n)) for n in ranks_of(tp, ordinals)]


def packs(text: str) -> int:
    """An argument: bytes, whole packs of 16."""
    value = positive(text)
    if value % 16:
        raise argparse.ArgumentTypeError(f"{text} bytes are not whole packs of 16")
    return value


def amount(text: str) -> float:
    """An argument: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def check_shares(sizes: Sequence[str], degrees: Sequence[int], *, fp8: bool) -> None:
    """UsageError for a size that does not split so, before a GPU is looked for."""
    for size in sizes:
        for tp in degrees:
            degree(tp, None, random_config(size), fp8=fp8)


def read_ceiling(dev: CudaDevice, nbytes: int = 4 << 30, repeats: int = 7) -> float:
    """bytes/s that plain streaming reads of random data reach on this device now."""
    data, sink = dev.empty((nbytes // 2,), np.dtype(np.uint16)), dev.zeros((1,), U32)
    synthetic_bf16(dev, data, 1, 1, 1.0)
    timing = time_ms(dev, lambda: read_all(dev, data, sink), repeats=repeats, warmup=2)
    return nbytes / (timing.median * 1e-3)


def environment(dev: CudaDevice | None, commit: str | None) -> dict[str, Any]:
    """What a figure depends on besides the code. `dev` None: no GPU had a part in it."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    where = {"cpu": cpu_name(), "cores": cpu_cores()} if dev is None else {"gpu": dev.name, "driver": dev.driver}
    return {
        **where,
        "python": sys.version.split()[0],
        "packages": versions,
        "commit": commit or git_commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def quoted(source: str, **figures: float | None) -> dict[str, Any]:
    """What another engine took in a run that is not this one, for a row: "quoted", or nothing without a figure."""
    known = {name: figure for name, figure in figures.items() if figure is not None}
    return {"quoted": {"from": source, **known}} if known else {}


def git_commit() -> str:
    """The checkout's commit, "+" appended if it has changes; "unknown" outside a checkout (say so with --commit)."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=here, capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.returncode else "")


def result_arguments(parser: Parser, files: str) -> None:
    """The flags of every bench that writes results: --commit and --output."""
    parser.add_argument("--commit", help="recorded in the JSON where there is no git checkout")
    parser.add_argument("--output", type=folder, default=OUTPUT, help=f"folder of {files}; default {OUTPUT}")


def folder(text: str) -> Path:
    """A folder that is there or can be made: said before anything is measured."""
    path = Path(text)
    there = next(p for p in (path, *path.parents, Path()) if p.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: {there} is not a folder")
    return path


def save(
    name: str, env: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path = OUTPUT, variant: str = ""
) -> Path:
    """Write {environment, command, rows} of bench `name` to `folder`/name.json, or name_variant.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"{name}_{variant}.json" if variant else f"{name}.json")
    command = ["python", "-m", f"bench.{name}", *recorded(sys.argv[1:])]
    path.write_text(json.dumps({"environment": env, "command": command, "rows": list(rows)}, indent=1) + "\n")
    return path


def recorded(words: Sequence[str]) -> list[str]:
    """A command's words without --output, which names a folder of one machine."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == "--output":
            next(rest, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return kept
