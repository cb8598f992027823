"""The arithmetic of the stats line."""

from dataclasses import replace

import pytest

from qwen_raw.observe.stats import Stats, Stopwatch

STATS = Stats(
    prompt_tokens=100,
    completion_tokens=41,
    prompt_s=0.5,
    decode_s=0.25,
    bytes_per_token=15_000_000_000,
    kv_bytes_per_token=1_000_000,
    read_ceiling=4e12,
    host_syncs=1,
    peak_bytes=(123, 45),
    logits_hash=0xBEEF,
)


def test_rates() -> None:
    assert STATS.prompt_tps == 200
    assert STATS.decode_tps == 160  # 40 after the first
    assert STATS.read_bytes_per_s == 160 * (15e9 + 120.5 * 1e6)  # positions 100 … 140 and their own: 120.5 on average


def test_line() -> None:
    assert STATS.line() == (
        "TTFT 500.0 ms for 100 tokens · 160.0 tok/s (40 after the first in 0.250 s) · "
        "2419.3 GB/s of weights and KV cache (60% of the read ceiling) · host syncs 1 · logits 0000beef"
    )
    assert "ceiling" not in replace(STATS, read_ceiling=None).line()


def test_nothing_measured_is_said_not_invented() -> None:
    one = replace(STATS, completion_tokens=1, decode_s=None)
    assert one.decode_tps is None and one.read_bytes_per_s is None
    assert "1 generated, too few for tok/s" in one.line()
    none = replace(STATS, completion_tokens=0, prompt_s=None, decode_s=None, logits_hash=None)
    assert none.line() == "TTFT - ms for 100 tokens · 0 generated, too few for tok/s · host syncs 1 · logits -"
    assert replace(none, prompt_tokens=1).line().startswith("TTFT - ms for 1 token · ")
    assert none.as_dict()["prompt_tps"] is None


def test_stopwatch() -> None:
    now = iter([10.0, 10.5, 11.0, 13.0])
    watch = Stopwatch(lambda: next(now))
    assert watch.prompt_s is None and watch.decode_s is None
    watch.tick()
    assert watch.prompt_s == 0.5 and watch.decode_s is None
    watch.tick()
    watch.tick()
    assert (watch.prompt_s, watch.decode_s) == (0.5, pytest.approx(2.5))
