"""A draft model on a device of its own: ids are those of single steps, guesses those of a draft model beside rank 0."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from model.ranks import TIED
from model.speculating import DRAFT, MODEL, Scripted, agreed, options, prompts

from loaders.resolve import open_model, open_tokenizer
from loaders.synthetic import random_checkpoint
from qwen_raw.engine import SamplingParams, Speculation, load
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculative import SpeculativeRunner
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

Devices = tuple[list[Any], Any]  # the ranks', the draft model's
SIM = ("sim-1", "sim-2")
CUDA = [pytest.param(f"cuda-{name}", marks=pytest.mark.gpu) for name in ("0:0", "0:1", "0,1:0", "0,1:1", "0,0:0")]


def opened(kind: str) -> Iterator[Devices]:
    """ "sim-2": two simulated ranks, and a third device; "cuda-0,1:1": ranks on GPUs 0 and 1, the draft model on 1."""
    where, _, which = kind.partition("-")
    if where == "sim":
        with SimWorld(int(which) + 1) as world:
            *ranks, draft = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
            yield ranks, draft
        return
    from qwen_raw.driver.device import CudaDevice
    from qwen_raw.driver.probe import probe

    ranks, _, draft = which.partition(":")
    numbers = [int(n) for n in (*ranks.split(","), draft)]
    if max(numbers) >= len(probe().gpus):
        pytest.skip("needs two GPUs")
    with ExitStack() as stack:
        *devices, own = [stack.enter_context(CudaDevice(n)) for n in numbers]
        yield devices, own


@pytest.fixture(params=[*SIM, *CUDA])
def devices(request: pytest.FixtureRequest) -> Iterator[Devices]:
    yield from opened(request.param)


@pytest.fixture(params=["sim-1", *CUDA[:2]])
def pair(request: pytest.FixtureRequest) -> Iterator[Devices]:
    """One rank."""
    yield from opened(request.param)


def apart(devices: Devices, length: int, guesses: int = 3, model: str = MODEL, **more: Any) -> SpeculativeRunner:
    """The built-in pair, the draft model on its own device."""
    ranks, draft_device = devices
    more = {"draft": open_model(DRAFT), "draft_device": draft_device, **more}
    checkpoint = open_model(model)
    return SpeculativeRunner(ranks, checkpoint, guesses=guesses, **more, **options(checkpoint, length))


def requests(count: int, tokens: int, temperature: float) -> list[tuple[list[int], dict[str, Any]]]:
    how = {"max_tokens": tokens, "temperature": temperature}
    return [(ids, {**how, "seed": number}) for number, ids in enumerate(prompts(count))]


def close(*runners: DeviceRunner) -> None:
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ids_are_those_of_single_steps(devices: Devices, temperature: float) -> None:
    """Bit for bit, as rows go through decode's kernels here; and the guesses are those of a draft model on rank 0."""
    ranks, _ = devices
    many, model = ranks[0].kind == "cuda", open_model(MODEL)
    shared = len({dev.ordinal for dev in ranks}) < len(ranks)  # slow
    length, count = (400, (20, 5)[shared]) if many else (34, 3 if len(ranks) == 1 and not temperature else 1)
    asked = requests(count, 48 if many else 9, temperature)
    how = {"verify": "exact", "governed": False}
    plain = DeviceRunner(ranks, model, **options(model, length))
    here, there = (apart(devices, length, **how, **way) for way in ({"draft_device": None}, {}))
    try:
        for ids, request in asked:
            want = list(plain.generate(ids, **request))
            assert list(there.generate(ids, **request)) == want
            assert there.logits_hash == plain.logits_hash
            assert list(here.generate(ids, **request)) == want
        one, two = (replace(runner.speculated, cost=None) for runner in (here, there))  # costs are measured
        assert one == two and two.right > 0
    finally:
        close(here, there, plain)


def test_rows_that_are_verified_together(devices: Devices) -> None:
    """As users have it: products of several rows, which only near-ties tell from single steps."""
    ranks, _ = devices
    many, model = ranks[0].kind == "cuda", open_model(MODEL)
    shared = len({dev.ordinal for dev in ranks}) < len(ranks)
    plain = DeviceRunner(ranks, model, **options(model, 400 if many else 32))
    there = apart(devices, 400 if many else 32, guesses=7 if many else 3, governed=False, verify="rows")
    equal = total = 0
    try:
        for ids, request in requests((100, 10)[shared] if many else 1, 48 if many else 9, 0.0):
            want, got = (list(runner.generate(ids, **request)) for runner in (plain, there))
            equal += agreed(plain, ids, want, got, request)
            total += len(want)
        assert equal > 0.8 * total, f"{equal} of {total} ids came before the first near-tie of their prompt"
    finally:
        close(there, plain)


