"""The host sampler: Philox against published vectors, the distribution it draws from, and what it never chooses."""

import math
import warnings
from typing import Any

import numpy as np
import pytest

from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.generation.sampling import SamplingParams, choose, gumbel_noise, philox4x32

# Random123's kat_vectors, "philox4x32 10": counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter: str, key: str, want: str) -> None:
    c0, c1, c2, c3 = (np.array([word] * 3, np.uint32) for word in words(counter))
    k0, k1 = words(key)
    for got, word in zip(philox4x32((c0, c1, c2, c3), (k0, k1)), words(want), strict=True):
        assert got.tolist() == [word] * 3


def test_noise_is_the_documented_function_of_id_position_and_seed() -> None:
    seed, position = 0x0123456789ABCDEF, 4097
    noise = gumbel_noise(500, position, seed)
    assert noise.dtype == np.float32
    for token in (0, 1, 499):
        counter = tuple(np.array([word], np.uint32) for word in (token, position, 0, 0))
        r = int(philox4x32(counter, (0x89ABCDEF, 0x01234567))[0][0])  # type: ignore[arg-type]
        u = ((r >> 9) + 0.5) * 2.0**-23
        assert noise[token] == pytest.approx(-math.log(-math.log(u)), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("bits", [0, (1 << 23) - 1])
def test_u_never_reaches_0_or_1(bits: int) -> None:
    """The ends of the range give finite noise in fp32."""
    u = (np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-23)
    assert 0 < u < 1
    assert np.isfinite(-np.log(-np.log(u)))


def test_noise_differs_by_position_and_both_words_of_the_seed() -> None:
    rows = [gumbel_noise(64, 5, 1), gumbel_noise(64, 6, 1), gumbel_noise(64, 5, 2), gumbel_noise(64, 5, 1 + (1 << 32))]
    assert len({row.tobytes() for row in rows}) == 4
    assert np.array_equal(gumbel_noise(64, 5, 1), gumbel_noise(128, 5, 1)[:64])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 8 ids and 4,000 positions; 24.3 is the 0.999 quantile of 7 degrees of freedom.

    The seeds are fixed, so this either always passes or never does.
    """
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, 1.5, 0.2, -1.0], np.float32)
    draws = 4000
    ids = [draw(logits, position=p, temperature=temperature, seed=77) for p in range(draws)]
    weight = np.exp(logits.astype(np.float64) / temperature)
    expected = weight / weight.sum() * draws
    assert (expected > 5).all()
    observed = np.bincount(ids, minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


def draw(logits: Any, **changes: Any) -> int:
    options: dict[str, Any] = {"position": 1, "temperature": 0.0, "seed": 0, "text_vocab": len(logits)} | changes
    return choose(np.asarray(logits, np.float32), **options)


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    assert draw([0, 3, 3, 1]) == 1
    assert draw([-0.0, 0.0]) == 0
    assert draw([-5, -5, -5]) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_padding_rows_are_never_chosen(temperature: float) -> None:
    logits = np.zeros(152064, np.float32)
    logits[151900] = 1e4
    logits[7] = 1.0
    for seed in range(5):
        assert draw(logits, temperature=temperature, seed=seed, text_vocab=151665) < 151665


def test_padding_rows_may_hold_anything() -> None:
    assert draw([1, 2, np.nan, np.inf], text_vocab=2) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(QwenRawError, match=r"1 of 3 logits for position 9 are not finite \(id 1: "):
        draw([0, bad, 0], temperature=temperature, position=9)
    with pytest.raises(QwenRawError, match="3 of 3 logits"):
        draw([bad] * 3, temperature=temperature)


def test_a_low_temperature_is_greedy_and_a_seed_repeats() -> None:
    logits = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    assert draw(logits, temperature=1e-4, seed=5) == int(logits.argmax())
    first = [draw(logits, temperature=1.0, seed=5, position=p) for p in range(20)]
    assert first == [draw(logits, temperature=1.0, seed=5, position=p) for p in range(20)]
    assert first != [draw(logits, temperature=1.0, seed=6, position=p) for p in range(20)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, or None for no limit, not 0"),
        ({"max_tokens": "5"}, "max_tokens is '5' \\(str\\), expected an integer"),
        ({"max_tokens": 5.0}, "max_tokens is 5.0 \\(float\\), expected an integer"),
        ({"max_tokens": True}, "max_tokens is True \\(bool\\), expected an integer"),
        ({"temperature": "hot"}, "temperature is 'hot' \\(str\\), expected a number"),
        ({"temperature": None}, "temperature is None \\(NoneType\\), expected a number"),
        ({"temperature": 10**400}, "temperature is 1000+\\.\\.\\. \\(int\\), expected a number"),
        ({"temperature": 1e300}, "temperature 1e\\+300 is too high: use at most 1e\\+06"),
        ({"seed": 1.5}, "seed is 1.5 \\(float\\), expected an integer"),
        ({"stop": None}, "stop is None, expected a sequence of strings"),
        ({"stop": [1]}, "a stop string is 1 \\(int\\), expected a str"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no' \\(str\\), expected True or False"),
        ({"temperature": -1.0}, "temperature must be a number of at least 0, not -1.0"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0, not nan"),
        ({"temperature": float("inf")}, "temperature must be a number of at least 0, not inf"),
        ({"temperature": 1e-9}, "too close to 0"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"seed": 1 << 64}, "seed must be from 0 to"),
        ({"stop": "END"}, "stop is a sequence of strings"),
        ({"stop": ("END", "")}, "a stop string is empty"),
    ],
)
def test_senseless_parameters_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**values)


def test_parameters_at_their_limits_are_accepted() -> None:
    params = SamplingParams(max_tokens=1, temperature=1e-4, seed=(1 << 64) - 1, stop=["a", "b"])  # type: ignore[arg-type]
    assert params.stop == ("a", "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hot = SamplingParams(temperature=1e6).temperature
        choose(np.arange(3, dtype=np.float32), position=0, temperature=hot, seed=0, text_vocab=3)
    assert np.isfinite(gumbel_noise(16, 2**31 - 1, (1 << 64) - 1)).all()


def test_numpy_scalars_become_pythons() -> None:
    """So that what is in effect can be written as JSON."""
    params = SamplingParams(np.int64(3), np.float32(0.5), np.uint64(2**64 - 1), ignore_eos=np.bool_(True))  # type: ignore[arg-type]
    assert [type(v) for v in (params.max_tokens, params.temperature, params.seed)] == [int, float, int]
    assert params == SamplingParams(3, 0.5, 2**64 - 1, ignore_eos=True) and params.ignore_eos is True
