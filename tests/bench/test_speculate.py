"""bench.speculate's rows, on a simulated device: acceptance is what it was forced to be."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from bench import speculate
from bench.common import Timing
from qwen_raw.simt.device import SimDevice


@pytest.mark.parametrize("own", [False, True])
def test_rows_of_forced_acceptance(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    def time_ms(devices: Any, work: Callable[[], None], *, repeats: int) -> Timing:
        work()
        return Timing((1.6,))

    monkeypatch.setattr(speculate, "time_ms", time_ms)
    monkeypatch.setattr(speculate, "PASSES", 1)
    asked = Namespace(
        model="tiny-shakespeare-draft", draft="tiny-shakespeare-draft", context=3, tokens=7, guesses=2, repeats=1,
        acceptance=[0.0, 1.0], spec_loop=["queued"] if own else ["queued", "device"],
    )  # fmt: skip
    device, *draft = SimDevice.of_world(1 + own)
    rows = list(speculate.forced([device], asked, draft[0] if own else None))  # type: ignore[list-item, arg-type]
    none, all_ = (row for row in rows if row["loop"] == "queued")
    device.close()
    assert all_["draft_device"] == (1 if own else None)
    assert (none["forced"], none["counts"]["right"], none["counts"]["passes"]) == (0.0, 0, 6)
    assert (all_["forced"], all_["counts"]["acceptance"], all_["counts"]["passes"]) == (1.0, 1.0, 2)
    if not own:
        assert [row["loop"] for row in rows] == ["queued", "device"] * 2
        for queued, looped in zip(rows[::2], rows[1::2], strict=True):
            assert (looped["forced"], looped["counts"]) == (queued["forced"], queued["counts"] | {"loops": 1})
    assert none["plain_tok_s"] == all_["plain_tok_s"] > 0 and none["ratio"] == none["tok_s"] / none["plain_tok_s"]
    assert none["counts"]["verify"] == "exact"  # so few weights
    assert none["pass_us"] == pytest.approx(1600.0) and all_["seen_us"] > 0


def test_identical_prompts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact passes all of them; with ids that are not plain decode's, none."""
    device, real = SimDevice(), speculate.SpeculativeRunner.generate

    def other(self: Any, *args: Any, **request: Any) -> Any:
        return (token + 1 for token in real(self, *args, **request))

    for verify, spoilt, want in (("exact", False, 2), ("rows", True, 0)):
        if spoilt:
            monkeypatch.setattr(speculate.SpeculativeRunner, "generate", other)
        rows = list(speculate.identical([device], 2, 1, 4, None, verify))  # type: ignore[list-item]
        assert [(row["by"], row["verify"], row["identical"]) for row in rows] == [
            (by, verify, want) for by in ("n-grams", "draft")
        ]
    device.close()
