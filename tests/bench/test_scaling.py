"""bench.scaling: the fit recovers what its points were made from; a lone rank does its share of the work."""

import json
from pathlib import Path

import numpy as np
import pytest
from model.ranks import TIED, biased_checkpoint

from bench import scaling
from bench.scaling import DEGREES, Fit, Point, fit
from qwen_raw.errors import QwenRawError
from qwen_raw.model.decode import level
from qwen_raw.simt.device import SimDevice

TRUE = Fit(weight_us=17000.0, serial_us=420.0, reduce_us=1.5, reduces=160)


def points(*degrees: int, sums: bool = True) -> list[Point]:
    return [Point(tp, TRUE.without_sums(tp), TRUE.us(tp) if sums and tp > 1 else None) for tp in degrees]


@pytest.mark.parametrize("degrees", [(1, 2), (2, 4), DEGREES])
def test_the_fit_recovers_its_points(degrees: tuple[int, ...]) -> None:
    found = fit(points(*degrees), 80, 9.9)
    for name in ("weight_us", "serial_us", "reduce_us"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert [found.us(tp) for tp in DEGREES] == pytest.approx([TRUE.us(tp) for tp in DEGREES])
    assert found.us(1) == found.without_sums(1) and found.us(8) > found.without_sums(8)
    assert found.reduce_from == "measured"


def test_a_latency_that_was_not_measured_is_assumed_and_says_so() -> None:
    found = fit(points(1, 2, 4, sums=False), 80, 2.5)
    assert (found.reduce_us, found.reduce_from) == (2.5, "assumed")
    assert found.weight_us == pytest.approx(TRUE.weight_us)
    with pytest.raises(QwenRawError, match="one degree alone"):
        fit(points(2), 80, 2.5)


def test_measured_steps_are_read_where_every_rank_had_a_gpu(tmp_path: Path) -> None:
    row = {"model": "random:7b", "dtype": "bf16", "context": 0, "tp": 2, "devices": [0, 1], "tok_s": 500.0}
    others = [
        row | {"comm": "flag", "tok_s": 400.0},
        row | {"context": 4096},
        row | {"dtype": "fp8"},
        row | {"tp": 4, "devices": [0, 0, 1, 1]},
    ]
    (tmp_path / "decode_tp2.json").write_text(json.dumps({"rows": [row, *others]}))
    assert scaling.measured(tmp_path, "random:7b", "bf16") == {2: row}


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_lone_rank_holds_its_share(tp: int) -> None:
    """Its weights are a rank's, and its step runs without the others."""
    with SimDevice() as dev:
        rank = scaling.lone_rank(dev, biased_checkpoint(TIED), tp, fp8=False, length=8)
        assert rank.weights.layers[0].down.weight.shape == (TIED.D, TIED.I // tp)
        rank.decode.sampler.set_position(1, 0)
        level([rank.step()])
        assert np.isfinite(rank.decode.logits.download()).all()
        assert rank.decode.logits.shape == (len(rank.shard.vocab),)
        assert int(rank.decode.sampler.ring.words[1]) == 1
