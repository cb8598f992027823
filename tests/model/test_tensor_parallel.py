"""Several ranks compute what one does, and each of them the same bits: simulated, on shared GPUs, and on two."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model.lost_rank import MISSES, WAYS, miss_prompts, without_the_last
from model.ranks import KINDS, ODD, PAIRS, TIED, biased_checkpoint, open_ranks, sure

import qwen_raw
from loaders.resolve import open_model
from qwen_raw.comm.measure import INLINE
from qwen_raw.comm.reduce import PATHS
from qwen_raw.config import ModelConfig
from qwen_raw.driver.probe import probe
from qwen_raw.errors import QwenRawError
from qwen_raw.generation.sampling import gumbel_noise
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.reference import KVCache, ReferenceModel

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDEN_TOLERANCE = 6e-2  # twice what bf16 activations cost a logit (test_device_runner.py)
CONFIGS = {"odd": ODD, "tied": TIED}
Make = Callable[..., DeviceRunner]


@pytest.fixture(params=KINDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    yield from open_ranks(request.param)


@pytest.fixture(params=PAIRS)
def few_ranks(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Two: for what does not depend on how many there are."""
    yield from open_ranks(request.param)


@pytest.fixture
def make() -> Iterator[Make]:
    """Runners that are closed after the test."""
    made: list[DeviceRunner] = []

    def new(devices: Any, model: Any, dtype: str = "bf16", **options: Any) -> DeviceRunner:
        made.append(
            DeviceRunner(
                devices, model, dtype=dtype, max_model_len=96, text_vocab=model.config.V, owns_device=False, **options
            )
        )
        return made[-1]

    yield new
    for runner in made:
        runner.close()


def ring_words(runner: DeviceRunner) -> list[np.ndarray[Any, Any]]:
    return [rank.decode.sampler.ring.words.copy() for rank in runner.ranks]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("stored", "dtype"), [("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"), ("fp8", "bf16")])
def test_logits_equal_those_of_one_rank(
    ranks: list[Any], make: Make, rng: np.random.Generator, config: ModelConfig, stored: str, dtype: str
) -> None:
    """Prefill and decode; and all ranks hold the same residual stream, bit by bit."""
    if len(ranks) > 2 and stored != dtype:
        pytest.skip("every route of the weights is taken at two ranks")
    pack = 16 if dtype == "fp8" else 8
    if len(ranks) not in config.legal_tp(pack):
        pytest.skip(f"shares of {config.I} at {len(ranks)} ranks are not whole packs of {pack}")
    if (stored, dtype) == ("bf16", "bf16"):
        config = replace(config, D=config.D - 8)  # which fp8 would not take
    model = biased_checkpoint(config, stored)
    one, all_ = make(ranks[0], model, dtype), make(ranks, model, dtype)
    ids = rng.integers(0, config.V, 40 if ranks[0].kind == "cuda" else 5).tolist()
    for path in ("logits", "decode_logits"):
        want, got = getattr(one, path)(ids), getattr(all_, path)(ids)
        worst = np.abs(got - want).max() / np.abs(want).max()
        assert worst < 1e-2, f"{path}: off by {worst:.2%} of the largest logit"
        buffers = [r.prefill.h.view((len(ids), config.D)) if path == "logits" else r.decode.h for r in all_.ranks]
        streams = [h.download() for h in buffers]
        assert all((h.view(np.uint32) == streams[0].view(np.uint32)).all() for h in streams), path


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ids_equal_those_of_one_rank(ranks: list[Any], make: Make, temperature: float) -> None:
    """Greedy, and drawn with a seed, until two ids are too close to call; every rank posts the same ids and hashes."""
    model, prompt, seed = biased_checkpoint(TIED), [7, 190, 33], 11
    steps = 40 if ranks[0].kind == "cuda" else 8
    one, all_ = make(ranks[0], model), make(ranks, model)
    options = {"max_tokens": steps, "temperature": temperature, "seed": seed}
    want, got = list(one.generate(prompt, **options)), list(all_.generate(prompt, **options))
    logits = one.decode_logits(prompt + want[:-1])[len(prompt) - 1 :]
    rows, tolerance = logits, 1e-2 * float(np.abs(logits).max())
    if temperature:
        noise = [gumbel_noise(TIED.V, len(prompt) + step, seed) for step in range(steps)]
        rows, tolerance = logits / temperature + np.stack(noise), tolerance / temperature
    certain = sure(rows, tolerance)
    assert certain >= 3, "too few ids to compare: choose another seed"
    assert got[:certain] == want[:certain]
    words = ring_words(all_)
    assert all((w == words[0]).all() for w in words)
    assert list(all_.generate(prompt, **options)) == got


