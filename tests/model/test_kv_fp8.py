"""An e4m3 KV cache: the fit of a layer, scales folded into weights, and whole models against the NumPy reference."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model.ranks import PAIRS, TIED, biased_checkpoint, open_ranks
from model.speculating import MODEL, agreed, prompts
from model.speculating import options as plain_options

from loaders.dtypes import E4M3_MAX
from loaders.resolve import open_model, open_tokenizer
from qwen_raw.config import ModelConfig
from qwen_raw.engine import load
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels.attn_prefill_sm90 import ARCH
from qwen_raw.kernels.kv_cache import COARSE, FINE_PAIRS
from qwen_raw.kernels.kv_fold import kv_norms
from qwen_raw.model.kv_fp8 import KVFit, fit, fold
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculative import SpeculativeRunner
from qwen_raw.model.state import state_bytes
from qwen_raw.observe.perplexity import perplexity
from qwen_raw.reference import KVCache, ReferenceModel

TEXT = Path(__file__).parent.parent / "golden" / "validation.txt"
UNTIED = ModelConfig(
    D=144, H=3, KV=1, HD=128, I=208, V=100, L=2, rms_eps=1e-5, rope_theta=1e4, max_position=256, tied=False
)
GROUPS = replace(TIED, H=4, KV=2, I=96)
CONFIGS = {"one KV head of 128": UNTIED, "two of 64": GROUPS}


def test_nothing_saturates_and_the_largest_pairs_are_fine(rng: np.random.Generator) -> None:
    """The worst input of every row, through the reference's own arithmetic."""
    D, KV, HD = 96, 2, 64
    w, g = rng.standard_normal((2 * KV * HD, D)) * np.exp(rng.uniform(-3, 3, (2 * KV * HD, 1))), rng.uniform(0.1, 3, D)
    bias = rng.standard_normal(2 * KV * HD)
    bias[[3, 40, 64 + 9]] = 3000, -5000, 2000  # larger than any pair of weights
    found = fit(np.linalg.norm(w * g, axis=1).astype(np.float32), bias.astype(np.float32), D, KV, HD)
    direction = w * g / np.linalg.norm(w * g, axis=1, keepdims=True)
    largest = (np.sqrt(D) * np.abs(np.sum(direction * w * g, axis=1)) + np.abs(bias)).reshape(2, KV, HD)
    for scale, value in (
        (found.k_scale, np.hypot(largest[0, :, :32], largest[0, :, 32:])),
        (found.v_scale, largest[1].max()),
    ):
        assert (value / scale <= E4M3_MAX * (1 + 1e-6)).all() and (value / scale > E4M3_MAX / 2 * (1 - 1e-6)).all()
        assert (np.log2(scale) % 1 == 0).all()
    slots = found.slots
    assert 3 in found.pairs[0] and 40 - 32 in found.pairs[0] and 9 in found.pairs[1]
    assert (np.count_nonzero(slots != COARSE, axis=1) == FINE_PAIRS).all()
    assert all(slots[kv, pair] == i for kv in range(KV) for i, pair in enumerate(found.pairs[kv]))
    zero = fit(np.zeros(4 * HD, np.float32), np.zeros(4 * HD, np.float32), D, KV, HD)
    assert (zero.k_scale == 1).all() and zero.v_scale == 1


