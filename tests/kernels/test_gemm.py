"""gemm_bf16.cu and gemm_fp8.cu against float64: tails in every dimension, poisoned outputs."""

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, bf16_input, make_linear, silu

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16, F32
from qwen_raw.kernels.gemm_bf16 import GEMM as BF16_GEMM
from qwen_raw.kernels.gemm_fp8 import GEMM as FP8_GEMM

GEMMS = pytest.mark.parametrize("gemm", [BF16_GEMM, FP8_GEMM], ids=["bf16", "fp8"])
# (T, N, K): one row, one tile exactly, one past a tile in every dimension, K tails of 16 within a slice of 32.
SHAPES = [(1, 8, 16), (64, 128, 32), (65, 129, 48), (5, 250, 80)]


@GEMMS
@pytest.mark.parametrize(("T", "N", "K"), SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias(dev: Any, rng: np.random.Generator, gemm: Any, T: int, N: int, K: int, with_bias: bool) -> None:
    w, W = make_linear(dev, rng, N, K, gemm.fp8)
    a, A = bf16_input(rng, T, K)
    bias = rng.standard_normal(N).astype(np.float32)
    out = dev.empty((T, N), BF16)
    out.fill(POISON)
    gemm.bias(dev, out, dev.array(a), w, dev.array(bias) if with_bias else None)
    assert_close(bf16_to_f32(out.download()), A @ W.T + (bias if with_bias else 0), rel=4e-3, what="out")


@GEMMS
@pytest.mark.parametrize(("T", "N", "K"), SHAPES)
def test_add(dev: Any, rng: np.random.Generator, gemm: Any, T: int, N: int, K: int) -> None:
    w, W = make_linear(dev, rng, N, K, gemm.fp8)
    a, A = bf16_input(rng, T, K)
    h = rng.standard_normal((T, N)).astype(np.float32)
    buffer = dev.array(h)
    gemm.add(dev, buffer, dev.array(a), w)
    assert_close(buffer.download(), h + A @ W.T, rel=2e-5, what="h")


@GEMMS
@pytest.mark.parametrize(("T", "I", "K"), [(1, 8, 16), (64, 64, 32), (65, 65, 48), (3, 130, 112)])
def test_swiglu(dev: Any, rng: np.random.Generator, gemm: Any, T: int, I: int, K: int) -> None:  # noqa: E741
    (gate, G), (up, U) = make_linear(dev, rng, I, K, gemm.fp8), make_linear(dev, rng, I, K, gemm.fp8)
    a, A = bf16_input(rng, T, K)
    act = dev.empty((T, I), BF16)
    act.fill(POISON)
    gemm.swiglu(dev, act, dev.array(a), gate, up)
    assert_close(bf16_to_f32(act.download()), silu(A @ G.T) * (A @ U.T), rel=4e-3, what="act")


@pytest.mark.parametrize(("T", "V", "K"), [(1, 1, 8), (66, 131, 40)])
def test_logits(dev: Any, rng: np.random.Generator, T: int, V: int, K: int) -> None:
    w, W = make_linear(dev, rng, V, K, fp8=False)
    a, A = bf16_input(rng, T, K)
    out = dev.empty((T, V), F32)
    out.fill(POISON)
    BF16_GEMM.logits(dev, out, dev.array(a), w)
    assert_close(out.download(), A @ W.T, rel=2e-5, what="logits")
