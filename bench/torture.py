"""What docs/races.md quotes: the protocols without a failure, and how soon each known mistake is found.

    python -m bench.torture [--seeds N] [--bad-seeds N] [--jobs N]

Needs no GPU. Every protocol runs at 2, 4 and 8 ranks with stores to the own memory strong and weak, what needs no
second rank at one; every known-bad variant at 2, 4 and 8. Exit code 1 if a protocol failed or a mistake was missed.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bench.common import command, git_commit, result_arguments, save
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.simt.cases import CASES
from qwen_raw.simt.known_bad import VARIANTS
from qwen_raw.simt.toolchain import find_compiler
from qwen_raw.simt.torture import Report, Setting, run, setting_of

RANKS = (2, 4, 8)


def settings() -> Iterator[Setting]:
    """Everything that is run, the protocols first."""
    for weak_local in (False, True):
        for ranks in RANKS:
            for case in CASES.values():
                if case.least_ranks > 1:
                    yield Setting(case.name, ranks, weak_local=weak_local)
    for case in CASES.values():
        if case.least_ranks == 1:
            yield Setting(case.name, 1)
    for name in VARIANTS:
        for ranks in RANKS:
            yield setting_of(name, ranks)


def as_expected(report: Report) -> bool:
    """A protocol never fails; a mistake is found at every rank count that can show it, and only there."""
    if report.bad is None:
        return report.failed == 0
    return (report.failed > 0) == (report.ranks >= VARIANTS[report.bad].least_ranks)


def environment(commit: str | None) -> dict[str, Any]:
    """What the figures depend on besides the code; only the seconds depend on the machine."""
    return {
        "compiler": find_compiler().version,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "commit": commit or git_commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> int:
    parser = Parser("python -m bench.torture", description="protocols and known-bad variants under many schedules")
    parser.add_argument("--seeds", type=positive, default=10_000, help="of each protocol")
    parser.add_argument("--bad-seeds", type=positive, default=1000, help="of each known-bad variant")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="processes")
    result_arguments(parser, "torture.json")
    a = parser.parse_args()
    env, rows, good = environment(a.commit), [], True
    for setting in settings():
        report = run(setting, a.bad_seeds if setting.bad else a.seeds, jobs=a.jobs)
        good &= as_expected(report)
        print(report.line() + ("" if as_expected(report) else "  UNEXPECTED"), flush=True)
        rows.append(asdict(report))
        save("torture", env, rows, a.output)
    return 0 if good else 1


if __name__ == "__main__":
    command(main)
