"""sample.cu against the host's definition of a choice: greedy, temperature, padding, ties, damaged logits, the ring."""

from typing import Any

import numpy as np
import pytest

from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import logits_hash
from qwen_raw.generation.sampling import choose
from qwen_raw.kernels.sample import BAD_ID, SLOTS, Sampler, sample


def run(dev: Any, s: Sampler, logits: np.ndarray[Any, Any], pos: int, temperature: float, seed: int, text: int) -> int:
    """One choice at position pos + 1; returns the id posted to the ring, having checked the state and the hash."""
    step = int(s.state.download()[2])
    s.set_params(temperature, seed, text)
    s.set_position(123, pos)
    sample(dev, dev.array(logits), s)
    token, new_pos, new_step, _ = (int(x) for x in s.state.download())
    word, posted = (int(x) for x in s.ring.words[2 * (step % SLOTS) : 2 * (step % SLOTS) + 2])
    assert (new_pos, new_step, posted) == (pos + 1, step + 1, step + 1)
    assert word >> 32 == logits_hash(logits[:text])
    assert token == (0 if word & 0xFFFFFFFF == BAD_ID else word & 0xFFFFFFFF)
    return word & 0xFFFFFFFF


@pytest.mark.parametrize(("V", "text"), [(1, 1), (300, 300), (4160, 4096)])
@pytest.mark.parametrize("blocks", [1, 3])
def test_greedy(dev: Any, rng: np.random.Generator, V: int, text: int, blocks: int) -> None:
    s = Sampler.create(dev, V, blocks)
    for _ in range(3):
        logits = rng.standard_normal(V).astype(np.float32)
        logits[text:] = 1e4  # padding rows: never chosen, however large
        assert run(dev, s, logits, 5, 0.0, 0, text) == int(logits[:text].argmax())


def test_ties_go_to_the_lowest_id(dev: Any) -> None:
    s = Sampler.create(dev, 700, 3)
    logits = np.full(700, -1.0, np.float32)
    logits[[699, 401, 57]] = 2.0
    assert run(dev, s, logits, 0, 0.0, 0, 700) == 57
    signs = np.full(700, -1.0, np.float32)
    signs[9], signs[10] = -0.0, 0.0
    assert run(dev, s, signs, 0, 0.0, 0, 700) == 9


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) + 12345])
def test_temperature_draws_what_the_host_draws(dev: Any, rng: np.random.Generator, seed: int) -> None:
    s = Sampler.create(dev, 500, 2)
    logits = rng.standard_normal(500).astype(np.float32)
    ids = [run(dev, s, logits, pos, 0.8, seed, 450) for pos in range(12)]
    want = [choose(logits, position=p + 1, temperature=0.8, seed=seed, text_vocab=450) for p in range(12)]
    assert ids == want
    assert len(set(ids)) > 3, "twelve draws from a broad distribution that are nearly all the same"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_reported(dev: Any, rng: np.random.Generator, bad: float) -> None:
    s = Sampler.create(dev, 600, 2)
    logits = rng.standard_normal(600).astype(np.float32)
    logits[311] = bad
    assert run(dev, s, logits, 0, 0.0, 0, 600) == BAD_ID
    logits[311] = 0.0
    logits[599] = bad  # a padding row does not count
    assert run(dev, s, logits, 0, 0.0, 0, 590) == int(logits[:590].argmax())


def test_text_vocab_must_lie_within_the_rows(dev: Any) -> None:
    s = Sampler.create(dev, 16)
    with pytest.raises(QwenRawError, match="text_vocab 17"):
        s.set_params(0.0, 0, 17)
