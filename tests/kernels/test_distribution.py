"""Drawn ids have the distribution that the logits say, with guesses and without: chi-square on a small vocabulary."""

from typing import Any

import numpy as np

from qwen_raw.generation.sampling import choose
from qwen_raw.kernels.accept import PassBuffers, accept, accept_begin
from qwen_raw.kernels.sample import Sampler, sample

Array = np.ndarray[Any, Any]
V, M, TEMPERATURE = 8, 5, 0.9


class Chain:
    """A text whose next id depends on the last one alone: row `last` of `logits` f32 [V, V]."""

    def __init__(self, dev: Any, logits: Array, seed: int, length: int) -> None:
        self.dev, self.logits, self.seed = dev, logits, seed
        self.rows = dev.array(logits)
        self.s, self.b = Sampler.create(dev, V), PassBuffers.create(dev, M, length + 1, V)
        self.draft = dev.zeros((4,), np.dtype(np.int32))
        self.s.set_params(TEMPERATURE, seed, V)
        self.s.set_position(0, 0)
        self.b.limit.upload(np.array([length], np.uint32))

    def singles(self, count: int) -> list[int]:
        """Draws of sample.cu."""
        ids = [0]
        for _ in range(count):
            sample(self.dev, self.rows.view((V,), V * ids[-1]), self.s)
            ids.append(int(self.s.state.download()[0]))
        return ids[1:]

    def guessed(self, count: int, draft: Array) -> list[int]:
        """Draws of accept.cu, of guesses that another chain draws with the same noise."""
        accept_begin(self.dev, self.b, self.s, self.draft)
        token = pos = 0
        while pos < count:
            ids = [token]
            for i in range(1, M):
                options = {"temperature": TEMPERATURE, "seed": self.seed, "text_vocab": V}
                ids.append(choose(draft[ids[-1]], position=pos + i, **options))
            self.b.ids.upload(np.array(ids, np.int32))
            accept(self.dev, self.b, self.s, self.draft, self.dev.array(self.logits[ids]))
            token, pos = (int(x) for x in self.s.state.download()[:2])
        return [int(x) for x in self.b.history.download()[1 : count + 1]]


def chi_square(ids: list[int], logits: Array) -> tuple[float, float]:
    """(statistic of transitions against their probabilities, what one in a million exceeds by Wilson and Hilferty)."""
    seen = np.zeros((V, V))
    np.add.at(seen, ([0, *ids[:-1]], ids), 1)
    p = np.exp(logits.astype(np.float64) / TEMPERATURE)
    expected = seen.sum(1, keepdims=True) * p / p.sum(1, keepdims=True)
    degrees = V * (V - 1)
    spread = 2 / (9 * degrees)
    return float(((seen - expected) ** 2 / expected).sum()), degrees * (1 - spread + 4.75 * spread**0.5) ** 3


def test_draws_follow_the_logits(dev: Any, rng: np.random.Generator) -> None:
    count = 10_000 if dev.kind == "cuda" else 1_600
    logits = rng.standard_normal((V, V)).astype(np.float32)
    draft = logits + 0.4 * rng.standard_normal((V, V)).astype(np.float32)
    seed = int(rng.integers(1 << 62))
    chain = Chain(dev, logits, seed, count + M)
    guessed = chain.guessed(count, draft)
    right, compared = (int(chain.b.told.words[i]) for i in (1, 3))
    assert 0.4 < right / compared < 0.98, "both what stands and what does not is to be seen"
    found, limit = chi_square(guessed, logits)
    assert found < limit, f"with guesses: chi-square {found:.0f}, {limit:.0f} is one in a million"
    singles = Chain(dev, logits, seed, count).singles(count)
    assert singles == guessed
    found, limit = chi_square(Chain(dev, logits, seed + 1, count).singles(count // 2), logits)
    assert found < limit, f"without: chi-square {found:.0f}, {limit:.0f} is one in a million"
