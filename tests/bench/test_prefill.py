"""bench.prefill's rows, on simulated ranks."""

from typing import Any

import pytest

from bench import prefill
from bench.common import quoted
from qwen_raw.simt.device import SimDevice


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs from the call to the first id, each prompt says its buckets, and the host waits once."""
    monkeypatch.setattr("qwen_raw.model.state.CHUNK", 16)
    monkeypatch.setattr(prefill, "TOKENS", 2)
    ticks = iter(range(100))
    monkeypatch.setattr(prefill.time, "perf_counter", lambda: 0.001 * next(ticks) ** 2)
    devices: Any = SimDevice.of_world(ranks)
    rows = prefill.measure(devices, "tiny-shakespeare-draft", "auto", [5, 37], 1)
    devices[0].close()
    assert [(row["prompt"], row["rows"], row["host_syncs"], row["tp"]) for row in rows] == [
        (5, "16", 1, ranks),
        (37, "16·3", 1, ranks),
    ]
    assert rows[0]["first_ms"] < rows[0]["ttft_ms"] < rows[1]["first_ms"], "made-up times grow"
    assert rows[0]["tok_s"] == pytest.approx(5e3 / rows[0]["ttft_ms"])
    assert prefill.line(rows[1]).startswith(f"tiny-shakespeare-draft bf16  {ranks:2}     37")


def test_vllm_is_quoted_beside() -> None:
    """A figure of another run is not named as if this one had measured it."""
    row = {
        "model": "random:7b",
        "dtype": "fp8",
        "tp": 1,
        "prompt": 2048,
        "rows": "2048",
        "ttft_ms": 29.0,
        "spread": 0.0,
    }
    row |= {"tok_s": 7e4, "tflop_s": 920.0, "host_syncs": 1, "first_ms": 30.0, "graph_bytes": 1 << 20}
    assert " 34.0 " not in prefill.line(row)
    row |= quoted("vLLM 0.25.1", ttft_ms=prefill.VLLM["random:7b", "fp8", 1][2048])
    assert row["quoted"] == {"from": "vLLM 0.25.1", "ttft_ms": 34.0} and " 34.0 " in prefill.line(row)
    assert "vLLM (quoted)" in prefill.COLUMNS and quoted("vLLM 0.25.1", ttft_ms=None) == {}
