"""Speculation changes no id: the built-in model with its draft model and with n-grams, on the simulator and a GPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from model.ranks import TIED
from model.speculating import DRAFT, MODEL, WAYS, Scripted, agreed, options, prompts

from loaders.resolve import open_model, open_tokenizer
from loaders.synthetic import random_checkpoint
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels.gemv_each import GemvEach
from qwen_raw.kernels.gemv_rows import GemvRows, NoRoomError
from qwen_raw.model import speculate
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculate import EXACT_BYTES, VERIFY
from qwen_raw.model.speculative import SpeculativeRunner


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
    guessing = SpeculativeRunner(dev, model, guesses=3, verify=verify, governed=False, **way, **options(model, length))
    yield plain, guessing
    guessing.close()
    plain.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ids_are_those_of_single_steps(runners: Any, verify: str, temperature: float) -> None:
    plain, guessing = runners
    many = plain.devices[0].kind == "cuda"
    if not many and verify == "chunk" and (temperature or guessing._draft_prompt is None):
        pytest.skip("slow, and guesses and draws are the same whatever computes the rows")
    equal = total = 0
    for number, ids in enumerate(prompts((20 if temperature else 100) if many else 2)):
        request = {"max_tokens": 48 if many else 9, "temperature": temperature, "seed": number}
        want = list(plain.generate(ids, **request))
        got = list(guessing.generate(ids, **request))
        if verify == "exact":  # the same arithmetic: the same bits
            assert got == want, f"prompt {number}"
            assert guessing.logits_hash == plain.logits_hash
        total += len(want)
        equal += agreed(plain, ids, want, got, request)
    assert equal > 0.8 * total, f"{equal} of {total} ids came before the first near-tie of their prompt"
    counts = guessing.speculated
    assert counts.passes + counts.right == total - (number + 1), "every id but the first is a pass's own, or a guess"
    assert counts.right > 0 or not many


def test_the_last_position_and_early_stops(runners: Any, verify: str) -> None:
    """A request that fills the context; one that is left early, whose surplus the next one must not see."""
    plain, guessing = runners
    if plain.devices[0].kind == "sim" and verify != "rows":
        pytest.skip("slow, and the others differ in their products alone")
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


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("H", "KV"), [(4, 2), (16, 1)], ids=["groups of 2", "groups of 16"])
def test_exact_passes_of_any_format(dev: Any, dtype: str, kv: str, H: int, KV: int) -> None:
    """fp8 weights, e4m3 caches; more query heads to a KV head than attention takes by themselves in one launch."""
    model = random_checkpoint(replace(TIED, H=H, KV=KV, I=96, L=2), "bf16", 4)
    how = {**options(model, 60), "dtype": dtype, "kv": kv}
    plain = DeviceRunner(dev, model, **how)
    runner = SpeculativeRunner(dev, model, guesses=3, ngram=1, governed=False, verify="exact", **how)
    request = {"max_tokens": 40 if dev.kind == "cuda" else 10, "temperature": 1.0, "seed": 2}
    ids = [5, 6, 7, 8] * 2
    try:
        assert list(runner.generate(ids, **request)) == list(plain.generate(ids, **request))
        assert runner.logits_hash == plain.logits_hash and runner.speculated.guesses > 0
    finally:
        runner.close()
        plain.close()


def test_what_is_verified_how_by_default(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit where the weights are few; where there is no variant for that, by rows, unless it was asked for."""
    model = open_model(DRAFT)
    told = []
    for least in (EXACT_BYTES, 0):
        monkeypatch.setattr(speculate, "EXACT_BYTES", least)
        runner = SpeculativeRunner(dev, model, guesses=2, ngram=2, **options(model, 48))
        told.append((runner.verify, runner.speculated.since(runner.speculated).verify))
        runner.close()
    assert told == [("exact", "exact"), ("rows", "rows")]

    def no_room(*_: Any, **__: Any) -> None:
        raise NoRoomError("no variant takes rows so long")

    monkeypatch.setattr(speculate, "EXACT_BYTES", EXACT_BYTES)
    monkeypatch.setattr(GemvEach, "shape", no_room)
    runner = SpeculativeRunner(dev, model, guesses=2, ngram=2, **options(model, 48))
    assert runner.verify == "rows"
    runner.close()
    with pytest.raises(QwenRawError, match="no variant takes rows so long"):
        SpeculativeRunner(dev, model, guesses=2, ngram=2, verify="exact", **options(model, 48))


