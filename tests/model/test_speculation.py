"""Speculation changes no id: the built-in model with its draft model and with n-grams, on the simulator and a GPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from loaders.resolve import open_model, open_tokenizer
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.generation.sampling import gumbel_noise
from qwen_raw.generation.speculation import WINDOW
from qwen_raw.kernels.gemv_rows import GemvRows, NoRoomError
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculate import VERIFY
from qwen_raw.model.speculative import SpeculativeRunner

MODEL, DRAFT = "tiny-shakespeare", "tiny-shakespeare-draft"
TOLERANCE = 3e-2  # what bf16 activations cost a logit (test_device_runner.py)
REPEATING = "ROMEO:\nO, O, O, O, O,"
PROMPTS = (REPEATING, "First Citizen:\nBefore we", "a", "KING RICHARD III:\nMy kingdom for a")
WAYS: dict[str, dict[str, Any]] = {"ngram": {"ngram": 3}, "draft": {"draft": open_model(DRAFT)}}


def options(model: Any, length: int) -> dict[str, Any]:
    return {"dtype": "bf16", "max_model_len": length, "text_vocab": model.config.V, "owns_device": False}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@pytest.fixture(params=VERIFY)
def verify(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runners(dev: Any, way: dict[str, Any], verify: str) -> Iterator[tuple[DeviceRunner, SpeculativeRunner]]:
    """(plain, speculative) on one device."""
    model, length = open_model(MODEL), 400 if dev.kind == "cuda" else 32
    plain = DeviceRunner(dev, model, **options(model, length))
    guessing = SpeculativeRunner(dev, model, guesses=3, verify=verify, **way, **options(model, length))
    yield plain, guessing
    guessing.close()
    plain.close()


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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ids_are_those_of_single_steps(runners: Any, verify: str, temperature: float) -> None:
    plain, guessing = runners
    many = plain.devices[0].kind == "cuda"
    equal = total = 0
    for number, ids in enumerate(prompts((20 if temperature else 100) if many else 2)):
        request = {"max_tokens": 48 if many else 9, "temperature": temperature, "seed": number}
        want = list(plain.generate(ids, **request))
        got = list(guessing.generate(ids, **request))
        if verify == "steps":  # the same kernels: the same bits
            assert got == want, f"prompt {number}"
            assert guessing.logits_hash == plain.logits_hash
        total += len(want)
        equal += agreed(plain, ids, want, got, request)
    assert equal > 0.8 * total, f"{equal} of {total} ids came before the first near-tie of their prompt"
    counts = guessing.speculated
    assert counts.guesses == 3 * (counts.passes - surplus(guessing))
    assert counts.right > 0 or not many


def surplus(runner: SpeculativeRunner) -> int:
    """Passes that found nothing left to do."""
    counts = runner.speculated
    return counts.passes - counts.guesses // 3


def test_passes_count_what_they_post(dev: Any) -> None:
    """Every id but the first is of a pass that guesses, a guess that was right, or a step while guessing pauses."""
    model = open_model(MODEL)
    runner = SpeculativeRunner(dev, model, guesses=4, ngram=2, **options(model, 48))
    try:
        before = runner.speculated
        told = list(runner.generate([5, 6, 7, 8] * 4, max_tokens=12, temperature=0.0, seed=0))
        counts = runner.speculated.since(before)
        assert len(told) == 12
        assert counts.right + counts.guesses // 4 + counts.steps == 12 - 1
    finally:
        runner.close()


def test_the_last_position_and_early_stops(runners: Any) -> None:
    """A request that fills the context; one that is left early, whose surplus the next one must not see."""
    plain, guessing = runners
    length = guessing.max_model_len
    ids = [int(x) for x in np.arange(length - 7) % 90 + 5]
    request = {"max_tokens": 7, "temperature": 0.0, "seed": 0}
    want = list(guessing.generate(ids, **request))
    agreed(plain, ids, list(plain.generate(ids, **request)), want, request)
    short = list(guessing.generate(ids[:8], **request))
    for taken in (1, 3):
        stream = guessing.generate(ids[:8], **request)
        first = [next(stream) for _ in range(taken)]
        stream.close()
        assert first == short[:taken]
    assert list(guessing.generate(ids, **request)) == want
    assert list(guessing.generate(ids, max_tokens=0, temperature=0.0, seed=0)) == []
    assert list(guessing.generate(ids, **request)) == want


def test_a_pause_changes_no_id(dev: Any, way: dict[str, Any]) -> None:
    """A pass that costs more than it can give: after a few, single steps; then, with n-grams, guesses again."""
    model, ids = open_model(MODEL), [5, 6, 7, 8] * 2
    length = 400 if dev.kind == "cuda" else 32
    request = {"max_tokens": length - 10, "temperature": 0.0, "seed": 0}
    plain = DeviceRunner(dev, model, **options(model, length))
    runner = SpeculativeRunner(dev, model, guesses=1, verify="steps", **way, **options(model, length))
    try:
        runner.cost, before = 9.0, runner.speculated
        assert list(runner.generate(ids, **request)) == list(plain.generate(ids, **request))
        counts = runner.speculated.since(before)
        assert counts.steps > 0 and counts.guesses >= WINDOW
        assert counts.right + counts.guesses + counts.steps >= request["max_tokens"] - 1
    finally:
        runner.close()
        plain.close()


def test_what_does_not_fit_is_refused(dev: Any) -> None:
    model = open_model(MODEL)
    with pytest.raises(UsageError, match="speculation takes a draft model or n-grams"):
        SpeculativeRunner(dev, model, guesses=2, **options(model, 64))
    with pytest.raises(QwenRawError, match="rows a pass"):
        SpeculativeRunner(dev, model, guesses=16, ngram=1, **options(model, 64))


def test_prefills_products_stand_in_where_rows_find_no_room(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small multiprocessors: the pass is slower, the ids are the same."""
    model, request = open_model(MODEL), {"max_tokens": 6, "temperature": 0.0, "seed": 0}

    def no_room(*_: Any) -> None:
        raise NoRoomError("no block fits a multiprocessor")

    monkeypatch.setattr(GemvRows, "plan", no_room)
    runner = SpeculativeRunner(dev, model, guesses=2, ngram=2, **options(model, 48))
    chunk = SpeculativeRunner(dev, model, guesses=2, ngram=2, verify="chunk", **options(model, 48))
    try:
        ids = [5, 6, 7, 8] * 2
        assert list(runner.generate(ids, **request)) == list(chunk.generate(ids, **request))
    finally:
        runner.close()
        chunk.close()


def test_a_closed_runner_still_says_what_it_guessed(dev: Any) -> None:
    """Its counts lie in memory that goes with the device; asking an engine for more must not read that."""
    model = open_model(MODEL)
    runner = SpeculativeRunner(dev, model, guesses=2, ngram=2, **options(model, 48))
    list(runner.generate([5, 6, 7, 8], max_tokens=4, temperature=0.0, seed=0))
    counts = runner.speculated
    told = runner._pass.buffers.told
    runner.close()
    told.words[:] = 12345  # memory that is somebody else's once the device is closed
    assert runner.speculated == counts and counts.passes > 0
    with pytest.raises(QwenRawError, match="this runner is closed"):
        next(runner.generate([5], max_tokens=2, temperature=0.0, seed=0))