def test_sizes_pauses_and_early_stops(devices: Devices) -> None:
    """Passes of any size, steps between, whose ids are caught up with; streams that are left early; a full context."""
    ranks, _ = devices
    many, model = ranks[0].kind == "cuda", open_model(MODEL)
    length = 300 if many else 26
    ids, request = prompts(1)[0][:8], {"max_tokens": length - 12, "temperature": 0.0, "seed": 0}
    plain = DeviceRunner(ranks, model, **options(model, length))
    there = apart(devices, length, verify="exact", costs={1: 1.5, 3: 2.5})
    try:
        there._governor = Scripted([3, 0, 0, 1, 0, 3, 3])  # type: ignore[assignment]
        want = list(plain.generate(ids, **request))
        assert list(there.generate(ids, **request)) == want
        for taken in (1, 4):
            stream = there.generate(ids, **request)
            assert [next(stream) for _ in range(taken)] == want[:taken]
            stream.close()
        assert list(there.generate(ids, **request)) == want
        full = {**request, "max_tokens": 6}
        long = [int(x) for x in np.arange(length - 6) % 90 + 5]
        assert list(there.generate(long, **full)) == list(plain.generate(long, **full))
        assert list(there.generate(ids, **{**request, "max_tokens": 0})) == []
        assert list(there.generate(ids, **request)) == want
    finally:
        close(there, plain)