def test_yarn_and_its_factor_are_in_the_bound() -> None:
    plain = fit(np.ones(256, np.float32), np.zeros(256, np.float32), 448 * 448 // 2, 1, 128)
    longer = fit(np.ones(256, np.float32), np.zeros(256, np.float32), 448 * 448 // 2, 1, 128, 1.1)
    assert (longer.k_scale == 2 * plain.k_scale).all() and longer.v_scale == plain.v_scale


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_folded_weights_are_the_same_model(dev: Any, rng: np.random.Generator, dtype: str) -> None:
    """With a bf16 cache: powers of two change no bit. And the norms are those of the reference."""
    model = biased_checkpoint(GROUPS)
    runner = DeviceRunner(dev, model, dtype=dtype, max_model_len=32, text_vocab=GROUPS.V, owns_device=False)
    ids = rng.integers(0, GROUPS.V, 7).tolist()
    before, rank = [runner.logits(ids), runner.decode_logits(ids)], runner.ranks[0]
    fits = fold(dev, rank.shard, rank.weights)
    after = [runner.logits(ids), runner.decode_logits(ids)]
    reference = ReferenceModel(GROUPS, model, quantize=dtype == "fp8", kv="fp8").fits
    runner.close()
    assert reference is not None
    for got, want in zip(fits, reference, strict=True):
        assert np.array_equal(got.pairs, want.pairs)
        assert np.array_equal(got.k_scale, want.k_scale) and got.v_scale == want.v_scale
    assert any((found.k_scale != 1).all() and found.v_scale != 1 for found in fits)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fp8", [False, True])
def test_norms(dev: Any, rng: np.random.Generator, fp8: bool) -> None:
    from kernel_reference import bf16_input, make_linear

    from qwen_raw.device import F32

    w, W = make_linear(dev, rng, 37, 2064, fp8)
    g, G = bf16_input(rng, 2064)
    norms = dev.empty((37,), F32)
    kv_norms(dev, norms, w, dev.array(g))
    np.testing.assert_allclose(norms.download(), np.linalg.norm(W * G, axis=1), rtol=1e-5)


def forward(model: Any, ids: list[int], **options: Any) -> Any:
    return ReferenceModel(model.config, model, **options).forward(ids, KVCache(model.config, len(ids)))


def choose_attention(monkeypatch: pytest.MonkeyPatch, device: Any, hopper: bool) -> None:
    """Hopper's kernels in prefill, whose attention widens the cache, or the plain ones."""
    if hopper and device.arch not in ("sim", ARCH):
        pytest.skip(f"{device.name} is no Hopper GPU")
    for module in ("attention", "products"):
        monkeypatch.setattr(f"qwen_raw.kernels.{module}.suits_sm90", lambda arch, what: hopper)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("dtype", "attention"), [("bf16", "plain"), ("fp8", "plain"), ("bf16", "hopper")])
def test_models_equal_the_reference(
    dev: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, config: ModelConfig, dtype: str, attention: str
) -> None:
    """Both paths compute what the reference does with a rounded cache, and not what it does without."""
    choose_attention(monkeypatch, dev, attention == "hopper")
    model, ids = biased_checkpoint(config), rng.integers(0, config.V, 70 if dev.kind == "cuda" else 12).tolist()
    runner = DeviceRunner(dev, model, dtype=dtype, max_model_len=100, text_vocab=config.V, owns_device=False, kv="fp8")
    rounded, exact = (forward(model, ids, quantize=dtype == "fp8", activations="bf16", kv=kv) for kv in ("fp8", "bf16"))
    for name, got in (("prefill", runner.logits(ids)), ("decode", runner.decode_logits(ids))):
        near, far = rms(got - rounded), rms(got - exact)
        assert near < 0.6 * far and near < 2e-2 * rms(rounded), f"{name}: {near} from the reference, {far} from bf16's"
    runner.close()


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    yield from open_ranks(request.param)


def test_two_ranks(pair: list[Any], rng: np.random.Generator) -> None:
    model, ids = biased_checkpoint(GROUPS), rng.integers(0, GROUPS.V, 9).tolist()
    runner = DeviceRunner(pair, model, dtype="bf16", max_model_len=32, text_vocab=GROUPS.V, owns_device=False, kv="fp8")
    rounded, exact = (forward(model, ids, activations="bf16", kv=kv) for kv in ("fp8", "bf16"))
    for got in (runner.logits(ids), runner.decode_logits(ids)):
        assert rms(got - rounded) < 0.7 * rms(got - exact)
    runner.close()


@pytest.mark.parametrize("way", ["ngram", "draft"])
def test_speculation(dev: Any, way: str) -> None:
    """The same ids as single steps, as far as two orders of addition agree; a draft model's cache is e4m3 too."""
    model, many = open_model(MODEL), dev.kind == "cuda"
    options = plain_options(model, 200 if many else 32) | {"kv": "fp8"}
    plain = DeviceRunner(dev, model, **options)
    ways = {"ngram": {"ngram": 3}, "draft": {"draft": open_model(f"{MODEL}-draft")}}
    guessing = SpeculativeRunner(dev, model, guesses=3, governed=False, **ways[way], **options)
    for ids in prompts(20 if many else 1):
        request = {"max_tokens": 48 if many else 9, "temperature": 0.0, "seed": 0}
        want, got = list(plain.generate(ids, **request)), list(guessing.generate(ids, **request))
        agreed(plain, ids, want, got, request)
    guessing.close()
    plain.close()


def test_perplexity_within_one_percent() -> None:
    model = open_model(MODEL)
    ids = open_tokenizer(model).encode(TEXT.read_text())[:2049]
    found = {}
    for kv in ("bf16", "fp8"):
        reference = ReferenceModel(model.config, model, activations="bf16", kv=kv)
        found[kv] = perplexity(lambda part, m=reference: m.forward(part, KVCache(m.config, len(part))), ids).value
    assert found["fp8"] != found["bf16"] and abs(found["fp8"] / found["bf16"] - 1) < 0.01


def test_large_biases_cost_little_for_their_second_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pairs of keys' dimensions with biases of ±100, as Qwen2.5 has them."""
    model, logits = open_model(MODEL), {}
    ids, c = open_tokenizer(model).encode(TEXT.read_text())[:300], model.config
    for name in ("exact", "fine", "coarse"):
        reference = ReferenceModel(c, model)
        for layer in reference.layers:
            layer.qkv_bias = layer.qkv_bias.copy()
            keys = layer.qkv_bias[c.H * c.HD : (c.H + c.KV) * c.HD].reshape(c.KV, c.HD)
            keys[:, 24:28] += 100 * np.random.default_rng(1).choice([-1, 1], (c.KV, 4))
        if name != "exact":
            reference.refit()
        if name == "coarse":
            monkeypatch.setattr(KVFit, "slots", property(lambda fit: np.full(fit.k_scale.shape, COARSE, np.uint8)))
        logits[name] = reference.forward(ids, KVCache(c, len(ids)))
    fine, coarse = (rms(logits[name] - logits["exact"]) for name in ("fine", "coarse"))
    assert fine < 0.05 and coarse > 5 * fine, (fine, coarse)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_perplexity_on_a_gpu(cuda_device: Any, path: str) -> None:
    """A window as long as the model's context; token by token, a quarter of it."""
    model, found = open_model(MODEL), {}
    ids = open_tokenizer(model).encode(TEXT.read_text())
    for kv in ("bf16", "fp8"):
        length = model.config.max_position // (4 if path == "decode" else 1)
        runner = DeviceRunner(
            cuda_device, model, dtype="bf16", max_model_len=length, text_vocab=4096, owns_device=False, kv=kv
        )
        logits = runner.logits if path == "prefill" else runner.decode_logits
        found[kv] = perplexity(logits, ids[: length + 1], length).value
        runner.close()
    assert found["fp8"] != found["bf16"] and abs(found["fp8"] / found["bf16"] - 1) < 0.01, found


def test_memory_is_counted(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position's bytes, and what is said where bf16 does not fit."""
    model, length = open_model(MODEL), 2048
    c = model.config
    assert c.kv_bytes_per_token() == c.L * c.KV * 2 * c.HD * 2
    assert c.kv_bytes_per_token("fp8") == c.L * c.KV * (2 * c.HD + 2 * FINE_PAIRS)
    saved = state_bytes(c, length) - state_bytes(c, length, "fp8")
    assert saved == length * (c.kv_bytes_per_token() - c.kv_bytes_per_token("fp8"))
    assert state_bytes(c, length, "fp8", ARCH) == state_bytes(c, length, "fp8")  # too small for Hopper's kernels
    wide = replace(c, D=512)
    more = state_bytes(wide, length, "fp8", ARCH) - state_bytes(wide, length, "fp8")
    assert more == length * wide.kv_bytes_per_token() // wide.L
    assert state_bytes(wide, length, "bf16", ARCH) == state_bytes(wide, length)
    options: dict[str, Any] = {"dtype": "bf16", "max_model_len": length, "text_vocab": 4096, "owns_device": False}
    runner = DeviceRunner(dev, model, kv="fp8", **options)
    assert runner.kv_bytes_per_token == c.kv_bytes_per_token("fp8")
    runner.close()
    monkeypatch.setattr(type(dev), "memory_info", lambda self: (25 << 20, 1 << 30))
    with pytest.raises(QwenRawError, match=r"--kv-cache-dtype fp8, or more GPUs$"):
        DeviceRunner(dev, model, **options)


def test_the_engine_takes_it_by_name() -> None:
    with load(device="cpu", max_model_len=32, kv_cache_dtype="fp8") as rounded, load(device="cpu") as exact:
        assert (rounded.runner.kv_dtype, exact.runner.kv_dtype) == ("fp8", "bf16")
        assert not np.array_equal(rounded.logits([1, 2, 3]), exact.logits([1, 2, 3]))
    with pytest.raises(UsageError, match="kv_cache_dtype 'e4m3' is not one of auto, bf16, fp8"):
        load(kv_cache_dtype="e4m3")