def test_any_schedule_gives_the_same_ids(make: Make) -> None:
    """Ranks that run ahead or lag behind, links that hold stores back; and no access races with another."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"schedule seed {seed}")
    found = []
    for options in ({}, {"seed": seed}, {"race": True}):
        for devices in open_ranks("sim-2", **options):
            runner = make(devices, biased_checkpoint(replace(TIED, H=4, KV=2, I=64)))
            found.append(list(runner.generate([3, 4], max_tokens=4, temperature=0.9, seed=5)))
            runner.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    ("world", "comm"), [(2, "lamport"), (4, "lamport"), (2, INLINE), (4, INLINE), (2, "flag"), (2, "twoshot")]
)
def test_a_rank_that_is_lost_is_named(make: Make, world: int, comm: str, how: str) -> None:
    """One that never comes: the others give up after the limit and say for whom they waited. Or its kernel traps."""
    for devices in open_ranks(f"sim-{world}"):
        runner = make(devices, biased_checkpoint(replace(TIED, I=64)), limit_ns=50_000_000, comm=comm)
        step = runner._step
        assert step is not None
        runner._step, _kept = without_the_last(step, how, devices)
        with pytest.raises(QwenRawError) as caught:
            list(runner.generate([3, 4], max_tokens=4, temperature=0.0, seed=0))
        runner._step = step
        said = str(caught.value)
        assert (f"waited 50 ms for rank {world - 1} in call" if how == "stalls" else f"rank {world - 1}") in said


@pytest.mark.parametrize(("world", "comm"), [(2, "lamport"), (4, "lamport"), (2, "twoshot")])
def test_a_rank_that_misses_a_prompt_is_named(make: Make, world: int, comm: str) -> None:
    """The sums of a chunk, by rows or not, have the same deadline."""
    for devices in open_ranks(f"sim-{world}"):
        runner = make(devices, biased_checkpoint(replace(TIED, I=64)), limit_ns=50_000_000, comm=comm)
        options = {"max_tokens": 1, "temperature": 0.0, "seed": 0}
        assert len(list(runner.generate([3, 4], **options))) == 1
        assert (runner.ranks[0].residual.rows is not None) == (comm == "lamport")
        graphs = runner.prompt.graphs
        miss_prompts(runner)
        with pytest.raises(QwenRawError, match=f"waited 50 ms for rank {world - 1} in call"):
            list(runner.generate([3, 4], **options))
        runner.prompt.graphs = graphs


@pytest.mark.gpu
@pytest.mark.parametrize("how", (*WAYS, MISSES))
@pytest.mark.parametrize("comm", ["lamport", INLINE, "flag", "twoshot"])
@pytest.mark.parametrize("which", ["0,0", "0,1"])
def test_a_rank_that_is_lost_on_a_gpu_is_named(which: str, comm: str, how: str) -> None:
    """And the process ends, with one line for the failure and none of anything else.

    Ranks that share a GPU share its failure: which of them it was cannot be told.
    """
    if which == "0,1" and len(probe().gpus) < 2:
        pytest.skip("needs two GPUs")
    roots = [str(Path(__file__).parents[1]), str(Path(qwen_raw.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-m", "model.lost_rank", which, comm, how],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(roots)},
    )
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert done.stdout.count("\n") == 1
    if how in ("stalls", MISSES):
        assert "rank 0 waited 300 ms for rank 1 in call" in done.stdout
    else:
        assert ("rank 1" if which == "0,1" else "rank ") in done.stdout


@pytest.mark.parametrize("path", (*PATHS, INLINE))
def test_every_path_of_the_sums(few_ranks: list[Any], make: Make, path: str) -> None:
    """The residual stream of prefill and decode, and the ids; "host" without a graph."""
    model, ids = biased_checkpoint(replace(TIED, H=4, KV=2, I=64)), [3, 4, 150]
    one, all_ = make(few_ranks[0], model), make(few_ranks, model, comm=path)
    for logits in ("logits", "decode_logits"):
        want, got = getattr(one, logits)(ids), getattr(all_, logits)(ids)
        assert np.abs(got - want).max() < 1e-2 * np.abs(want).max()
    first = list(all_.generate(ids, max_tokens=4, temperature=0.9, seed=5))
    assert list(all_.generate(ids, max_tokens=4, temperature=0.9, seed=5)) == first
    assert bool(all_._live_step().graphs) == (path != "host")


def test_products_exchange_their_rows_at_any_number_of_ranks(ranks: list[Any], make: Make) -> None:
    """Path "inline": logits of decode as one rank's, the same residual stream everywhere."""
    model, ids = biased_checkpoint(replace(TIED, I=8 * 16, L=1)), [3, 4, 150]
    one, all_ = make(ranks[0], model), make(ranks, model, comm=INLINE)
    want, got = one.decode_logits(ids), all_.decode_logits(ids)
    assert np.abs(got - want).max() < 1e-2 * np.abs(want).max()
    streams = [rank.decode.h.download() for rank in all_.ranks]
    assert all((stream == streams[0]).all() for stream in streams)


