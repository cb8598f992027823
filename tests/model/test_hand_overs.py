"""A model in stages, and prefill apart from decode: ids and hashes are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model.ranks import PAIRS, TIED, biased_checkpoint, open_ranks, sure

from loaders.resolve import open_model
from qwen_raw.config import ModelConfig
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.model.pipeline import PipelineRunner, Stage, cuts
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.transfer import TransferRunner
from qwen_raw.reference import KVCache, ReferenceModel

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDEN_TOLERANCE = 6e-2  # twice what bf16 activations cost a logit (test_device_runner.py)
UNTIED = ModelConfig(
    D=144, H=4, KV=2, HD=64, I=208, V=100, L=3, rms_eps=1e-5, rope_theta=1e4, max_position=256, tied=False
)
SMALL = replace(TIED, H=2, KV=1, I=96)
RUNNERS = {"pipeline": PipelineRunner, "transfer": TransferRunner}
Make = Callable[..., Any]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    yield from open_ranks(request.param)


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS.keys())
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def make() -> Iterator[Make]:
    """Runners that are closed after the test."""
    made: list[DeviceRunner] = []

    def new(kind: Any, devices: Any, model: Any, dtype: str = "bf16", **options: Any) -> DeviceRunner:
        length = options.pop("max_model_len", 96)
        vocab = options.pop("text_vocab", model.config.V)
        made.append(
            kind(devices, model, dtype=dtype, max_model_len=length, text_vocab=vocab, owns_device=False, **options)
        )
        return made[-1]

    yield new
    for runner in made:
        runner.close()


def generated(runner: Any, ids: list[int], steps: int, temperature: float = 0.0) -> list[tuple[int, int]]:
    """(id, hash of the logits that chose it) of every step."""
    options = {"max_tokens": steps, "temperature": temperature, "seed": 5}
    return [(got, runner.logits_hash) for got in runner.generate(ids, **options)]


@pytest.mark.parametrize("config", [SMALL, UNTIED], ids=["tied", "untied"])
def test_ids_and_hashes_are_those_of_one_device(pair: list[Any], make: Make, kind: Any, config: ModelConfig) -> None:
    """Request after request, greedy and drawn; one of them is left early, its surplus steps still queued."""
    model, gpu = biased_checkpoint(config), pair[0].kind == "cuda"
    steps = 60 if gpu else 4
    one, two = make(DeviceRunner, pair[0], model), make(kind, pair, model)
    left = two.generate([3, 4], max_tokens=9, temperature=0.0, seed=0)
    next(left), next(left)
    left.close()
    for prompt, temperature in (([7, 90, 33], 0.0), ([2] * (30 if gpu else 2), 0.8)):
        assert generated(two, prompt, steps, temperature) == generated(one, prompt, steps, temperature)


def test_golden_ids(pair: list[Any], make: Make, kind: Any) -> None:
    """What Hugging Face transformers chose, until the golden top two come within the tolerance of each other."""
    gpu = pair[0].kind == "cuda"
    name = "tiny-shakespeare" if gpu else "tiny-shakespeare-draft"
    values, model = np.load(GOLDEN / f"{name}.npz"), open_model(name)
    runner = make(kind, pair, model, max_model_len=800)
    compared = 0
    for k in range(6) if gpu else (1,):
        prompt, golden = values[f"prompt{k}"].tolist(), values[f"greedy{k}"].tolist()
        steps = 48 if gpu else 6
        forced = prompt + golden[: steps - 1]
        rows = ReferenceModel(model.config, model, activations="fp32").forward(
            forced, KVCache(model.config, len(forced))
        )
        certain = sure(rows[-steps:], GOLDEN_TOLERANCE)
        got = [id_ for id_, _ in generated(runner, prompt, steps)]
        assert got[:certain] == golden[:certain], f"prompt {k}"
        compared += certain
    assert compared >= 5


def test_logits_are_those_of_one_device(pair: list[Any], make: Make, kind: Any) -> None:
    model = biased_checkpoint(UNTIED)
    one, two = make(DeviceRunner, pair[0], model), make(kind, pair, model)
    for path in ("logits", "decode_logits"):
        np.testing.assert_array_equal(getattr(two, path)([4, 9, 1]), getattr(one, path)([4, 9, 1]))


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_fp8_and_a_prompt_of_several_chunks(
    pair: list[Any], make: Make, kind: Any, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk after chunk goes through the stages; all of a prompt's rows change hands, with all that is kept of them."""
    gpu = pair[0].kind == "cuda"
    monkeypatch.setattr("qwen_raw.model.state.CHUNK", 32 if gpu else 8)
    model = biased_checkpoint(SMALL)
    one, two = (make(k, d, model, "fp8", kv=kv) for k, d in ((DeviceRunner, pair[0]), (kind, pair)))
    assert all(rank.cache.k[0].dtype == one.ranks[0].cache.k[0].dtype for rank in two.ranks)
    prompt = [1 + 7 * i % 200 for i in range(64 if gpu else 16)]  # all rows of the last chunk
    assert generated(two, prompt, 3) == generated(one, prompt, 3)


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_gives_the_same_ids(make: Make, kind: Any, seed: int) -> None:
    """Blocks, stores to the other rank and dependent launches in any order."""
    model, want = biased_checkpoint(SMALL), None
    for options in ({}, {"seed": seed}):
        for devices in open_ranks("sim-2", **options):
            got = generated(make(kind, devices, model, max_model_len=16), [5, 6], 3)
            assert want in (None, got)
            want = got


