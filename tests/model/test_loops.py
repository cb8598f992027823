"""Passes that repeat themselves on the device choose what queued ones do: simulated, on a GPU, at several ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
from model.ranks import PAIRS, open_ranks
from model.speculating import MODEL, WAYS, Scripted, agreed, options, prompts

import qwen_raw
from loaders.resolve import open_model
from qwen_raw.errors import UnavailableError, UsageError
from qwen_raw.model import loops
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculative import SpeculativeRunner


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@pytest.fixture(params=PAIRS)
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    yield from open_ranks(request.param)


def looping(devices: Any, length: int, **how: Any) -> SpeculativeRunner:
    model = open_model(MODEL)
    runner = SpeculativeRunner(devices, model, guesses=3, loop="device", **how, **options(model, length))
    assert runner.notes == ()
    return runner


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ids_are_those_of_queued_passes(dev: Any, way: dict[str, Any], temperature: float) -> None:
    """Bit for bit; each request is one launch of passes."""
    model, many = open_model(MODEL), dev.kind == "cuda"
    length = 400 if many else 32
    queued = SpeculativeRunner(dev, model, guesses=3, governed=False, **way, **options(model, length))
    runner = looping(dev, length, governed=False, **way)
    try:
        for number, ids in enumerate(prompts(20 if many else 1)):
            request = {"max_tokens": 100 if many else 6, "temperature": temperature, "seed": number}
            want = list(queued.generate(ids, **request))
            assert list(runner.generate(ids, **request)) == want
            assert runner.logits_hash == queued.logits_hash
            counts, others = runner.speculated, queued.speculated
            assert counts.loops == number + 1 and others.loops == 0
            assert (counts.passes, counts.right, counts.guesses) == (others.passes, others.right, others.guesses)
    finally:
        runner.close()
        queued.close()


def test_a_full_ring_ends_a_loop(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that takes its time is not overrun; when it has read on, there is another loop."""
    monkeypatch.setattr(loops, "SLOTS", 8)  # which loops know of: the ring is larger
    many = dev.kind == "cuda"
    runner = looping(dev, 64 if many else 32, governed=False, ngram=3)
    try:
        ids, request = prompts(1)[0][:8], {"max_tokens": 40 if many else 16, "temperature": 0.0, "seed": 0}
        got = []
        first = runner._buffers[0].ended[1]
        for token in runner.generate(ids, **request):
            got.append(token)
            dev.synchronize()
            assert runner._buffers[0].ended[1] - first <= len(got) + 8
        assert runner.speculated.loops >= (4 if many else 2)
        assert list(runner.generate(ids, **request)) == got
    finally:
        runner.close()