def test_a_consumer_that_leaves_early_disturbs_nothing(few_ranks: list[Any], make: Make) -> None:
    runner = make(few_ranks, biased_checkpoint(TIED))
    options = {"max_tokens": 8, "temperature": 0.9, "seed": 5}
    whole = list(runner.generate([3, 4], **options))
    for taken in (1, 3):
        stream = runner.generate([3, 4], **options)
        assert [next(stream) for _ in range(taken)] == whole[:taken]
        stream.close()
    assert list(runner.generate([3, 4], **options)) == whole


def test_a_prompt_of_several_chunks(few_ranks: list[Any], make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_raw.model.state.CHUNK", 4)
    model, ids = biased_checkpoint(TIED), [5, 9, 100, 201, 3, 4, 5, 6, 7, 8]
    one, all_ = make(few_ranks[0], model), make(few_ranks, model)
    (want,) = one.generate(ids, max_tokens=1, temperature=0.0, seed=0)
    logits = one.ranks[0].decode.logits.download()
    (got,) = all_.generate(ids, max_tokens=1, temperature=0.0, seed=0)
    parts = np.concatenate([rank.decode.logits.download() for rank in all_.ranks])
    assert np.abs(parts - logits).max() < 1e-2 * np.abs(logits).max()
    if sure(logits[None], 1e-2 * float(np.abs(logits).max())):
        assert got == want


def test_the_built_in_model_equals_golden(ranks: list[Any], make: Make) -> None:
    """tiny-shakespeare's greedy ids, until the golden top two are too close to call, at the degrees that it takes."""
    model, values = open_model("tiny-shakespeare"), np.load(GOLDEN / "tiny-shakespeare.npz")
    if len(ranks) not in model.config.legal_tp():
        pytest.skip(f"tiny-shakespeare does not split into {len(ranks)}")
    runner, compared = make(ranks, model), 0
    for k in range(6) if ranks[0].kind == "cuda" else (0,):
        prompt, want = values[f"prompt{k}"].tolist(), values[f"greedy{k}"].tolist()
        steps = min(48, 96 - len(prompt)) if ranks[0].kind == "cuda" else 4
        if steps < 1:
            continue
        reference = ReferenceModel(model.config, model, activations="fp32")
        rows = reference.forward(prompt + want[: steps - 1], KVCache(model.config, 96))[-steps:]
        certain = sure(rows, GOLDEN_TOLERANCE)
        got = list(runner.generate(prompt, max_tokens=steps, temperature=0.0, seed=0))
        assert got[:certain] == want[:certain], f"prompt {k}"
        compared += certain
    assert compared >= (40 if ranks[0].kind == "cuda" else 3)
