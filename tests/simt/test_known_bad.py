"""Every known-bad variant is found, by its name on the command line, and only the mistake is what is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qwen_raw.errors import QwenRawError
from qwen_raw.simt import case_tools, cases, torture
from qwen_raw.simt import run as sanitized
from qwen_raw.simt.known_bad import VARIANTS, Variant
from qwen_raw.simt.torture import run, run_seed, setting_of

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.skipif(sanitized.active(), reason="worlds of the plain variant cannot run under AddressSanitizer"),
]
# Seeds within which each must be found, at how many ranks, and what is seen.
FOUND = {
    "two_buffers": (50, 4, "deadlock"),
    "no_fence": (20, 2, "expected"),
    "no_fence_own": (10, 2, "expected"),
    "monotone_counter": (100, 4, "expected"),
    "overwritten_flag": (50, 4, "deadlock"),
    "one_payload": (20, 2, "expected"),
    "float_sentinel": (10, 2, "deadlock"),
    "one_word": (10, 2, "expected"),
    "wrong_length": (10, 2, "expected"),
    "first_thread_rotates": (10, 2, "expected"),
    "own_block_rotates": (10, 2, "deadlock"),
    "early_rotation": (20, 4, "deadlock"),
    "armed_first": (4, 2, "deadlock"),
    "stays_taken": (4, 2, "expected"),
    "late_wait": (5, 1, "expected"),
    "one_tag": (10, 2, "expected"),
    "arrival_as_flag": (20, 1, "expected"),
    "early_push": (20, 1, "a push before the cluster's first barrier"),
    "early_keys": (20, 1, "expected"),
    "early_ring": (20, 2, "expected"),
    "two_slots": (20, 2, "deadlock"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_mistake_is_found(name: str) -> None:
    seeds, ranks, symptom = FOUND[name]
    report = run(setting_of(name, ranks), seeds)
    assert report.failed > 0, f"{report.line()}: {VARIANTS[name].why}"
    assert report.symptom is not None and symptom in report.symptom


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.race])
def test_without_the_mistake_the_same_seeds_pass(name: str) -> None:
    seeds, ranks, _ = FOUND[name]
    report = run(setting_of(VARIANTS[name].case, ranks, weak_local=VARIANTS[name].weak_local), seeds)
    assert report.failed == 0, report.line()


def test_a_payload_in_own_memory_is_in_order_where_own_stores_are() -> None:
    """What `--weak-local` is for: stores to the own rank's memory that are visible at once hide the missing fence."""
    assert run(replace(setting_of("no_fence_own", 2), weak_local=False), 50).failed == 0


def test_two_ranks_cannot_show_the_counter_that_needs_a_third() -> None:
    assert run(setting_of("monotone_counter", 2), 100).failed == 0


@pytest.mark.parametrize(
    ("name", "kept", "why"),
    [
        ("monotone_counter", slice(0, 2), "threads may push to one peer each, if flags tell the peers apart"),
        ("two_slots", slice(0, 2), "two slots are enough with the credit"),
    ],
)
def test_half_of_an_edit_is_harmless(monkeypatch: pytest.MonkeyPatch, name: str, kept: slice, why: str) -> None:
    """What fails is the mistake that the variant names, not what was rearranged to make room for it."""
    variant = VARIANTS[name]
    half = replace(variant, name=f"half_{name}", edits=variant.edits[kept], header=None, header_edits=())
    monkeypatch.setitem(VARIANTS, half.name, half)
    seeds, ranks, _ = FOUND[name]
    report = run(setting_of(half.name, ranks), seeds)
    assert report.failed == 0, f"{report.line()}: {why}"


def test_the_wrong_length_is_harmless_while_sizes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SIZES", (2,) * 5)
    assert run(setting_of("wrong_length", 2), 50).failed == 0


def test_a_float_sentinel_is_harmless_without_negative_subnormals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_tools, "TRAPS", (0x80000000, 0x00008000, 0x00000000))
    assert run(setting_of("float_sentinel", 2), 50).failed == 0


def test_a_slot_that_was_not_taken_is_torn() -> None:
    """Most failures lose a doorbell and deadlock; in a few the payload changes under the copy, its ring late enough."""
    setting = setting_of("two_slots", 2)
    library = setting.library()
    failures = (run_seed(setting, seed, library) for seed in range(200))
    assert any(failure and "expected" in str(failure.error) for failure in failures)


def test_an_edit_that_does_not_fit_is_an_error() -> None:
    variant = Variant("stale", "signal", "signal", "made for another kernel", edits=(("no such text", ""),))
    with pytest.raises(QwenRawError, match="its edit fits 0 times, not once"):
        variant.source()


def test_a_failing_seed_is_replayed_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """What a reader sees: the accesses that led there, and the symptom; exit code 1."""
    report = run(setting_of("no_fence", 2), 50)
    assert torture.main(["no_fence", "--ranks", "2", "--replay", str(report.first_failing)]) == 1
    printed = capsys.readouterr().out
    assert "  include/flags.cuh:" in printed and "  allreduce_twoshot.cu:" in printed and "lands" in printed
    assert f"seed {report.first_failing}: {report.symptom}" in printed
    assert torture.main(["no_fence", "--ranks", "2", "--seeds", "50", "--jobs", "1"]) == 1
