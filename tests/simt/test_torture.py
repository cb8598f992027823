"""The protocols under a thousand schedules each; what torture prints, and that a failure can be replayed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from qwen_raw.simt import run as sanitized
from qwen_raw.simt import torture
from qwen_raw.simt.case_tools import Mismatch, Outputs, payload, rank_order_sum
from qwen_raw.simt.cases import CASES
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.native import SimError
from qwen_raw.simt.torture import Failure, Setting, run

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(sanitized.active(), reason="worlds of the plain variant cannot run under AddressSanitizer"),
]
PROTOCOLS = ("allreduce_lamport", "allreduce_flag", "allreduce_twoshot", "gemv_exchange", "sample_ranks", "signal")
SEEDS = 1000


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("case", PROTOCOLS)
def test_a_protocol_survives(case: str, ranks: int) -> None:
    """Half of the seeds with local stores delayed too. A whole small model runs slowly, so fewer times."""
    jobs, seeds = os.cpu_count() or 1, SEEDS // (10 * ranks) if case == "gemv_exchange" else SEEDS
    for weak_local, first in ((False, 0), (True, seeds // 2)):
        report = run(Setting(case, ranks, weak_local=weak_local), seeds // 2, first_seed=first, jobs=jobs)
        assert report.failed == 0, report.line()


@pytest.mark.parametrize("case", CASES)
def test_a_case_holds_under_the_race_checker(case: str) -> None:
    report = run(Setting(case, max(2, CASES[case].least_ranks), race=True), 5)
    assert report.failed == 0, report.line()


@pytest.mark.parametrize("case", ["attn_decode", "chain"])
def test_dependent_launches_survive(case: str) -> None:
    report = run(Setting(case, 1), 200)
    assert report.failed == 0, report.line()


def test_a_seed_is_one_run() -> None:
    """The same seed gives the same schedule, access by access."""
    setting = Setting("allreduce_lamport", 3)
    library = setting.library()
    traces = []
    for _ in range(2):
        with setting.world(17, library, trace=500) as world:
            CASES[setting.case].run(world, np.random.default_rng(17))
            traces.append(world.trace())
    assert traces[0] == traces[1] and len(traces[0].splitlines()) > 100


def test_payloads_hold_what_a_sentinel_protocol_fears() -> None:
    words = np.concatenate([payload(np.random.default_rng(seed), 4).view(np.uint32) for seed in range(50)])
    assert {0x80000000, 0x80000001, 0x80010000} <= set(words.tolist())
    assert rank_order_sum([np.full(8, 0x3F80, np.uint16)] * 3).tolist() == [3.0] * 8


def test_guard_bands_and_values_are_checked() -> None:
    one, two = (np.full(8, bits, np.uint16) for bits in (0x3F80, 0x4000))
    with SimDevice() as device:
        outputs = Outputs(device, (8, 8))
        outputs.view(0).upload(one)
        with pytest.raises(
            Mismatch, match="rank 0, call 1: element 0 is 0xeeee, expected 0x4000 \\(8 wrong\\)"
        ) as caught:
            outputs.check([one, two], "call", (3, 5))
        assert (caught.value.rank, caught.value.launch) == (0, 5)
        outputs.view(1).upload(two)
        outputs.check([one, two], "call", (3, 5))
        assert [out.tolist() for out in outputs.results()] == [one.tolist(), two.tolist()]
        outputs._whole.view((1,), 16).upload(np.zeros(1, np.uint16))
        with pytest.raises(Mismatch, match="guard band"):
            outputs.check([one, two], "call", (3, 5))


def test_a_negative_zero_is_not_a_zero() -> None:
    with SimDevice() as device:
        outputs = Outputs(device, (1,), np.dtype(np.float32))
        outputs.view(0).upload(np.array([-0.0], np.float32))
        with pytest.raises(Mismatch, match="element 0 is 0x80000000, expected 0x0"):
            outputs.check([np.zeros(1, np.float32)], "result", (0,))


def test_a_replay_ends_where_the_wrong_value_was_made() -> None:
    """The accesses up to the end of the launch at fault, and a few more; for any other failure the last ones."""
    lines = tuple(f"{i:8}  rank {i % 2}  kernel #{10 + i // 20}  block 0  thread 0  store {i}" for i in range(100))
    shown = Failure(Mismatch("wrong", rank=1, launch=2), lines).shown(before=5)
    assert shown == lines[55 : 60 + torture.SHOWN_AFTER]
    assert Failure(SimError("deadlock"), lines).shown(before=5) == lines[95:]


def test_a_replay_shows_one_look_of_a_poll() -> None:
    look, other = (f"rank 0  kernel #1  block 0  thread {t}  load rank 0 memory + 4 = 00000007" for t in (0, 1))
    lands = "rank 1  lands rank 0 memory + 4 = 00000008"
    again = look.replace("7", "8")
    lines = tuple(f"{i:8}  {what}" for i, what in enumerate((look, other, look, lands, look, again, other, again)))
    assert [line[:8].strip() for line in Failure(SimError("deadlock"), lines).shown()] == ["0", "1", "3", "5"]


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert torture.main(["--list"]) == 0
    assert "allreduce_lamport" in capsys.readouterr().out
    file = tmp_path / "rows.json"
    for ranks in ("2", "3"):
        assert torture.main(["signal", "--ranks", ranks, "--seeds", "20", "--jobs", "1", "--json", str(file)]) == 0
    assert "20 seeds, 0 failed (0.0 %)" in capsys.readouterr().out
    assert [row["ranks"] for row in json.loads(file.read_text())["rows"]] == [2, 3]
    assert torture.main(["signal", "--replay", "4"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "no protocol 'nonsense': there are allreduce_lamport"),
        (["signal", "--replay", "-1"], "a seed is at least 0"),
        (["signal", "--first-seed", "-5"], "a seed is at least 0"),
        (["signal", "--json", "/nowhere/x.json"], "a file in a folder that exists"),
        (["signal", "--json", "/dev/null"], "is no file of reports"),
        (["signal", "--json", "/"], "is no file of reports"),
        (["signal", "--json", __file__], "is no file of reports"),
        (["signal", "--ranks", "9"], "signal runs on 2 to 8 ranks, not 9"),
        (["signal", "--seeds", "0"], "at least 1"),
    ],
)
def test_wrong_requests(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert torture.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the workers are found in /proc")
@pytest.mark.parametrize("module", ["qwen_raw.simt.torture", "bench.torture"])
def test_ctrl_c_that_reaches_only_the_parent_ends_the_workers(module: str, tmp_path: Path) -> None:
    words = ["allreduce_lamport", "--ranks=8"] if module.startswith("qwen_raw") else [f"--output={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words, "--seeds=1000000", "--jobs=2"],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers: list[str] = []
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None and not workers:
        time.sleep(0.5)
        workers = children.read_text().split()
        if workers and any(b"python" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in workers):
            workers = []  # a compiler
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert workers and time.monotonic() - begin < 20
    assert process.returncode == 130 and err.endswith(b": interrupted\n") and err.count(b"\n") == 1, err.decode()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
