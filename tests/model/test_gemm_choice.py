"""What multiplies a prompt, ours or cuBLASLt, chosen for a rank: simulated, with a stand-in for the library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.test_lt_products import FakeLibrary

from loaders.synthetic import random_checkpoint
from qwen_raw.config import ModelConfig
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels import attention, cublaslt, lt_products, products
from qwen_raw.kernels.lt_products import LtProducts
from qwen_raw.kernels.products import Sm90Products
from qwen_raw.model import gemm_choice
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.simt.device import SimDevice

CONFIG = ModelConfig(
    D=96, H=2, KV=2, HD=64, I=176, V=72, L=2, rms_eps=1e-6, rope_theta=1e6, max_position=256, tied=True
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device takes Hopper's products for every model."""
    monkeypatch.setattr(products, "suits_sm90", lambda arch, c: True)
    monkeypatch.setattr(attention, "suits_sm90", lambda arch, HD: True)


def open_runner(devices: Any, gemm: str, dtype: str = "bf16") -> DeviceRunner:
    return DeviceRunner(
        devices,
        random_checkpoint(CONFIG, "bf16", 5),
        dtype=dtype,
        max_model_len=48,
        text_vocab=CONFIG.V,
        owns_device=False,
        gemm=gemm,
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_prompts_equal_ours(hopper: None, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Through cuBLASLt's path: graphs and all, nearly the same logits, the same first ids; and it did multiply."""
    lib = FakeLibrary()
    monkeypatch.setattr(gemm_choice, "load_library", lambda: lib)
    ids, results = list(range(1, 20)), []
    for gemm in ("own", "cublaslt"):
        device = SimDevice()
        runner = open_runner(device, gemm, dtype)
        used = runner.ranks[0].prefill.products
        assert isinstance(used, LtProducts if gemm == "cublaslt" else Sm90Products)
        before = lib.products
        first = list(runner.generate(ids, max_tokens=1, temperature=0.0, seed=0))
        assert (lib.products - before) == (0 if gemm == "own" else 5 * CONFIG.L)
        results.append((first, runner.logits(ids)))
        runner.close()
        device.close()
    (_, ours), (_, theirs) = results
    error = np.abs(theirs - ours) / np.abs(ours).max()
    assert error.max() < (0.15 if dtype == "fp8" else 2e-2)


def test_without_the_library(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cublaslt` is refused in one line; `auto` is ours, even where the table prefers the other."""

    def missing() -> Any:
        raise QwenRawError(cublaslt.MISSING)

    monkeypatch.setattr(gemm_choice, "load_library", missing)
    device = SimDevice()
    with pytest.raises(QwenRawError) as caught:
        open_runner(device, "cublaslt")
    assert "pip install" in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setattr(gemm_choice, "by_table", lambda fp8: lt_products.always)
    runner = open_runner(device, "auto")
    assert isinstance(runner.ranks[0].prefill.products, Sm90Products)
    runner.close()
    device.close()


def test_auto_follows_the_table(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is not even looked for where the table never prefers it; else it computes what it is faster at."""

    def looked_for() -> Any:
        raise AssertionError("the library was looked for")

    monkeypatch.setattr(gemm_choice, "load_library", looked_for)
    monkeypatch.setattr(gemm_choice, "by_table", lambda fp8: lambda op, T, N, K: False)
    device = SimDevice()
    open_runner(device, "auto").close()
    lib = FakeLibrary()
    monkeypatch.setattr(gemm_choice, "load_library", lambda: lib)
    monkeypatch.setattr(gemm_choice, "by_table", lambda fp8: lambda op, T, N, K: (op, K) == ("add", CONFIG.I))
    runner = open_runner(device, "auto")
    before = lib.products
    list(runner.generate([1, 2, 3], max_tokens=1, temperature=0.0, seed=0))
    assert lib.products - before == CONFIG.L  # down alone
    runner.close()
    device.close()


def test_a_model_without_hoppers_products_refuses_it() -> None:
    device = SimDevice()
    with pytest.raises(UsageError, match="takes the place of Hopper's products only"):
        open_runner(device, "cublaslt")
    device.close()
