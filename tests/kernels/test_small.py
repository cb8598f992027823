"""norm.cu, embed.cu, rope.cu, quantize.cu, synthetic.cu: the small kernels, against the host's definitions."""

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, bf16_input, rmsnorm, rotate

from loaders.dtypes import bf16_to_f32, quantize_rows_e4m3
from loaders.synthetic import synthetic_e4m3 as host_e4m3
from loaders.synthetic import synthetic_values as host_bf16
from qwen_raw.device import BF16, E4M3, F32
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.norm import rmsnorm as device_rmsnorm
from qwen_raw.kernels.quantize import quantize_rows
from qwen_raw.kernels.rope import rope_append
from qwen_raw.kernels.synthetic import synthetic_bf16, synthetic_e4m3


@pytest.mark.parametrize(("T", "D"), [(1, 8), (3, 264), (5, 2048)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 2e4])
def test_rmsnorm(dev: Any, rng: np.random.Generator, T: int, D: int, scale: float) -> None:
    h = (rng.standard_normal((T, D)) * scale).astype(np.float32)
    g, G = bf16_input(rng, D)
    out = dev.empty((T, D), BF16)
    out.fill(POISON)
    device_rmsnorm(dev, out, dev.array(h), dev.array(g), 1e-6)
    assert_close(bf16_to_f32(out.download()), rmsnorm(h, G, 1e-6), rel=4e-3, what="out")


@pytest.mark.parametrize(("T", "D"), [(1, 8), (7, 328)])
def test_embed(dev: Any, rng: np.random.Generator, T: int, D: int) -> None:
    table, values = bf16_input(rng, 50, D)
    ids = rng.integers(0, 50, T).astype(np.int32)
    h = dev.empty((T, D), F32)
    h.fill(POISON)
    embed(dev, h, dev.array(table), dev.array(ids))
    assert (h.download() == values[ids].astype(np.float32)).all()


@pytest.mark.parametrize(("H", "KV", "HD"), [(4, 2, 64), (3, 1, 128)])
def test_rope_append(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int) -> None:
    T, pos0, max_len, half = 5, 2, 9, HD // 2
    qkv, X = bf16_input(rng, T, (H + 2 * KV) * HD)
    angle = rng.uniform(0, 6, (max_len, half))
    rope = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    caches = [dev.empty((KV, max_len, HD), BF16) for _ in range(2)]
    for cache in caches:
        cache.fill(POISON)
    buffer = dev.array(qkv)
    rope_append(dev, buffer, *caches, dev.array(rope), H, pos0)

    x = X.reshape(T, H + 2 * KV, HD)
    cos, sin = (rope[pos0 : pos0 + T, None, :, i].astype(np.float64) for i in range(2))
    y = x.copy()
    y[..., :half], y[..., half:] = rotate(x[..., :half], x[..., half:], cos, sin)
    q = bf16_to_f32(buffer.download()).reshape(T, H + 2 * KV, HD)
    assert_close(q[:, :H], y[:, :H], rel=4e-3, what="q")
    for cache, want, name in ((caches[0], y[:, H : H + KV], "k"), (caches[1], x[:, H + KV :], "v")):
        got = cache.download()
        assert_close(bf16_to_f32(got[:, pos0 : pos0 + T]), want.transpose(1, 0, 2), rel=4e-3, what=name)
        outside = np.delete(got, range(pos0, pos0 + T), axis=1)
        assert (outside == 0xFFFF).all(), f"{name}: a row of another position was written"


def test_quantize_rows_equals_the_host(dev: Any, rng: np.random.Generator) -> None:
    w, values = bf16_input(rng, 9, 272)
    w[3], values[3] = 0, 0.0  # a zero row: scale 1, no division by zero
    q, scale = dev.empty((9, 272), E4M3), dev.empty((9,), F32)
    q.fill(POISON), scale.fill(POISON)
    quantize_rows(dev, q, scale, dev.array(w))
    want_q, want_scale = quantize_rows_e4m3(values.astype(np.float32))
    np.testing.assert_array_equal(scale.download(), want_scale)
    np.testing.assert_array_equal(q.download(), want_q)


@pytest.mark.parametrize("shape", [(1, 8), (33, 40)])
@pytest.mark.parametrize("seed", [0, 7])
def test_synthetic_equals_the_host(dev: Any, shape: tuple[int, int], seed: int) -> None:
    tid, bound = 0xDEADBEEF, 0.037
    out = dev.empty(shape, BF16)
    synthetic_bf16(dev, out, tid, seed, bound)
    np.testing.assert_array_equal(out.download(), host_bf16(shape, tid, seed, bound))
    fp8 = dev.empty(shape, E4M3)
    synthetic_e4m3(dev, fp8, tid, seed)
    np.testing.assert_array_equal(fp8.download(), host_e4m3(shape, tid, seed))
