"""What tests of speculation share: the built-in pair, prompts, and when two sequences of ids agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from loaders.resolve import open_model, open_tokenizer
from qwen_raw.generation.sampling import gumbel_noise
from qwen_raw.model.runner import DeviceRunner

MODEL, DRAFT = "tiny-shakespeare", "tiny-shakespeare-draft"
TOLERANCE = 3e-2  # what bf16 activations cost a logit (test_device_runner.py)
REPEATING = "ROMEO:\nO, O, O, O, O,"
PROMPTS = (REPEATING, "First Citizen:\nBefore we", "a", "KING RICHARD III:\nMy kingdom for a")
WAYS: dict[str, dict[str, Any]] = {"ngram": {"ngram": 3}, "draft": {"draft": open_model(DRAFT)}}


def options(model: Any, length: int) -> dict[str, Any]:
    return {"dtype": "bf16", "max_model_len": length, "text_vocab": model.config.V, "owns_device": False}


def agreed(plain: DeviceRunner, ids: list[int], want: list[int], got: list[int], request: dict[str, Any]) -> int:
    """How many ids are equal before the first that differs, which the plain runner all but chose too.

    Rows that are verified together are summed in another order than single steps, as prompts are.
    """
    assert len(got) == len(want)
    same = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), len(want))
    if same < len(want):
        row = plain.decode_logits(ids + want[:same])[-1]
        if request["temperature"]:
            position = len(ids) + same
            row = row / request["temperature"] + gumbel_noise(len(row), position=position, seed=request["seed"])
        gap = abs(float(row[want[same]] - row[got[same]]))
        assert gap <= 2 * TOLERANCE / (request["temperature"] or 1.0), f"id {same} of {len(want)} is off by {gap}"
    return same


def prompts(count: int) -> list[list[int]]:
    """The texts above, and random pieces of their ids."""
    tokenizer, rng = open_tokenizer(open_model(MODEL)), np.random.default_rng(1)
    texts = [tokenizer.encode(text) for text in PROMPTS]
    pool = [token for text in texts for token in text]
    return texts[:count] + [[int(x) for x in rng.choice(pool, 1 + i % 40)] for i in range(count - len(texts))]


class Scripted:
    """A governor that says what it is told."""

    paused = False
    hopeless = False

    def __init__(self, said: list[int]) -> None:
        self.said = said

    def begin(self, right: int, compared: int) -> None:
        self.right = [right]

    def choose(self, right: int, compared: int, room: int) -> int:
        self.right.append(right)
        return self.said[(len(self.right) - 2) % len(self.said)]