def test_the_size_of_passes_changes(dev: Any, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And steps between; on the simulator, where a loop runs to its end at once, whenever the ring is full."""
    monkeypatch.setattr(loops, "SLOTS", 8)
    model, many = open_model(MODEL), dev.kind == "cuda"
    length = 400 if many else 36
    ids, request = [5, 6, 7, 8] * 2, {"max_tokens": length - 12, "temperature": 0.0, "seed": 0}
    plain = DeviceRunner(dev, model, **options(model, length))
    runner = looping(dev, length, verify="exact", costs={1: 1.5, 3: 2.5}, **way)
    try:
        want = list(plain.generate(ids, **request))
        for script in ([3, 0, 0, 1, 0, 3, 3], [0], [0, 0, 0, 3, 3, 3]) if many else ([0, 3, 1],):
            runner._governor = Scripted(script)  # type: ignore[assignment]
            before = runner.speculated
            assert list(runner.generate(ids, **request)) == want
            counts = runner.speculated.since(before)
            assert counts.passes + counts.right == request["max_tokens"] - 1
            sizes = runner._log  # as loops told, when they ended
            assert len(sizes) == counts.passes and set(sizes) <= {*script}
            assert counts.guesses == sum(sizes) and counts.steps == sizes.count(0)
            assert counts.cost == pytest.approx(sizes.count(0) + 1.5 * sizes.count(1) + 2.5 * sizes.count(3))
    finally:
        runner.close()
        plain.close()


def test_streams_that_are_left_early(dev: Any, way: dict[str, Any]) -> None:
    """The loop ends with the pass under way, and the next request sees nothing of it."""
    many = dev.kind == "cuda"
    runner = looping(dev, 400 if many else 24, governed=False, **way)
    try:
        ids, request = prompts(1)[0][:8], {"max_tokens": 30 if many else 5, "temperature": 0.0, "seed": 0}
        want = list(runner.generate(ids, **request))
        for taken in (0, 1, 3, 7) if many else (1,):
            stream = runner.generate(ids, **request)
            assert [next(stream) for _ in range(taken)] == want[:taken]
            stream.close()
        for most in (0, 1, 2, 30) if many else (0, 1, 5):
            assert list(runner.generate(ids, max_tokens=most, temperature=0.0, seed=0)) == want[:most]
        length = runner.max_model_len
        full = [token % 90 + 5 for token in range(length - 2)]
        assert len(list(runner.generate(full, max_tokens=2, temperature=0.0, seed=0))) == 2
    finally:
        runner.close()


def test_where_there_are_no_loops_the_host_queues(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(MODEL)

    def none() -> None:
        raise UnavailableError("the driver is of CUDA 12.3, loops begin with 12.4")

    monkeypatch.setattr(dev, "require_loops", none)
    runner = SpeculativeRunner(dev, model, guesses=2, ngram=2, loop="device", **options(model, 48))
    try:
        (note,) = runner.notes
        assert note.startswith("no loop on the device, passes are queued by the host: the driver is of CUDA 12.3")
        assert len(list(runner.generate([5, 6, 7, 8] * 2, max_tokens=6, temperature=0.0, seed=0))) == 6
        assert runner.speculated.loops == 0 and runner.speculated.passes > 0
    finally:
        runner.close()


def test_a_draft_model_elsewhere_is_refused(dev: Any) -> None:
    model = open_model(MODEL)
    with pytest.raises(UsageError, match="a loop on one device has no draft model on another"):
        SpeculativeRunner(
            dev, model, guesses=2, draft=model, draft_device=dev, loop="device", **options(model, 48)
        )  # fmt: skip


def test_several_ranks(ranks: list[Any]) -> None:
    """GPUs loop; the simulator says that it does not."""
    model, cuda = open_model(MODEL), ranks[0].kind == "cuda"
    plain = DeviceRunner(ranks[0], model, **options(model, 300 if cuda else 32))
    runner = SpeculativeRunner(
        ranks, model, guesses=3, governed=False, loop="device", **WAYS["draft"], **options(model, plain.max_model_len)
    )
    try:
        assert ("several ranks" in "".join(runner.notes)) == (not cuda)
        for number, ids in enumerate(prompts(5 if cuda else 1)):
            request = {"max_tokens": 40 if cuda else 6, "temperature": 0.0, "seed": number}
            agreed(plain, ids, list(plain.generate(ids, **request)), list(runner.generate(ids, **request)), request)
        assert runner.speculated.loops == (5 if cuda else 0)
        if cuda:
            stream = runner.generate(ids, **request)
            early = [next(stream) for _ in range(3)]
            stream.close()
            assert list(runner.generate(ids, **request))[:3] == early
    finally:
        runner.close()
        plain.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_says_how_passes_follow_each_other(tp: int) -> None:
    speculation = qwen_raw.Speculation(ngram=2, guesses=2, loop="device")
    with qwen_raw.load(device="sim", tp=tp, max_model_len=24, speculation=speculation) as engine:
        out = engine.generate([5, 6, 7, 8] * 2, qwen_raw.SamplingParams(max_tokens=4, ignore_eos=True))
    note = "no loop on the device, passes are queued by the host: the simulator has no loops of several ranks"
    assert (note in engine.notes) == (tp == 2)
    assert ("in 1 loop on the device" in out.stats.line()) == (tp == 1)
