"""bench.prefill_stages' rows, on simulated ranks whose clock is made up."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bench import prefill_stages
from bench.common import Timing
from qwen_raw.simt.device import SimDevice


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage costs what the prompt saves without it; alone, what its graph takes beyond the embedding's."""

    def time_in_turns(devices: Any, works: Sequence[Callable[[], None]], *, repeats: int) -> list[Timing]:
        for work in works:
            work()
        prompt, embed, head = Timing((100.0,)), Timing((1.0,)), Timing((2.0,))
        return [prompt, embed, head, *(Timing((90.0,) if i % 2 == 0 else (9.0,)) for i in range(len(works) - 3))]

    monkeypatch.setattr(prefill_stages, "time_in_turns", time_in_turns)
    devices: Any = SimDevice.of_world(ranks)
    rows = prefill_stages.measure(devices, "tiny-shakespeare-draft", "auto", [16, 10**6], 1, 1e12)
    devices[0].close()
    by_stage = {row["stage"]: row for row in rows}
    sums = ["reduce"] if ranks > 1 else []
    found = ["norm", "qkv", "attn", "o", "gate_up", "down", *sums]  # a small model: nothing is quantised
    assert list(by_stage) == ["prompt", "embed", *found, "head", "sum"] and by_stage["prompt"]["tp"] == ranks
    assert by_stage["norm"]["left_out_ms"] == pytest.approx(10) and by_stage["norm"]["alone_ms"] == pytest.approx(8)
    norms = 4 if ranks == 1 else 1  # the others are part of the sums
    assert by_stage["norm"]["alone_us_each"] == pytest.approx(8000 / norms) and by_stage["o"]["alone_us_each"] == 4000
    assert by_stage["sum"]["alone_ms"] == pytest.approx(1 + 8 * len(found))
    assert by_stage["norm"]["of_read"] > 0 and by_stage["down"]["tflop_s"] > 0
