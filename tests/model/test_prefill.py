"""Prefill through captured graphs: every bucket edge, padding that shows nowhere, one host wait, prompts of chunks."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from model.ranks import TIED, biased_checkpoint, open_ranks

from loaders.resolve import open_model, open_tokenizer
from loaders.synthetic import (
    SyntheticCheckpoint,
    random_checkpoint,
    synthetic_bound,
    synthetic_values,
    tensor_id,
)
from qwen_raw.config import ModelConfig
from qwen_raw.engine import Engine
from qwen_raw.generation.sampling import SamplingParams
from qwen_raw.kernels.gemm_sm90 import ARCH
from qwen_raw.model.prompt import buckets
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.reference import KVCache, ReferenceModel

SMALL = ModelConfig(
    D=64, H=2, KV=1, HD=64, I=96, V=120, L=2, rms_eps=1e-6, rope_theta=1e5, max_position=32768, tied=False
)
TOLERANCE = 1e-2  # of the largest logit: what bf16 activations cost


def open_runner(devices: Any, model: Any, max_model_len: int, **options: Any) -> DeviceRunner:
    return DeviceRunner(
        devices,
        model,
        dtype="bf16",
        max_model_len=max_model_len,
        text_vocab=model.config.V,
        owns_device=False,
        **options,
    )


def greedy(runner: DeviceRunner, ids: list[int], tokens: int = 1) -> tuple[list[int], np.ndarray[Any, Any]]:
    """The ids that follow, and the logits that chose the last of them."""
    found = list(runner.generate(ids, max_tokens=tokens, temperature=0.0, seed=0))
    return found, np.concatenate([rank.decode.logits.download() for rank in runner.ranks])


def off(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    """The largest difference, as a share of the largest logit."""
    return float(np.abs(got - want).max() / np.abs(want).max())


def test_buckets_are_powers_of_two_and_midpoints() -> None:
    assert buckets(2048) == (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    assert buckets(100) == (16, 24, 32, 48, 64, 96, 100)
    assert buckets(16) == (16,) and buckets(17) == (16, 17) and buckets(3) == (3,)


@pytest.fixture(params=["sim-1", "sim-2", pytest.param("cuda-0", marks=pytest.mark.gpu)])
def few(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    yield from open_ranks(request.param)


def choose_kernels(monkeypatch: pytest.MonkeyPatch, device: Any, hopper: bool) -> None:
    """Hopper's kernels, or none of them, whatever the model's sizes."""
    if hopper and device.arch not in ("sim", ARCH):
        pytest.skip(f"{device.name} is no Hopper GPU")
    monkeypatch.setattr("qwen_raw.kernels.products.suits_sm90", lambda arch, c: hopper)
    monkeypatch.setattr("qwen_raw.kernels.attention.suits_sm90", lambda arch, HD: hopper)


@pytest.mark.parametrize("kernels", ["plain", "hopper"])
def test_every_bucket_edge_equals_the_reference(
    few: list[Any], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Prompts of n - 1, n and n + 1 tokens in one runner, the long first, so that padding holds what came before.

    The last logits are the reference's, the cache holds nothing beyond the prompt, and no graph is captured twice.
    """
    cuda, hopper = few[0].kind == "cuda", kernels == "hopper"
    choose_kernels(monkeypatch, few[0], hopper)
    most = 2048 if cuda else 130 if len(few) == 1 and not hopper else 40
    monkeypatch.setattr("qwen_raw.model.state.CHUNK", most)
    model = biased_checkpoint(SMALL if len(few) == 1 else TIED)
    runner, V = open_runner(few, model, most + 2), model.config.V
    captured = []
    monkeypatch.setattr(runner.prompt, "_captured", lambda: captured.append(1))
    ids = rng.integers(0, V, most + 1).tolist()
    edges = sorted({n + d for n in buckets(most) for d in (-1, 0, 1)} | {1}, reverse=True)
    forward = ReferenceModel(model.config, model, activations="bf16")
    want = forward.forward(ids, KVCache(model.config, len(ids)))
    for T in edges:
        for rank in runner.ranks:
            for cache in (*rank.cache.k, *rank.cache.v):
                cache.fill(0)
        _, got = greedy(runner, ids[:T])
        assert off(got, want[T - 1]) < (3 if hopper else 1) * TOLERANCE, f"{T} tokens"
        for rank in runner.ranks:
            for cache in (*rank.cache.k, *rank.cache.v):
                assert not cache.download()[:, T:].any(), f"{T} tokens wrote behind themselves"
                assert cache.download()[:, :T].any(axis=2).all()
    assert set(runner.prompt.graphs) == {(n, True) for n in buckets(most)} | {(most, False)}
    assert len(captured) == len(buckets(most)) + 1
    runner.close()
    assert not runner.prompt.graphs


def test_padding_changes_nothing(few: list[Any], rng: np.random.Generator) -> None:
    """Bit by bit the same logits whatever an earlier prompt has left in the rows of padding."""
    model = biased_checkpoint(TIED)
    ids, other = ([int(n) for n in rng.integers(0, TIED.V, 21)] for _ in range(2))
    runner = open_runner(few, model, 40)
    want = greedy(runner, ids[:18], 3)
    greedy(runner, other)
    got = greedy(runner, ids[:18], 3)
    assert got[0] == want[0] and (got[1].view(np.uint32) == want[1].view(np.uint32)).all()
    runner.close()