def test_a_model_guesses_itself_right(pair: Devices) -> None:
    """Every time: the last step of a pass, beside the verification, leaves its last guess's keys before the next."""
    many, ids = pair[0][0].kind == "cuda", open_tokenizer(open_model(DRAFT)).encode("First Citizen:\nBefore we")
    length = 400 if many else 48
    runner = apart(pair, length, model=DRAFT, governed=False, verify="exact")
    try:
        list(runner.generate(ids, max_tokens=length - 16, temperature=1.5, seed=1))
        counts = runner.speculated
        assert counts.right == counts.compared >= 3 * ((length - 17) // 4), counts.line()
    finally:
        runner.close()


def test_a_draft_model_catches_up(pair: Devices) -> None:
    """After steps without guesses it is handed the ids that it has not seen, more than one payload of them."""
    many, ids = pair[0][0].kind == "cuda", open_tokenizer(open_model(DRAFT)).encode("First Citizen:\nBefore we")
    length, pause = (500, 70) if many else (48, 5)
    runner = apart(pair, length, model=DRAFT, costs={3: 2.0})
    try:
        runner._governor = Scripted([3, *[0] * pause, 3])  # type: ignore[assignment]
        for seed in range(6 if many else 2):  # prefill's keys are not decode's bits: now and then an id differs
            list(runner.generate(ids, max_tokens=2 * pause + 20, temperature=1.5, seed=seed))
        counts = runner.speculated
        assert counts.steps >= 2 * pause and counts.compared > 20
        assert counts.right >= 0.9 * counts.compared, counts.line()
    finally:
        runner.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_random_schedules(ranks: int, rng: np.random.Generator) -> None:
    """Whoever is fast or slow: a model guesses itself right, with steps and catching up between."""
    found = []
    for seed in (None, int(rng.integers(1 << 31))):
        with SimWorld(ranks + 1, seed=seed) as world:
            *devices, own = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
            runner = apart((devices, own), 32, model=DRAFT, costs={1: 1.5, 3: 2.5}, verify="exact")
            runner._governor = Scripted([3, 0, 1, 3, 0, 0, 3])  # type: ignore[assignment]
            found.append(list(runner.generate([3, 4, 5], max_tokens=14, temperature=0.0, seed=0)))
            assert runner.speculated.right == runner.speculated.compared > 4
            runner.close()
    assert found[0] == found[1], f"of seed {seed}"


@pytest.mark.parametrize("V", [120, 260])
def test_it_may_know_fewer_ids_or_more(pair: Devices, V: int) -> None:
    """Row 0 is the target's id, whatever the draft model takes it for."""
    config = replace(TIED, H=4, KV=2, I=64, L=1, V=204)
    model, draft = random_checkpoint(config, "bf16", 1), random_checkpoint(replace(config, V=V), "bf16", 2)
    (dev,), own = pair
    plain = DeviceRunner(dev, model, **options(model, 48))
    runner = SpeculativeRunner(
        dev, model, guesses=2, draft=draft, draft_device=own, verify="exact", **options(model, 48)
    )
    request = {"max_tokens": 12, "temperature": 2.0, "seed": 3}
    try:
        want = list(plain.generate([5, 150, 202], **request))
        assert max(want) >= 120
        assert list(runner.generate([5, 150, 202], **request)) == want
    finally:
        close(runner, plain)


def test_the_shortest_context(pair: Devices) -> None:
    """Payloads are whole packs, however few positions there are."""
    there = apart(pair, 1, guesses=1, costs={1: 1.5})
    try:
        assert len(list(there.generate([3], max_tokens=1, temperature=0.0, seed=0))) == 1
    finally:
        there.close()


def test_nothing_waits_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's first pass is queued when the first id is there: a poll has a time limit, a prompt has none."""
    said: list[str] = []
    read, queue = SpeculativeRunner._read, SpeculativeRunner._queue_passes
    monkeypatch.setattr(SpeculativeRunner, "_read", lambda *a, **k: (said.append("id"), read(*a, **k))[1])
    monkeypatch.setattr(SpeculativeRunner, "_queue_passes", lambda *a: (said.append("passes"), queue(*a))[1])
    for devices in opened("sim-1"):
        for own, want in ((devices[1], ["id", "passes", "passes", "id"]), (None, ["passes", "id", "passes", "id"])):
            runner = apart(devices, 32, draft_device=own, governed=False)
            said.clear()
            list(runner.generate([3, 4], max_tokens=2, temperature=0.0, seed=0))
            assert said == want
            runner.close()


@pytest.mark.parametrize(
    ("kept", "said"),
    [(slice(0, 1), "rank 0 waited 50 ms for the draft model in call"), (slice(1, 2), "the draft model waited 50 ms")],
)
def test_what_stalls_is_named(kept: slice, said: str) -> None:
    """One part of a pass is never launched."""
    for devices in opened("sim-1"):
        runner = apart(devices, 32, model=DRAFT, limit_ns=50_000_000, governed=False)
        assert len(list(runner.generate([3, 4], max_tokens=3, temperature=0.0, seed=0))) == 3
        runner._graphs = {guesses: graphs[kept] for guesses, graphs in runner._graphs.items()}
        with pytest.raises(QwenRawError, match=said):
            list(runner.generate([3, 4], max_tokens=4, temperature=0.0, seed=0))


def test_ctrl_c_between_the_parts_of_a_pass_leaves_neither_alone() -> None:
    """What is queued on rank 0 is queued for the draft model too; the next request finds both where they should be."""
    for devices in opened("sim-1"):
        runner = apart(devices, 32, model=DRAFT, governed=False)
        request = {"max_tokens": 6, "temperature": 0.0, "seed": 0}
        want = list(runner.generate([3, 4], **request))
        graphs = runner._graphs[3]

        class Interrupted:
            def launch(self, real: Any = graphs[0]) -> None:
                real.launch()
                signal.raise_signal(signal.SIGINT)

        runner._graphs[3] = (Interrupted(), *graphs[1:])  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            list(runner.generate([3, 4], **request))
        runner._graphs[3] = graphs
        assert list(runner.generate([3, 4], **request)) == want
        runner.close()


def test_an_engine_has_it() -> None:
    """`load` opens the device, and its JSON report says what it holds."""
    said = []
    for speculation in (None, Speculation(draft=DRAFT, guesses=2, draft_device=1)):
        with load(device="sim", max_model_len=32, speculation=speculation) as engine:
            out = engine.generate("ROMEO:", SamplingParams(max_tokens=5, temperature=0.0))
            said.append((out.token_ids, len(out.stats.as_dict()["peak_bytes"])))
    (plain, one), (guessed, two) = said
    assert plain == guessed and (one, two) == (1, 2)


def test_devices_without_a_way_to_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded."""
    loaded: list[int] = []
    monkeypatch.setattr(DeviceRunner, "_assemble", lambda *_, **__: loaded.append(1))
    for (dev,), _ in opened("sim-1"):
        for _, other in opened("sim-1"):
            with pytest.raises(QwenRawError, match="not a rank of the same simulated world"):
                apart(([dev], other), 32)
    assert not loaded


def test_a_draft_device_without_a_draft_model_is_refused() -> None:
    for devices in opened("sim-1"):
        with pytest.raises(UsageError, match="a draft device without a draft model"):
            apart(devices, 32, draft=None, ngram=2)


def test_memory_of_all_devices_is_counted(pair: Devices) -> None:
    """By GPU, the draft model's too."""
    (dev,), own = pair
    if dev.kind == "cuda" and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other workers take and give back memory of this GPU meanwhile: run it with -n 0")
    model, draft = open_model(MODEL), open_model(DRAFT)
    plain = DeviceRunner(dev, model, **options(model, 64))
    (alone,) = plain.peak_bytes
    plain.close()
    small = DeviceRunner(own, draft, **options(draft, 64))
    weights = small.bytes_per_token
    small.close()
    there = apart(pair, 64)
    try:
        if own.ordinal == dev.ordinal:
            assert len(there.peak_bytes) == 1 and there.peak_bytes[0] >= alone + weights
        else:
            of_rank, of_draft = there.peak_bytes
            assert of_rank >= alone and weights <= of_draft < alone
        assert there.device_name.endswith(f"draft model on GPU {own.ordinal}")
        assert dev.kind == "cuda" or there.device_name.startswith("SIMT simulator, draft model")
    finally:
        there.close()