def test_a_pause_changes_no_id(dev: Any, way: dict[str, Any]) -> None:
    """Passes of several sizes, single steps between, and guesses again."""
    model, ids = open_model(MODEL), [5, 6, 7, 8] * 2
    length = 400 if dev.kind == "cuda" else 32
    request = {"max_tokens": length - 10, "temperature": 0.0, "seed": 0}
    plain = DeviceRunner(dev, model, **options(model, length))
    costs = {1: 1.5, 3: 2.5}
    runner = SpeculativeRunner(dev, model, guesses=3, verify="exact", costs=costs, **way, **options(model, length))
    try:
        runner._governor = Scripted([3, 0, 0, 1, 0, 3, 3])  # type: ignore[assignment]
        assert list(runner.generate(ids, **request)) == list(plain.generate(ids, **request))
        counts = runner.speculated
        assert counts.passes + counts.right == request["max_tokens"] - 1
        sizes = ([3, 0, 0, 1, 0, 3, 3] * 60)[: counts.passes]
        assert counts.steps == sizes.count(0) and counts.guesses == sum(sizes)
        assert counts.cost == pytest.approx(sizes.count(0) + 1.5 * sizes.count(1) + 2.5 * sizes.count(3))
    finally:
        runner.close()
        plain.close()


def test_a_model_guesses_itself_right(dev: Any) -> None:
    """Every time, drawn ids too: it must have the keys of all that came before, of its own last guess as well."""
    model, ids = open_model(DRAFT), open_tokenizer(open_model(DRAFT)).encode("First Citizen:\nBefore we")
    length = 400 if dev.kind == "cuda" else 48
    runner = SpeculativeRunner(
        dev, model, guesses=3, governed=False, verify="exact", draft=model, **options(model, length)
    )
    try:
        list(runner.generate(ids, max_tokens=length - 16, temperature=1.5, seed=1))
        counts = runner.speculated
        assert counts.right == counts.compared >= 3 * ((length - 17) // 4), counts.line()
    finally:
        runner.close()


@pytest.mark.parametrize("hopeless", [False, True])
def test_a_draft_model_catches_up(dev: Any, hopeless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model guesses for itself. After steps without guesses it must know the ids that it has not seen.

    Where there is no hope at first, the prompt's too, which it has not been given then.
    """
    monkeypatch.setattr(Scripted, "hopeless", hopeless)
    model, ids = open_model(DRAFT), open_tokenizer(open_model(DRAFT)).encode("First Citizen:\nBefore we")
    many = dev.kind == "cuda"
    length, pause = (500, 70) if many else (48, 5)
    runner = SpeculativeRunner(dev, model, guesses=3, costs={3: 2.0}, draft=model, **options(model, length))
    try:
        said = [*[0] * pause, 3, 3] if hopeless else [3, *[0] * pause, 3]
        runner._governor = Scripted(said)  # type: ignore[assignment]
        for seed in range(6):  # prefill's keys are not decode's bits: now and then an id differs
            list(runner.generate(ids, max_tokens=2 * pause + 20, temperature=1.5, seed=seed))
        counts = runner.speculated
        assert counts.steps >= 6 * pause and counts.compared > 60
        assert counts.right >= 0.9 * counts.compared, counts.line()
    finally:
        runner.close()


@pytest.mark.parametrize("V", [120, 260])
def test_a_draft_model_may_know_fewer_ids_or_more(dev: Any, V: int) -> None:
    """As Qwen2.5's sizes do, whose vocabularies are padded differently. All ids are chosen here, and are in prompts."""
    config = replace(TIED, H=4, KV=2, I=64, L=1, V=204)
    model, draft = random_checkpoint(config, "bf16", 1), random_checkpoint(replace(config, V=V), "bf16", 2)
    plain = DeviceRunner(dev, model, **options(model, 48))
    runner = SpeculativeRunner(dev, model, guesses=2, draft=draft, verify="exact", **options(model, 48))
    request = {"max_tokens": 12, "temperature": 2.0, "seed": 3}
    try:
        want = list(plain.generate([5, 150, 202], **request))
        assert max(want) >= 120
        assert list(runner.generate([5, 150, 202], **request)) == want
    finally:
        runner.close()
        plain.close()


def test_what_does_not_fit_is_refused(dev: Any) -> None:
    model = open_model(MODEL)
    with pytest.raises(UsageError, match="speculation takes a draft model or n-grams"):
        SpeculativeRunner(dev, model, guesses=2, **options(model, 64))
    with pytest.raises(UsageError, match="comm host"):
        SpeculativeRunner(dev, model, guesses=2, ngram=1, comm="host", **options(model, 64))
    with pytest.raises(QwenRawError, match="rows a pass"):
        SpeculativeRunner(dev, model, guesses=16, ngram=1, **options(model, 64))


def test_prefills_products_stand_in_where_rows_find_no_room(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small multiprocessors: the pass is slower, the ids are the same."""
    model, request = open_model(MODEL), {"max_tokens": 6, "temperature": 0.0, "seed": 0}

    def no_room(*_: Any, **__: Any) -> None:
        raise NoRoomError("no block fits a multiprocessor")

    monkeypatch.setattr(GemvRows, "plan", no_room)
    runner = SpeculativeRunner(dev, model, guesses=2, ngram=2, verify="rows", **options(model, 48))
    chunk = SpeculativeRunner(dev, model, guesses=2, ngram=2, verify="chunk", **options(model, 48))
    try:
        assert (runner.verify, runner.speculated.verify) == ("chunk", "chunk")
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
    told = runner._buffers[0].told
    runner.close()
    told.words[:] = 12345  # memory that is somebody else's once the device is closed
    assert runner.speculated == counts and counts.passes > 0
    with pytest.raises(QwenRawError, match="this runner is closed"):
        next(runner.generate([5], max_tokens=2, temperature=0.0, seed=0))


@pytest.mark.gpu
def test_draws_with_guesses_and_without_are_alike(cuda_device: Any) -> None:
    """A small vocabulary, 10,000 ids each way with seeds of their own: position by position, chi-square of the two."""
    model, ids = open_model(MODEL), open_tokenizer(open_model(MODEL)).encode("ROMEO:")
    kinds, tokens, requests = 8, 4, 2500
    small = options(model, 32) | {"text_vocab": kinds}
    plain = DeviceRunner(cuda_device, model, **small)
    guessing = SpeculativeRunner(cuda_device, model, guesses=3, governed=False, draft=open_model(DRAFT), **small)
    counts = []
    for first, runner in ((0, plain), (requests, guessing)):
        drawn = [
            list(runner.generate(ids, max_tokens=tokens, temperature=1.0, seed=first + i)) for i in range(requests)
        ]
        counts.append(np.stack([np.bincount(column, minlength=kinds) for column in zip(*drawn, strict=True)]))
    right = guessing.speculated.right
    guessing.close()
    plain.close()
    assert right > 500
    one, two = counts
    both = np.maximum(one + two, 1)
    found = ((one - two) ** 2 / both).sum(1)
    assert (found < 42.0).all(), f"chi-square {found}, of 7 degrees; 42 is one in two millions"
