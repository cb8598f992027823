"""gemm_bf16.cu and gemm_fp8.cu against float64: tails in every dimension, poisoned outputs."""

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, assert_sums_close, bf16_input, f16_input, make_linear, rotate, silu

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16, F32
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.gemm_bf16 import GEMM as BF16_GEMM
from qwen_raw.kernels.gemm_fp8 import GEMM as FP8_GEMM
from qwen_raw.kernels.products import MmaProducts

GEMMS = pytest.mark.parametrize("gemm", [BF16_GEMM, FP8_GEMM], ids=["bf16", "fp8"])
# (T, N, K): one row, one tile exactly, one past a tile in every dimension, K tails of 16 within a slice of 32.
SHAPES = [(1, 8, 16), (64, 128, 32), (65, 129, 48), (5, 250, 80)]


@GEMMS
@pytest.mark.parametrize(("H", "KV", "HD"), [(4, 2, 64), (3, 1, 128)])
@pytest.mark.parametrize(("rows", "T", "pos0"), [(1, 1, 0), (5, 5, 2), (65, 65, 7), (65, 63, 9), (130, 1, 71)])
def test_qkv(
    dev: Any, rng: np.random.Generator, gemm: Any, H: int, KV: int, HD: int, rows: int, T: int, pos0: int
) -> None:
    """Rows from T on are padding, and may lie beyond the cache: nothing of them is written."""
    K, max_len, half = 48, 72, HD // 2
    w, W = make_linear(dev, rng, (H + 2 * KV) * HD, K, gemm.fp8)
    a, A = f16_input(rng, rows, K)
    bias = (rng.standard_normal(w.N) * 10).astype(np.float32)
    angle = rng.uniform(0, 6, (max_len, half))
    rope = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    q, caches = dev.empty((rows, H, HD), BF16), [dev.empty((KV, max_len, HD), BF16) for _ in range(2)]
    for buffer in (q, *caches):
        buffer.fill(POISON)
    span = dev.array(np.array([pos0, T], np.int32))
    gemm.qkv(dev, q, *caches, dev.array(a), w, dev.array(bias), dev.array(rope), span)

    x = (A[:T] @ W.T + bias).reshape(T, H + 2 * KV, HD)
    cos, sin = (rope[pos0 : pos0 + T, None, :, i].astype(np.float64) for i in range(2))
    y = x.copy()
    y[..., :half], y[..., half:] = rotate(x[..., :half], x[..., half:], cos, sin)
    assert_close(bf16_to_f32(q.download()[:T]), y[:, :H], rel=4e-3, what="q")
    assert (q.download()[T:] == 0xFFFF).all(), "a row of padding was written"
    for cache, want, name in ((caches[0], y[:, H : H + KV], "k"), (caches[1], x[:, H + KV :], "v")):
        got = cache.download()
        assert_close(bf16_to_f32(got[:, pos0 : pos0 + T]), want.transpose(1, 0, 2), rel=4e-3, what=name)
        outside = np.delete(got, range(pos0, pos0 + T), axis=1)
        assert (outside == 0xFFFF).all(), f"{name}: a row of another position was written"


@GEMMS
@pytest.mark.parametrize(("T", "N", "K"), SHAPES)
def test_add(dev: Any, rng: np.random.Generator, gemm: Any, T: int, N: int, K: int) -> None:
    w, W = make_linear(dev, rng, N, K, gemm.fp8)
    a, A = bf16_input(rng, T, K)
    h = rng.standard_normal((T, N)).astype(np.float32)
    buffer = dev.array(h)
    gemm.add(dev, buffer, dev.array(a), w)
    assert_sums_close(buffer.download(), h + A @ W.T, np.abs(h) + np.abs(A) @ np.abs(W).T, what="h")


@GEMMS
@pytest.mark.parametrize(("T", "N", "K"), SHAPES)
def test_store(dev: Any, rng: np.random.Generator, gemm: Any, T: int, N: int, K: int) -> None:
    w, W = make_linear(dev, rng, N, K, gemm.fp8)
    a, A = bf16_input(rng, T, K)
    y = dev.empty((T, N), BF16)
    y.fill(POISON)
    gemm.store(dev, y, dev.array(a), w)
    assert_close(bf16_to_f32(y.download()), A @ W.T, rel=4e-3, what="y")


@GEMMS
@pytest.mark.parametrize(("T", "I", "K"), [(1, 8, 16), (64, 64, 32), (65, 65, 48), (3, 130, 112)])
def test_swiglu(dev: Any, rng: np.random.Generator, gemm: Any, T: int, I: int, K: int) -> None:  # noqa: E741
    (gate, G), (up, U) = make_linear(dev, rng, I, K, gemm.fp8), make_linear(dev, rng, I, K, gemm.fp8)
    a, A = f16_input(rng, T, K)
    act = dev.empty((T, I), BF16)
    act.fill(POISON)
    gemm.swiglu(dev, act, dev.array(a), gate, up)
    assert_close(bf16_to_f32(act.download()), silu(A @ G.T) * (A @ U.T), rel=4e-3, what="act")


@pytest.mark.parametrize(("T", "N", "K"), [(1, 1, 8), (66, 131, 40)])
def test_f32(dev: Any, rng: np.random.Generator, T: int, N: int, K: int) -> None:
    w, W = make_linear(dev, rng, N, K, fp8=False)
    a, A = bf16_input(rng, T, K)
    out = dev.empty((T, N), F32)
    out.fill(POISON)
    BF16_GEMM.f32(dev, out, dev.array(a), w)
    assert_sums_close(out.download(), A @ W.T, np.abs(A) @ np.abs(W).T, what="c")


def test_rows_are_not_dealt_out() -> None:
    """What says that it does not push refuses to."""
    products = MmaProducts(BF16_GEMM)
    assert not products.pushes(4096)
    with pytest.raises(QwenRawError, match="store to one place"):
        products.push(None, [], None, None)  # type: ignore[arg-type]
