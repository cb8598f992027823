"""RoPE tables against formulas written out pair by pair in Python's float64."""

import math
from dataclasses import replace

import numpy as np
import pytest

from loaders.synthetic import SIZES
from qwen_raw.config import Yarn
from qwen_raw.model.rope import attention_factor, inverse_frequencies, rope_table

PLAIN = SIZES["7b"]
YARN = replace(PLAIN, yarn=Yarn(factor=4.0, original_max_position=32768), max_position=131072)
POSITIONS = [0, 1, 30_000, 32_768, 100_000]


def yarn_frequency(pair: int, head_dim: int, theta: float, yarn: Yarn) -> float:
    """The paper's "NTK-by-parts": how often the pair turns within the original context decides its share of scaling.

    The published code (and transformers) ramps linearly in the pair's index between the rounded pairs that turn
    beta_fast and beta_slow times.
    """
    plain = theta ** (-2 * pair / head_dim)

    def index(turns: float) -> float:  # solve original * theta**(-2 i / HD) / 2π = turns for i
        return math.log(yarn.original_max_position / (2 * math.pi * turns), theta) * head_dim / 2

    low, high = math.floor(index(yarn.beta_fast)), math.ceil(index(yarn.beta_slow))
    scaled_share = min(max((pair - low) / (high - low), 0.0), 1.0)
    return plain * (1 - scaled_share) + plain / yarn.factor * scaled_share


@pytest.mark.parametrize("size", ["0.5b", "7b"])
@pytest.mark.parametrize("factor", [2.0, 4.0, 8.0])
def test_yarn_table(size: str, factor: float) -> None:
    yarn = Yarn(factor=factor, original_max_position=32768)
    config = replace(SIZES[size], yarn=yarn)
    cos, sin = rope_table(config, POSITIONS)
    scale = 0.1 * math.log(factor) + 1
    for row, position in enumerate(POSITIONS):
        for pair in range(config.HD // 2):
            angle = position * yarn_frequency(pair, config.HD, config.rope_theta, yarn)
            assert cos[row, pair] == pytest.approx(math.cos(angle) * scale, abs=1e-6)
            assert sin[row, pair] == pytest.approx(math.sin(angle) * scale, abs=1e-6)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    plain, scaled = inverse_frequencies(PLAIN), inverse_frequencies(YARN)
    ratio = scaled / plain
    assert (ratio[:20] == 1).all()
    assert ratio[-10:] == pytest.approx(np.full(10, 0.25))
    assert (np.diff(ratio) <= 1e-12).all()


def test_yarn_attention_factor() -> None:
    assert attention_factor(YARN) == pytest.approx(1.1386, abs=1e-4)
    assert attention_factor(replace(YARN, yarn=Yarn(4.0, 32768, attention_factor=0.75))) == 0.75
    assert attention_factor(replace(YARN, yarn=Yarn(1.0, 32768))) == 1.0
    assert attention_factor(PLAIN) == 1.0


def test_angles_hold_at_long_positions() -> None:
    """At 30,000 every angle is within 1e-3 rad of the exact one; in float32 the fastest pair would not be."""
    cos, sin = rope_table(PLAIN, [30_000])
    worst = 0.0
    for pair in range(PLAIN.HD // 2):
        exact = 30_000 * PLAIN.rope_theta ** (-2 * pair / PLAIN.HD)
        off = math.atan2(sin[0, pair], cos[0, pair]) - exact
        worst = max(worst, abs(math.remainder(off, 2 * math.pi)))
    assert worst < 1e-6
    narrow = np.float32(30_000) * (PLAIN.rope_theta ** (-np.arange(0, PLAIN.HD, 2) / PLAIN.HD)).astype(np.float32)
    wide = 30_000 * PLAIN.rope_theta ** (-np.arange(0, PLAIN.HD, 2) / PLAIN.HD)
    assert np.abs(narrow - wide).max() > 1e-4  # the reason for float64


def test_position_zero_is_the_identity() -> None:
    cos, sin = rope_table(PLAIN, [0])
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == (1, PLAIN.HD // 2)
    assert (cos == 1).all() and (sin == 0).all()
