"""bench.decode's rows, on simulated ranks whose clock is made up."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bench import decode
from bench.common import Timing
from qwen_raw.errors import UsageError
from qwen_raw.simt.device import SimDevice


def test_rows_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over ranks costs what the step takes longer than without it; bytes are those of all ranks."""

    def time_in_turns(devices: Any, works: Sequence[Callable[[], None]], *, repeats: int) -> list[Timing]:
        for work in works:
            work()
        return [Timing((7.0, 8.0, 9.0)), Timing((4.8,))]

    monkeypatch.setattr(decode, "time_in_turns", time_in_turns)
    devices: Any = SimDevice.of_world(2)
    (row,) = decode.measure(devices, "tiny-shakespeare-draft", "auto", "fp8", [0], 2, 1, 1e12)
    devices[0].close()
    assert (row["tp"], row["devices"], row["comm"], row["layers"]) == (2, [0, 1], "auto", 2) and row["kv"] == "fp8"
    assert row["tok_s"] == pytest.approx(250.0) and row["samples_us"] == pytest.approx([3500, 4000, 4500])
    assert row["reduce_us"] == pytest.approx((4000 - 2400) / 4)
    assert row["us_without_reduce"] == pytest.approx(2400.0) and row["host_tok_s"] > 0
    assert "tiny-shakespeare-draft bf16  fp8    2" in decode.line(row)


def test_a_model_that_does_not_split_is_refused() -> None:
    devices: Any = SimDevice.of_world(4)
    with pytest.raises(UsageError, match="tp 4 does not fit"):
        decode.open_runner(devices, "random:0.5b:bf16", 100)
    devices[0].close()
