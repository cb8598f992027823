"""Speculation at several ranks chooses what one rank's single steps do: simulated, on a shared GPU, and on two."""

from collections.abc import Iterator
from typing import Any

import pytest
from model.ranks import PAIRS, open_ranks
from model.speculating import DRAFT, MODEL, WAYS, Scripted, agreed, options, prompts

from loaders.resolve import open_model
from qwen_raw.errors import QwenRawError
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculative import SpeculativeRunner


@pytest.fixture(params=PAIRS)
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    yield from open_ranks(request.param)


def states(runner: SpeculativeRunner) -> list[list[Any]]:
    """Of every rank, after a request: ids and hashes as posted, the decode state, the text, what is counted."""
    found = []
    for each in runner._passes:
        b, s = each.buffers, each.rank.decode.sampler
        end = int(s.state.download()[1]) + 1
        words = [x.download().ravel().tolist() for x in (s.state, b.counts, b.history.view((end,)))]
        found.append([s.ring.words.tolist(), *words])
    return found


@pytest.mark.parametrize("verify", ["rows", "chunk"])
@pytest.mark.parametrize("way", WAYS)
def test_ids_are_those_of_single_steps(ranks: list[Any], way: str, verify: str) -> None:
    """Greedy and drawn, of one rank; and every rank holds the same state."""
    model, many = open_model(MODEL), ranks[0].kind == "cuda"
    if not many and (way, verify) == ("draft", "chunk"):
        pytest.skip("slow, and both of its halves are covered")
    length = 400 if many else 32
    plain = DeviceRunner(ranks[0], model, **options(model, length))
    guessing = SpeculativeRunner(
        ranks, model, guesses=3, verify=verify, governed=False, **WAYS[way], **options(model, length)
    )
    equal = total = 0
    try:
        apart = ranks[0].ordinal != ranks[1].ordinal  # ranks that share a GPU are slow
        counts = ((100, 20) if apart else (20, 5)) if many else (1, 1)
        for temperature, count in zip((0.0, 0.7), counts, strict=True):
            for number, ids in enumerate(prompts(count)):
                request = {"max_tokens": 48 if many else 6, "temperature": temperature, "seed": number}
                want, got = (list(runner.generate(ids, **request)) for runner in (plain, guessing))
                total += len(want)
                equal += agreed(plain, ids, want, got, request)
        first, *others = states(guessing)
        assert all(other == first for other in others)
        assert equal > 0.8 * total, f"{equal} of {total} ids came before the first near-tie of their prompt"
        assert guessing.speculated.right > 0 or not many
    finally:
        guessing.close()
        plain.close()


@pytest.mark.parametrize("comm", ["inline", "lamport", "flag", "twoshot"])
@pytest.mark.parametrize("way", WAYS)
def test_exact_passes_have_the_bits_of_single_steps(ranks: list[Any], way: str, comm: str) -> None:
    """Of the same ranks, whichever way they sum: ids and hashes of logits."""
    model, many = open_model(MODEL), ranks[0].kind == "cuda"
    if not many and way == "draft" and comm != "inline":
        pytest.skip("slow, and the sums do not depend on who guesses")
    length = 400 if many else 32
    how = {**options(model, length), "comm": comm}
    plain = DeviceRunner(ranks, model, **how)
    guessing = SpeculativeRunner(ranks, model, guesses=3, verify="exact", governed=False, **WAYS[way], **how)
    try:
        apart = ranks[0].ordinal != ranks[1].ordinal
        for number, ids in enumerate(prompts((100 if apart else 10) if many else 1)):
            request = {"max_tokens": 64 if many else 8, "temperature": 0.7 * (number % 5 == 4), "seed": number}
            want, got = (list(runner.generate(ids, **request)) for runner in (plain, guessing))
            assert got == want, f"prompt {number}"
            assert guessing.logits_hash == plain.logits_hash
        assert guessing.speculated.guesses > 0
    finally:
        guessing.close()
        plain.close()


def test_passes_of_any_size_and_steps_mix(ranks: list[Any]) -> None:
    """What the host says next, all ranks do; a stream that is left early disturbs nothing."""
    model, many = open_model(MODEL), ranks[0].kind == "cuda"
    length = 600 if many else 26
    request = {"max_tokens": length - 12, "temperature": 0.0, "seed": 0}
    plain = DeviceRunner(ranks, model, **options(model, length))
    guessing = SpeculativeRunner(
        ranks, model, guesses=3, verify="exact", costs={1: 1.5, 3: 2.5}, **WAYS["draft"], **options(model, length)
    )
    try:
        guessing._governor = Scripted([3, 0, 0, 1, 0, 3])  # type: ignore[assignment]
        ids = prompts(1)[0][:8]
        want = list(plain.generate(ids, **request))
        assert list(guessing.generate(ids, **request)) == want
        stream = guessing.generate(ids, **request)
        assert [next(stream) for _ in range(3)] == want[:3]
        stream.close()
        assert list(guessing.generate(ids, **request)) == want
    finally:
        guessing.close()
        plain.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_stalls_is_named(way: str) -> None:
    """Its passes are never launched: the other one gives up, and says for whom it waited."""
    for devices in open_ranks("sim-2"):
        model = open_model(DRAFT)
        runner = SpeculativeRunner(devices, model, guesses=2, limit_ns=50_000_000, **WAYS[way], **options(model, 32))
        assert len(list(runner.generate([3, 4], max_tokens=3, temperature=0.0, seed=0))) == 3
        runner._graphs = {guesses: graphs[:1] for guesses, graphs in runner._graphs.items()}
        with pytest.raises(QwenRawError, match="rank 0 waited 50 ms for rank 1 in call"):
            list(runner.generate([3, 4], max_tokens=4, temperature=0.0, seed=0))