@pytest.mark.parametrize("stages", [1, 3])
def test_any_number_of_stages(make: Make, stages: int) -> None:
    """One, which hands nothing over; and one in the middle, with neither embedding nor head."""
    model = biased_checkpoint(UNTIED)
    for devices in open_ranks(f"sim-{stages}"):
        one, all_ = make(DeviceRunner, devices[0], model), make(PipelineRunner, devices, model)
        assert generated(all_, [5, 6], 3) == generated(one, [5, 6], 3)
        held = [rank.weights for rank in all_.ranks]
        assert [len(w.layers) for w in held] == [UNTIED.L // stages] * stages
        assert sum(w.embed.nbytes for w in held) == sum(w.head.nbytes for w in held) == 2 * UNTIED.V * UNTIED.D
        assert all_.bytes_per_token == one.bytes_per_token


def test_layers_are_split_evenly() -> None:
    config = replace(TIED, L=7)
    assert cuts(config, 3) == [range(2), range(2, 4), range(4, 7)]
    with pytest.raises(UsageError, match="8 stages of 7 layers: a stage has at least one"):
        cuts(config, 8)


def test_two_devices_are_needed_to_decode_elsewhere() -> None:
    for devices in open_ranks("sim-3"):
        with pytest.raises(UsageError, match="3 devices: one computes prompts, the other decodes"):
            TransferRunner(devices, biased_checkpoint(SMALL), dtype="bf16", max_model_len=16, text_vocab=SMALL.V)


def test_a_stage_that_is_waited_for_in_vain_is_named(make: Make) -> None:
    """And a device that gets no keys and values."""
    model = biased_checkpoint(SMALL)
    for kind, waiting, who in (
        (PipelineRunner, 1, "rank 1 waited 50 ms for rank 0 in call 1"),
        (PipelineRunner, 0, "rank 0 waited 50 ms for rank 1 in call 1"),
        (TransferRunner, 1, "rank 1 waited 50 ms for rank 0 in call 1"),
    ):
        for devices in open_ranks("sim-2"):
            runner = kind(devices, model, dtype="bf16", max_model_len=16, text_vocab=SMALL.V, limit_ns=50_000_000)
            rank = runner.ranks[waiting]
            with pytest.raises(QwenRawError, match=who), runner._naming_ranks():
                if isinstance(rank, Stage):
                    rank.capture().launch()
                else:
                    runner.hand_over.take(16)
                rank.device.synchronize()