KINDS = ["sim-1", "sim-2", *(pytest.param(f"cuda-{n}", marks=pytest.mark.gpu) for n in ("0", "0,0", "0,1"))]


@pytest.mark.parametrize("kind", KINDS)
def test_one_host_wait_a_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted and printed: one poll for the first id, captures or chunks or not."""
    monkeypatch.setattr("qwen_raw.model.state.CHUNK", 16)
    model = open_model("tiny-shakespeare-draft")
    for devices in open_ranks(kind):
        runner = open_runner(devices, model, 64)
        engine = Engine(runner, model, open_tokenizer(model), device=devices[0].kind, tp=len(devices), load_s=0.0)
        gc.collect()  # memory that others have left is freed now, which waits, and not during a request
        for length in (5, 5, 16, 17, 40):
            out = engine.generate(list(range(length)), SamplingParams(max_tokens=3, ignore_eos=True))
            assert len(out.token_ids) == 3
            assert out.stats.host_syncs == 1 and "host syncs 1 ·" in out.stats.line(), f"{length} tokens"
        engine.close()


class OneLayer(ReferenceModel):
    """The reference of one layer, for a long prompt's last tokens only: nobody reads what the others attended to."""

    def forward(self, ids: Any, cache: KVCache, **options: Any) -> Any:
        self.needed = cache.length + len(ids) - 1
        return super().forward(ids, cache, **options)

    def _attention(self, h: Any, layer: Any, cos: Any, sin: Any, k: Any, v: Any, past: int, fit: Any) -> Any:
        end = past + len(h)
        if end > self.needed:
            return super()._attention(h, layer, cos, sin, k, v, past, fit)
        return super()._attention(h, layer, cos, sin, k[:, past:end], v[:, past:end], 0, fit)


def attentive_checkpoint(config: ModelConfig) -> SyntheticCheckpoint:
    """Random weights of which attention looks at some dozens of 30,000 keys, and adds much of what it finds there."""
    model, louder = random_checkpoint(config), {"q_proj": 1.6, "k_proj": 1.6, "v_proj": 2.0, "o_proj": 2.0}
    tensors = dict(model.tensors)
    for name, tensor in model.tensors.items():
        factor = next((louder[part] for part in louder if name.endswith(f"{part}.weight")), None)
        if factor is not None:
            bound = synthetic_bound(config, name) * factor
            load = partial(synthetic_values, tensor.shape, tensor_id(name), 0, bound)
            tensors[name] = replace(tensor, load=load, synthetic=None)
    return replace(model, tensors=tensors)


def long_prompt(device: Any, reference: ReferenceModel, model: Any, length: int, part: int, tokens: int) -> None:
    """A prompt of many chunks, then `tokens` ids: logits and ids are the reference's.

    `part` ids at the beginning, in the middle or at the end matter to the first logits: a chunk lost there would show.
    """
    rng = np.random.default_rng(7)
    ids = rng.integers(0, model.config.V, length).tolist()
    runner = open_runner(device, model, length + tokens)
    found, got = greedy(runner, ids, tokens)
    cache = KVCache(model.config, length + tokens)
    want = [reference.forward(ids, cache, last_only=True)[-1]]
    for token in found[:-1]:
        want.append(reference.forward([token], cache)[-1])
    assert off(got, want[-1]) < TOLERANCE
    for token, logits in zip(found, want, strict=True):
        assert logits[token] >= logits.max() - 2 * TOLERANCE * np.abs(logits).max()
    _, first = greedy(runner, ids)
    assert off(first, want[0]) < TOLERANCE
    for at in (0, (length - part) // 2, length - part - 1):
        other = [*ids[:at], *rng.integers(0, model.config.V, part).tolist(), *ids[at + part :]]
        _, moved = greedy(runner, other)
        assert off(moved, want[0]) > 2 * TOLERANCE, f"the ids at {at} do not matter: this test could not fail"
    runner.close()


@pytest.mark.parametrize("kernels", ["plain", "hopper"])
def test_a_prompt_of_many_chunks(dev: Any, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """A small one for the simulator: five chunks of 32 and a rest, two layers."""
    choose_kernels(monkeypatch, dev, kernels == "hopper")
    monkeypatch.setattr("qwen_raw.model.state.CHUNK", 32)
    model = biased_checkpoint(SMALL)
    long_prompt(dev, ReferenceModel(SMALL, model, activations="bf16"), model, 171, 16, tokens=4)


@pytest.mark.gpu
@pytest.mark.slow
def test_thirty_thousand_tokens(cuda_device: Any) -> None:
    """Fifteen chunks of 2,048, one layer."""
    config = replace(SMALL, L=1)
    model = attentive_checkpoint(config)
    long_prompt(cuda_device, OneLayer(config, model, activations="bf16"), model, 30_000, 2_000, tokens=16)
