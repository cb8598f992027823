"""Prefill through Hopper's kernels, which small models do not take by themselves: on the simulator and a Hopper GPU.

bf16 after a norm instead of f16 costs the built-in model 0.033 on logits (the NumPy model, rounding the same way); the
limit here is 0.05. With fp8 weights the inputs are e4m3 too: what that costs is of the size of the weights' rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.resolve import open_model
from loaders.synthetic import random_checkpoint
from qwen_raw.config import ModelConfig
from qwen_raw.kernels import attention, products
from qwen_raw.kernels.gemm_sm90 import ARCH
from qwen_raw.kernels.products import Sm90Products, suits_sm90
from qwen_raw.kernels.quantize import quantize_tokens
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.reference import KVCache, ReferenceModel

GOLDEN = Path(__file__).parent.parent / "golden"
CONFIGS = {
    "HD 128, group 3, odd widths": ModelConfig(
        D=144, H=3, KV=1, HD=128, I=208, V=104, L=2, rms_eps=1e-5, rope_theta=1e4, max_position=256, tied=False
    ),
    "HD 64, group 1": ModelConfig(
        D=96, H=2, KV=2, HD=64, I=176, V=72, L=2, rms_eps=1e-6, rope_theta=1e6, max_position=256, tied=True
    ),
}
# The largest difference of a logit, as a share of the largest logit, and the root mean square of all.
LIMITS = {"bf16": (3e-2, 1e-2), "fp8": (2e-1, 6e-2)}


@pytest.fixture
def hopper(dev: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that takes Hopper's products for every model, and its attention."""
    if dev.kind == "cuda" and dev.arch != ARCH:
        pytest.skip(f"{dev.name} is no Hopper GPU")
    monkeypatch.setattr(products, "suits_sm90", lambda arch, c: True)
    monkeypatch.setattr(attention, "suits_sm90", lambda arch, HD: True)
    return dev


def logits(device: Any, model: Any, ids: list[int], dtype: str) -> np.ndarray[Any, Any]:
    runner = DeviceRunner(device, model, dtype=dtype, max_model_len=800, text_vocab=model.config.V, owns_device=False)
    try:
        assert isinstance(runner.ranks[0].prefill.products, Sm90Products)
        return runner.logits(ids)
    finally:
        runner.close()


def test_logits_equal_golden(hopper: Any) -> None:
    values, model = np.load(GOLDEN / "tiny-shakespeare.npz"), open_model("tiny-shakespeare")
    prompts = sorted(range(6), key=lambda k: values[f"prompt{k}"].size)
    for k in prompts[:2] if hopper.kind == "sim" else prompts:
        got, want = logits(hopper, model, values[f"prompt{k}"].tolist(), "bf16"), values[f"logits{k}"]
        worst = np.abs(got[-len(want) :] - want).max()
        assert worst < 5e-2, f"prompt {k}: logits off by {worst}"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_random_models_equal_the_reference(
    hopper: Any, rng: np.random.Generator, config: ModelConfig, dtype: str
) -> None:
    model = random_checkpoint(config, "bf16", 5)
    ids = rng.integers(0, config.V, 150 if hopper.kind == "cuda" else 21).tolist()
    reference = ReferenceModel(config, model, quantize=dtype == "fp8", activations="bf16")
    want = reference.forward(ids, KVCache(config, len(ids)))
    error = (logits(hopper, model, ids, dtype) - want) / np.abs(want).max()
    worst, rms = np.abs(error).max(), np.sqrt((error * error).mean())
    assert worst < LIMITS[dtype][0] and rms < LIMITS[dtype][1], f"off by {worst:.2%}, {rms:.2%} in the mean"


def test_heads_with_a_scale_each(hopper: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention leaves O's input as e4m3 with exponents, as from BLOCKS_FROM tokens on: no pass quantises it."""
    config, quantised = CONFIGS["HD 128, group 3, odd widths"], []

    def note(dev: Any, q: Any, scale: Any, a: Any, *, pdl: bool) -> None:
        quantised.append(a.shape[1])
        quantize_tokens(dev, q, scale, a, pdl=pdl)

    monkeypatch.setattr(products, "BLOCKS_FROM", 1)
    monkeypatch.setattr(products, "quantize_tokens", note)
    model = random_checkpoint(config, "bf16", 5)
    ids = rng.integers(0, config.V, 150 if hopper.kind == "cuda" else 21).tolist()
    reference = ReferenceModel(config, model, quantize=True, activations="bf16")
    want = reference.forward(ids, KVCache(config, len(ids)))
    error = (logits(hopper, model, ids, "fp8") - want) / np.abs(want).max()
    worst, rms = np.abs(error).max(), np.sqrt((error * error).mean())
    assert worst < LIMITS["fp8"][0] and rms < LIMITS["fp8"][1], f"off by {worst:.2%}, {rms:.2%} in the mean"
    assert set(quantised) == {config.I}, "something else than down's input was quantised by a pass"


def test_which_models_take_them() -> None:
    wide = ModelConfig(
        D=896, H=14, KV=2, HD=64, I=4864, V=100, L=1, rms_eps=1e-6, rope_theta=1e6, max_position=64, tied=True
    )
    assert suits_sm90(ARCH, wide)
    assert not suits_sm90("sm_80", wide) and not suits_sm90("sim", wide)
    assert not suits_sm90(ARCH, CONFIGS["HD 64, group 1"])


def test_small_models_keep_the_plain_attention(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Hopper's attention runs, and the model is too small for Hopper's products: the golden logits ask for it."""

    def refuse(*args: Any) -> None:
        raise AssertionError("Hopper's attention for a small model")

    monkeypatch.setattr(attention, "suits_sm90", lambda arch, HD: True)
    monkeypatch.setattr(attention, "attn_prefill_sm90", refuse)
    model = random_checkpoint(CONFIGS["HD 64, group 1"])
    runner = DeviceRunner(dev, model, dtype="bf16", max_model_len=64, text_vocab=model.config.V, owns_device=False)
    try:
        assert np.isfinite(runner.logits([1, 2, 3])).all()
    finally:
        runner.close()
