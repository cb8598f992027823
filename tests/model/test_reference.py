"""The NumPy model against golden values that Hugging Face transformers computed in fp32 from the same bf16 weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.checkpoint import Checkpoint
from loaders.dtypes import bf16_to_f32, e4m3_to_f32, quantize_rows_e4m3
from loaders.resolve import open_model
from loaders.synthetic import random_checkpoint
from loaders.tensor import Tensor
from qwen_raw.config import ModelConfig
from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import logits_hash
from qwen_raw.reference import CHUNK, KVCache, ReferenceModel, ReferenceRunner

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = ("tiny-shakespeare", "tiny-shakespeare-draft")
TOLERANCE = 2e-4

SMALL = ModelConfig(
    D=64, H=6, KV=2, HD=16, I=80, V=300, L=3, rms_eps=1e-6, rope_theta=1e4, max_position=512, tied=False, name="small"
)


@pytest.fixture(scope="module", params=MODELS)
def golden(request: pytest.FixtureRequest) -> tuple[ReferenceModel, Any]:
    checkpoint = open_model(request.param)
    return ReferenceModel(checkpoint.config, checkpoint), np.load(GOLDEN / f"{request.param}.npz")


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    return random_checkpoint(SMALL, "bf16", 3)


@pytest.mark.parametrize("k", range(6))
def test_logits_and_all_greedy_ids_equal_golden(golden: tuple[ReferenceModel, Any], k: int) -> None:
    model, values = golden
    prompt, want, greedy = values[f"prompt{k}"].tolist(), values[f"logits{k}"], values[f"greedy{k}"].tolist()
    cache = KVCache(model.config, len(prompt) + len(greedy))
    logits = model.forward(prompt, cache)
    assert np.abs(logits[-len(want) :] - want).max() < TOLERANCE
    row, ids = logits[-1], []
    for _ in greedy:
        ids.append(int(row.argmax()))
        row = model.forward(ids[-1:], cache)[0]
    assert ids == greedy


@pytest.mark.parametrize("cut", [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_a_sequence_can_be_fed_in_any_pieces(small: Checkpoint, cut: int) -> None:
    model = ReferenceModel(SMALL, small)
    ids = np.random.default_rng(1).integers(0, SMALL.V, 2 * CHUNK + 7).tolist()
    whole = model.forward(ids, KVCache(SMALL, len(ids)))
    cache = KVCache(SMALL, len(ids))
    parts = np.concatenate([model.forward(ids[:cut], cache), model.forward(ids[cut:], cache)])
    assert np.abs(parts - whole).max() < 1e-5 * np.abs(whole).max()
    last = model.forward(ids, KVCache(SMALL, len(ids)), last_only=True)
    assert last.shape == (1, SMALL.V)
    assert np.abs(last[0] - whole[-1]).max() < 1e-5 * np.abs(whole).max()


def test_forward_equals_a_float64_transcription(small: Checkpoint) -> None:
    """Written with scalar loops over heads and positions, so that no layout is shared with the code under test."""
    ids = [5, 299, 0, 17, 17, 120]
    got = ReferenceModel(SMALL, small).forward(ids, KVCache(SMALL, len(ids)))
    want = transcription(SMALL, small, ids)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def transcription(c: ModelConfig, checkpoint: Checkpoint, ids: list[int]) -> np.ndarray[Any, Any]:
    def w(name: str) -> np.ndarray[Any, Any]:
        return checkpoint.tensors[name].f32().astype(np.float64)

    def norm(x: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        return np.stack([r / np.sqrt((r @ r) / c.D + c.rms_eps) for r in x]) * w(name)

    def turn(head: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
        out, half = head.copy(), c.HD // 2
        for i in range(half):
            z = complex(head[i], head[i + half]) * np.exp(1j * position / c.rope_theta ** (2 * i / c.HD))
            out[i], out[i + half] = z.real, z.imag
        return out

    x = w("model.embed_tokens.weight")[ids]
    for n in range(c.L):
        p = f"model.layers.{n}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = (h @ w(f"{p}self_attn.{s}_proj.weight").T + w(f"{p}self_attn.{s}_proj.bias") for s in "qkv")
        out = np.zeros((len(ids), c.H * c.HD))
        for t in range(len(ids)):
            for head in range(c.H):
                kv = head // (c.H // c.KV)
                qt = turn(q[t, head * c.HD : (head + 1) * c.HD], t)
                ks = [turn(k[s, kv * c.HD : (kv + 1) * c.HD], s) for s in range(t + 1)]
                score = np.array([qt @ row for row in ks]) / np.sqrt(c.HD)
                weight = np.exp(score - score.max())
                weight /= weight.sum()
                vs = v[: t + 1, kv * c.HD : (kv + 1) * c.HD]
                out[t, head * c.HD : (head + 1) * c.HD] = weight @ vs
        x = x + out @ w(p + "self_attn.o_proj.weight").T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate, up = h @ w(p + "mlp.gate_proj.weight").T, h @ w(p + "mlp.up_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w(p + "mlp.down_proj.weight").T
    return norm(x, "model.norm.weight") @ w("lm_head.weight").T


def test_bf16_activations_differ_by_their_rounding_alone(golden: tuple[ReferenceModel, Any]) -> None:
    """Near the fp32 logits, not equal to them; and K and V in the cache are bf16 values."""
    model, values = golden
    checkpoint = open_model(model.config.name)
    rounded = ReferenceModel(model.config, checkpoint, activations="bf16")
    cache = KVCache(model.config, 32)
    logits = rounded.forward(values["prompt0"].tolist(), cache)[-4:]
    worst = np.abs(logits - values["logits0"]).max()
    assert 1e-4 < worst < 0.1
    stored = cache.k[:, :, : cache.length]
    assert np.array_equal(stored.view(np.uint32) & 0xFFFF, np.zeros(stored.shape, np.uint32))


def test_fp8_means_weight_times_scale(small: Checkpoint) -> None:
    """--dtype fp8 of a bf16 checkpoint computes with every linear rounded, and nothing else."""

    def rounded(tensor: Tensor) -> Tensor:
        codes, scale = quantize_rows_e4m3(tensor.f32())
        wide = e4m3_to_f32(codes) * scale[:, None]
        return replace(tensor, dtype="F32", load=lambda: wide)

    names = [name for name in small.tensors if name.endswith("_proj.weight")]
    assert len(names) == 7 * SMALL.L
    quantised = ReferenceModel(SMALL, small, quantize=True)
    by_hand = ReferenceModel(SMALL, small)
    layer = by_hand.layers[1]
    layer.qkv = np.concatenate(
        [rounded(small.tensors[f"model.layers.1.self_attn.{s}_proj.weight"]).f32() for s in "qkv"]
    )
    assert np.array_equal(quantised.layers[1].qkv, layer.qkv)
    assert np.array_equal(quantised.head, by_hand.head)
    ids = [1, 2, 3]
    a, b = (m.forward(ids, KVCache(SMALL, 3)) for m in (quantised, ReferenceModel(SMALL, small)))
    assert 1e-3 < np.abs(a - b).max() / np.abs(b).max() < 0.5


def test_fp8_checkpoints_are_widened_with_their_scales() -> None:
    checkpoint = random_checkpoint(SMALL, "fp8", 3)
    linear = checkpoint.linear("model.layers.0.mlp.down_proj")
    assert linear.scale is not None
    want = e4m3_to_f32(linear.weight.raw) * linear.scale[:, None]
    assert np.array_equal(ReferenceModel(SMALL, checkpoint).layers[0].down, want)


def test_large_residuals_stay_finite(small: Checkpoint) -> None:
    """Qwen2's residual stream passes fp16's range: 2e4 in, finite logits out."""
    model = ReferenceModel(SMALL, small)
    model.embedding = model.embedding / np.abs(model.embedding).max() * np.float32(2e4)
    logits = model.forward([3, 4, 5], KVCache(SMALL, 3))
    assert np.isfinite(logits).all()


def runner(checkpoint: Checkpoint, **changes: Any) -> ReferenceRunner:
    options: dict[str, Any] = {"dtype": "bf16", "max_model_len": 64, "text_vocab": SMALL.V} | changes
    return ReferenceRunner(checkpoint, **options)


def test_runner_generates_what_the_model_says(small: Checkpoint) -> None:
    run = runner(small)
    ids = list(run.generate([7, 8], max_tokens=5, temperature=0.0, seed=0))
    logits = run.logits([7, 8, *ids])
    assert logits.shape == (7, SMALL.V)
    assert [int(row.argmax()) for row in logits[1:-1]] == ids
    assert run.logits_hash is not None


def test_padding_rows_are_never_chosen(small: Checkpoint) -> None:
    run = runner(small, text_vocab=200)
    assert run._model is not None
    run._model.head = run._model.head.copy()
    run._model.head[200:] *= 100
    assert run.logits([7])[0].argmax() >= 200
    for temperature in (0.0, 5.0):
        assert max(run.generate([7], max_tokens=20, temperature=temperature, seed=1)) < 200


def test_damaged_weights_are_an_error_not_id_0(small: Checkpoint, recwarn: pytest.WarningsRecorder) -> None:
    run = runner(small)
    assert run._model is not None
    run._model.layers[1].down = run._model.layers[1].down.copy()
    run._model.layers[1].down[3, 5] = np.nan
    with pytest.raises(QwenRawError, match=r"300 of 300 logits for position 2 are not finite \(id 0: nan\)"):
        next(run.generate([1, 2], max_tokens=1, temperature=0.0, seed=0))
    assert not recwarn.list


def test_cache_bound_is_checked(small: Checkpoint) -> None:
    with pytest.raises(QwenRawError, match="holds 3 positions, 4 were asked for"):
        ReferenceModel(SMALL, small).forward([1, 2, 3, 4], KVCache(SMALL, 3))


def test_a_closed_runner_refuses(small: Checkpoint) -> None:
    run = runner(small)
    run.close()
    run.close()
    with pytest.raises(QwenRawError, match="closed"):
        run.logits([1])


def test_a_model_too_large_for_memory_is_refused_before_loading(small: Checkpoint) -> None:
    huge = replace(SMALL, L=10**7, name="huge")
    with pytest.raises(QwenRawError, match=r"huge needs .* GiB as fp32 and this machine has"):
        runner(replace(small, config=huge))


def test_logits_hash_sees_every_bit() -> None:
    row = np.linspace(-3, 3, 1000, dtype=np.float32)
    changed = row.copy()
    changed.view(np.uint32)[517] ^= 1
    swapped = row.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert len({logits_hash(row), logits_hash(changed), logits_hash(swapped)}) == 3
    terms = [((int(b) ^ (i * 0x9E3779B1 & 0xFFFFFFFF)) * 0x85EBCA6B) for i, b in enumerate(row.view(np.uint32))]
    assert logits_hash(row) == sum(terms) % 2**32


def test_weights_wider_than_bf16_are_rounded_as_on_a_gpu(small: Checkpoint) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    fine = small.tensors[name].f32() * np.float32(1.001)
    tensors = dict(small.tensors) | {name: replace(small.tensors[name], dtype="F32", load=lambda: fine)}
    loaded = ReferenceModel(SMALL, replace(small, tensors=tensors)).layers[0].o
    assert not np.array_equal(loaded, fine)
    assert np.array_equal(loaded, bf16_to_f32(tensors[name].bf16()))
