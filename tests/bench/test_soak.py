"""bench.soak on simulated ranks: a clean run has no mismatch, and a wrong id or hash is one."""

from dataclasses import replace
from typing import Any

import pytest

from bench import soak
from bench.decode import COMMS
from qwen_raw.simt.device import SimDevice


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SMALL", replace(soak.SMALL, D=64, H=4, KV=2, I=64, V=90, L=1))
    monkeypatch.setattr(soak, "LONGEST", 4)


def ran(limit_s: float = 60.0) -> soak.Result:
    devices: Any = SimDevice.of_world(2)
    try:
        return soak.run(devices, None, "auto", (6, 2, 4, limit_s))
    finally:
        devices[0].close()


@pytest.mark.usefixtures("small")
def test_a_clean_run() -> None:
    result = ran()
    assert (result.prompts, result.mismatches, result.tp, result.comm) == (6, 0, 2, "auto")
    assert result.path in COMMS and result.path != "auto", "what the sums took, not what was asked for"
    assert result.first_tok_s > 0 and result.last_tok_s > 0


@pytest.mark.usefixtures("small")
def test_the_limit_ends_it_early() -> None:
    assert ran(limit_s=0.0).prompts == 1


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("what", ["ids", "logits_hash"])
def test_what_differs_from_the_first_time_is_a_mismatch(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = soak.answer, []

    def answer(*arguments: Any) -> soak.Answer:
        calls.append(arguments)
        got = real(*arguments)
        if len(calls) != 5:  # the fifth is prompt 3, the first one is not counted
            return got
        return replace(got, ids=(*got.ids[:-1], got.ids[-1] ^ 1)) if what == "ids" else replace(got, logits_hash=0)

    monkeypatch.setattr(soak, "answer", answer)
    assert ran().mismatches == 1
