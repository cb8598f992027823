"""Runs a protocol under many random schedules, and replays the one that broke it.

    python -m qwen_raw.simt.torture allreduce_lamport --ranks 8 --seeds 1000
    python -m qwen_raw.simt.torture two_buffers --ranks 8 --replay 3

A seed fixes everything: which thread runs when, which store is held back on which link, the payloads. Besides the
protocols there are variants of them with one mistake each (qwen_raw/simt/known_bad.py). Exit code 1 if any seed failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np

from qwen_raw.cli.arguments import Parser
from qwen_raw.cli.process import guarded
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.simt.case_tools import Mismatch
from qwen_raw.simt.cases import CASES
from qwen_raw.simt.known_bad import VARIANTS
from qwen_raw.simt.library import Library
from qwen_raw.simt.toolchain import Variant
from qwen_raw.simt.world import SimWorld

REMEMBERED = 1 << 20  # accesses that a replay keeps
SHOWN, SHOWN_AFTER = 60, 8  # lines of a trace before the failing launch ended, and after
_EVENT = re.compile(r" *\d+  rank (\d+)  \S+ #(\d+)  block \d+  thread \d+  ")  # what a thread did


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run; the seed comes on top."""

    case: str
    ranks: int
    bad: str | None = None  # a known-bad variant in place of the project's own kernel
    weak_local: bool = False
    race: bool = False

    def world(self, seed: int, library: Library, trace: int = 0) -> SimWorld:
        return SimWorld(
            self.ranks, seed=seed, weak_local=self.weak_local, race=self.race, trace=trace, library=library,
            memory=64 << 20,
        )  # fmt: skip

    def library(self) -> Library:
        """The compiled kernels. A variant's file is only needed until it is compiled, and lives that long."""
        variant: Variant = "race" if self.race else "plain"
        if self.bad is None:
            return Library(variant)
        with tempfile.TemporaryDirectory() as name:
            VARIANTS[self.bad].write(Path(name))
            library = Library(variant, kernel_folders=(Path(name),))
            library.load(VARIANTS[self.bad].stem)
        return library


@dataclass(frozen=True, slots=True)
class Report:
    """What came of many seeds."""

    case: str
    bad: str | None
    ranks: int
    weak_local: bool
    race: bool
    first_seed: int
    seeds: int
    failed: int
    first_failing: int | None
    symptom: str | None
    seconds: float

    def line(self) -> str:
        name = f"{self.bad} ({self.case})" if self.bad else self.case
        options = f"{', local stores weak' if self.weak_local else ''}{', race checker' if self.race else ''}"
        found = f", first {self.first_failing}: {self.symptom}" if self.failed else ""
        return (
            f"{name}, {self.ranks} ranks{options}: {self.seeds} seeds, {self.failed} failed "
            f"({100 * self.failed / max(self.seeds, 1):.1f} %), {self.seeds / self.seconds:.0f} schedules/s{found}"
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """What a seed led to; `trace`: its accesses, as SimWorld.trace() words them, if they were remembered."""

    error: QwenRawError
    trace: tuple[str, ...]

    def shown(self, before: int = SHOWN) -> tuple[str, ...]:
        """The end of the trace; for a wrong value, the accesses up to the end of the launch that it came from.

        Of a poll that reads the same value again and again the first look is shown.
        """
        lines = _without_repeats(self.trace)
        if not isinstance(self.error, Mismatch):
            return tuple(lines[-before:])
        ends: dict[str, int] = {}  # of the rank's launches, which begin in stream order
        for number, line in enumerate(lines, 1):
            event = _EVENT.match(line)
            if event and int(event[1]) == self.error.rank:
                ends[event[2]] = number
        end = list(ends.values())[self.error.launch]
        return tuple(lines[max(0, end - before) : end + SHOWN_AFTER])


def _without_repeats(trace: Sequence[str]) -> list[str]:
    last: dict[str, str] = {}  # by thread: what it did, the step aside
    lines = []
    for line in trace:
        event = _EVENT.match(line)
        if event:
            did = line[event.end() :]
            thread = event[0].split(maxsplit=1)[1]
            if did.startswith("load ") and last.get(thread) == did:
                continue
            last[thread] = did
        lines.append(line)
    return lines


def run_seed(setting: Setting, seed: int, library: Library, trace: int = 0) -> Failure | None:
    """The failure under this seed's schedule, or None. `trace`: how many accesses to remember."""
    with setting.world(seed, library, trace) as world:
        try:
            CASES[setting.case].run(world, np.random.default_rng(seed))
        except QwenRawError as error:
            return Failure(error, tuple(world.trace().splitlines()) if trace else ())
    return None


def _share(setting: Setting, seeds: range) -> list[tuple[int, str]]:
    """One process's part: (seed, symptom) of each failure."""
    library = setting.library()
    found = ((seed, run_seed(setting, seed, library)) for seed in seeds)
    return [(seed, str(failure.error).splitlines()[0]) for seed, failure in found if failure]


def _on_processes(setting: Setting, shares: Sequence[range], jobs: int) -> list[list[tuple[int, str]]]:
    """Each share's failures. Whatever ends this early, Ctrl-C above all, ends the workers: a share may take hours."""
    others = set(active_children())
    with ProcessPoolExecutor(jobs, initializer=_ignore_ctrl_c) as pool:
        try:
            return list(pool.map(_share, [setting] * len(shares), shares))
        except BrokenProcessPool as error:
            raise QwenRawError("a worker process died: with --jobs 1 its last words can be read") from error
        except BaseException:
            for worker in set(active_children()) - others:
                worker.terminate()
            raise


def _ignore_ctrl_c() -> None:
    """In a worker: a terminal sends it to all of them, and one answer is enough."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(setting: Setting, seeds: int, *, first_seed: int = 0, jobs: int = 1) -> Report:
    """Run `seeds` schedules from `first_seed` on, on `jobs` processes."""
    check(setting)
    began = time.monotonic()
    last = first_seed + seeds
    size = -(-seeds // jobs)
    shares = [range(at, min(at + size, last)) for at in range(first_seed, last, size)]
    if len(shares) > 1:
        setting.library()  # compiled once, before the workers look for it
        results = _on_processes(setting, shares, jobs)
    else:
        results = [_share(setting, share) for share in shares]
    failures = [failure for result in results for failure in result]
    first, symptom = failures[0] if failures else (None, None)
    return Report(
        case=setting.case,
        bad=setting.bad,
        ranks=setting.ranks,
        weak_local=setting.weak_local,
        race=setting.race,
        first_seed=first_seed,
        seeds=seeds,
        failed=len(failures),
        first_failing=first,
        symptom=symptom,
        seconds=round(time.monotonic() - began, 2),
    )


def check(setting: Setting) -> None:
    """Raises UsageError for a number of ranks that cannot be run."""
    least = CASES[setting.case].least_ranks
    if not least <= setting.ranks <= 8:
        raise UsageError(f"{setting.case} runs on {least} to 8 ranks, not {setting.ranks}")


def replay(setting: Setting, seed: int, events: int = SHOWN) -> int:
    """Run one seed and print the last `events` accesses that led to its failure. Returns the exit code."""
    check(setting)
    failure = run_seed(setting, seed, setting.library(), REMEMBERED)
    if failure is None:
        print(f"seed {seed}: no failure")
        return 0
    print(*failure.shown(events), sep="\n")
    print(f"seed {seed}: {failure.error}")
    return 1


def rows_of(path: Path) -> list[Any]:
    """The reports that `path` holds already; none where there is no such file. Raises UsageError for any other file."""
    if not path.exists():
        return []
    try:
        file = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError:  # not UTF-8, not JSON
        file = None
    rows = file.get("rows") if isinstance(file, dict) else None
    if not isinstance(rows, list):
        raise UsageError(f"--json {path} is there and is no file of reports: name another")
    return rows


def add_to_json(path: Path, report: Report, compiler: str) -> None:
    """Append a row to `path`, together with what it was run on."""
    rows = rows_of(path)
    where = {"compiler": compiler, "machine": platform.machine(), "python": platform.python_version()}
    row = asdict(report) | where | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    path.write_text(json.dumps({"rows": [*rows, row]}, indent=1) + "\n")


def _parser() -> Parser:
    parser = Parser("python -m qwen_raw.simt.torture", description="protocols under random schedules")
    parser.add_argument("kernel", nargs="?", metavar="KERNEL", help="a protocol, or a known-bad variant")
    parser.add_argument("--list", action="store_true", help="what there is to run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--weak-local", action="store_true", help="volatile stores to own memory are delayed too")
    parser.add_argument("--race", action="store_true", help="with the race checker: ten times slower")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this seed alone, with a trace")
    parser.add_argument("--events", type=int, default=SHOWN, help="lines of the trace before the failure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the report to a JSON list")
    return parser


def setting_of(name: str, ranks: int, *, weak_local: bool = False, race: bool = False) -> Setting:
    """The protocol or known-bad variant called `name`, with what the variant needs to show.

    Raises UsageError for a name that is neither.
    """
    variant = VARIANTS.get(name)
    if variant is not None:
        return Setting(variant.case, ranks, name, weak_local or variant.weak_local, race or variant.race)
    if name not in CASES:
        raise UsageError(f"no protocol {name!r}: there are {_names()}")
    return Setting(name, ranks, None, weak_local, race)


def _names() -> str:
    return f"{', '.join(CASES)}; with a mistake {', '.join(VARIANTS)}"


def _print_list() -> None:
    for case in CASES.values():
        print(f"{case.name:20} {case.what} ({case.least_ranks} to 8 ranks)")
    for variant in VARIANTS.values():
        print(f"{variant.name:20} {variant.case}, wrong: {variant.why}")


def _check_arguments(a: argparse.Namespace) -> None:
    """Raises UsageError before anything has been run."""
    if min(a.seeds, a.jobs, a.events) < 1:
        raise UsageError("--seeds, --jobs and --events are at least 1")
    if a.first_seed < 0 or (a.replay is not None and a.replay < 0):
        raise UsageError("a seed is at least 0")
    if a.json:
        rows_of(a.json)
        if not a.json.resolve().parent.is_dir():
            raise UsageError(f"--json {a.json}: name a file in a folder that exists")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    return guarded("torture", lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    a = _parser().parse_args(arguments)
    if a.list:
        _print_list()
        return 0
    if a.kernel is None:
        raise UsageError(f"name what to run: {_names()} (--list says what they are)")
    _check_arguments(a)
    setting = setting_of(a.kernel, a.ranks, weak_local=a.weak_local, race=a.race)
    if a.replay is not None:
        return replay(setting, a.replay, a.events)
    report = run(setting, a.seeds, first_seed=a.first_seed, jobs=a.jobs)
    print(report.line())
    if a.json:
        add_to_json(a.json, report, setting.library().compiler)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
