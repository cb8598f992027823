"""norm.cu, embed.cu, last_row.cu, quantize.cu, synthetic.cu: the small kernels, against the host's definitions."""

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, bf16_input, f16_values, rmsnorm, rmsnorm_f16

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, quantize_rows_e4m3
from loaders.synthetic import synthetic_values as host_bf16
from loaders.synthetic import synthetic_values_e4m3 as host_e4m3
from qwen_raw.device import BF16, E4M3, F16, F32, I32
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.last_row import last_row
from qwen_raw.kernels.norm import rmsnorm as device_rmsnorm
from qwen_raw.kernels.norm import rmsnorm_bf16, rmsnorm_e4m3, rmsnorm_split
from qwen_raw.kernels.quantize import MOST, quantize_rows, quantize_tokens
from qwen_raw.kernels.synthetic import Window, synthetic_bf16, synthetic_e4m3


@pytest.mark.parametrize(("T", "D"), [(1, 8), (3, 264), (5, 2048)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 2e4])
def test_rmsnorm(dev: Any, rng: np.random.Generator, T: int, D: int, scale: float) -> None:
    h = (rng.standard_normal((T, D)) * scale).astype(np.float32)
    g, G = bf16_input(rng, D)
    out = dev.empty((T, D), F16)
    out.fill(POISON)
    device_rmsnorm(dev, out, dev.array(h), dev.array(g), 1e-6)
    assert_close(f16_values(out.download()), rmsnorm_f16(h, G, 1e-6), rel=1e-3, what="out")


def test_rmsnorm_saturates(dev: Any) -> None:
    """A value that f16 cannot hold becomes its largest one, never an infinity."""
    h = np.zeros((1, 1024), np.float32)
    h[0, 3], h[0, 5] = 1e4, -1e4  # normed: about ±22.6
    g = np.full(1024, 0x4580, np.uint16)  # 4096
    out = dev.empty((1, 1024), F16)
    device_rmsnorm(dev, out, dev.array(h), dev.array(g), 1e-6)
    assert f16_values(out.download())[0, [3, 5]].tolist() == [65504.0, -65504.0]


def test_rmsnorm_bf16(dev: Any, rng: np.random.Generator) -> None:
    h = rng.standard_normal((5, 904)).astype(np.float32)
    g, G = bf16_input(rng, 904)
    out = dev.empty((5, 904), BF16)
    out.fill(POISON)
    rmsnorm_bf16(dev, out, dev.array(h), dev.array(g), 1e-6)
    assert_close(bf16_to_f32(out.download()), rmsnorm(h, G, 1e-6), rel=4e-3, what="out")


# One thread alone; a warp and more; several warps whose last threads have less.
@pytest.mark.parametrize("D", [16, 1040, 3584])
def test_rmsnorm_e4m3(dev: Any, rng: np.random.Generator, D: int) -> None:
    """The scale is that of the exact row; a code is one of the two e4m3 around the value, the nearer one."""
    h = (rng.standard_normal((5, D)) * 10.0 ** rng.uniform(-3, 3, (5, 1))).astype(np.float32)
    h[3] = 0
    g, G = bf16_input(rng, D)
    out, scale = dev.empty((5, D), E4M3), dev.empty((5,), F32)
    out.fill(POISON), scale.fill(POISON)
    rmsnorm_e4m3(dev, out, scale, dev.array(h), dev.array(g), 1e-6)
    want = rmsnorm(h, G, 1e-6)
    top = np.abs(want).max(1)
    np.testing.assert_allclose(scale.download(), np.where(top > 0, top / 448, 1), rtol=1e-5)
    got = e4m3_to_f32(out.download()).astype(np.float64) * scale.download()[:, None]
    half = np.maximum(np.abs(want) * 2.0**-4, top[:, None] / 448 * 2.0**-10)  # half a step of e4m3
    assert (np.abs(got - want) <= 1.001 * half).all()
    assert (np.abs(e4m3_to_f32(out.download())).max(1) == np.where(top > 0, 448, 0)).all()


def test_rmsnorm_split_keeps_sixteen_bits(dev: Any, rng: np.random.Generator) -> None:
    h = rng.standard_normal((3, 136)).astype(np.float32)
    g, G = bf16_input(rng, 136)
    parts = [dev.empty((3, 136), BF16) for _ in range(2)]
    for part in parts:
        part.fill(POISON)
    rmsnorm_split(dev, *parts, dev.array(h), dev.array(g), 1e-6)
    got = sum(bf16_to_f32(part.download()).astype(np.float64) for part in parts)
    assert_close(got, rmsnorm(h, G, 1e-6), rel=2e-5, what="hi + lo")


@pytest.mark.parametrize(("T", "D"), [(1, 8), (7, 328)])
def test_embed(dev: Any, rng: np.random.Generator, T: int, D: int) -> None:
    table, values = bf16_input(rng, 50, D)
    ids = rng.integers(0, 50, T).astype(np.int32)
    h = dev.empty((T, D), F32)
    h.fill(POISON)
    embed(dev, h, dev.array(table), dev.array(ids))
    assert (h.download() == values[ids].astype(np.float32)).all()


@pytest.mark.parametrize(("rows", "D"), [(1, 4), (7, 1032)])
def test_last_row(dev: Any, rng: np.random.Generator, rows: int, D: int) -> None:
    """The row of the last token, wherever the span says that it is; one launch's arguments serve all lengths."""
    h = rng.standard_normal((rows, D)).astype(np.float32)
    out, span, device_h = dev.empty((D,), F32), dev.zeros((2,), I32), dev.array(h)
    for T in {1, rows - 1 or 1, rows}:
        out.fill(POISON)
        span.upload(np.array([1000, T], np.int32))
        last_row(dev, out, device_h, span)
        assert (out.download() == h[T - 1]).all()


def test_quantize_rows_equals_the_host(dev: Any, rng: np.random.Generator) -> None:
    w, values = bf16_input(rng, 9, 272)
    w[3], values[3] = 0, 0.0  # a zero row: scale 1, no division by zero
    q, scale = dev.empty((9, 272), E4M3), dev.empty((9,), F32)
    q.fill(POISON), scale.fill(POISON)
    quantize_rows(dev, q, scale, dev.array(w))
    want_q, want_scale = quantize_rows_e4m3(values.astype(np.float32))
    np.testing.assert_array_equal(scale.download(), want_scale)
    np.testing.assert_array_equal(q.download(), want_q)


@pytest.mark.parametrize("K", [16, 1040, 3584])
def test_quantize_tokens(dev: Any, rng: np.random.Generator, K: int) -> None:
    """The host's scales; its codes but where the reciprocal moves a value over a tie. Rows of any size."""
    a, values = bf16_input(rng, 9, K)
    a[3], values[3] = 0, 0.0
    a[4, 5], values[4, 5] = 0x7F7F, bf16_to_f32(np.array([0x7F7F], np.uint16))[0]  # the largest bf16
    a[5], values[5] = a[5] & 0x80FF, bf16_to_f32(a[5] & 0x80FF)  # smaller than what a reciprocal exists of
    q, scale = dev.empty((9, K), E4M3), dev.empty((9,), F32)
    q.fill(POISON), scale.fill(POISON)
    quantize_tokens(dev, q, scale, dev.array(a))
    want_q, want_scale = quantize_rows_e4m3(values.astype(np.float32))
    want_q[5], want_scale[5] = want_q[5] & 0x80, 1.0
    np.testing.assert_array_equal(scale.download(), want_scale)
    other = q.download() != want_q
    assert other.mean() < 0.01
    near = e4m3_to_f32(q.download())[other] / e4m3_to_f32(want_q)[other]
    assert ((near > 0.87) & (near < 1.15)).all()


def test_a_row_is_one_blocks(dev: Any) -> None:
    with pytest.raises(QwenRawError, match="a row of 32784 elements: a block holds 32768"):
        quantize_tokens(dev, dev.empty((1, MOST + 16), E4M3), dev.empty((1,), F32), dev.empty((1, MOST + 16), BF16))


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


@pytest.mark.parametrize(("rows", "columns"), [(range(5, 12), range(40)), (range(33), range(16, 32))])
def test_windows_are_those_of_the_whole(dev: Any, rng: np.random.Generator, rows: range, columns: range) -> None:
    """What a rank makes for itself is what the whole has there; a quantised row keeps the whole row's scale."""
    at = np.ix_(rows, columns)
    window = Window(rows.start * 40 + columns.start, len(columns), 40)
    out, fp8 = dev.empty((len(rows), len(columns)), BF16), dev.empty((len(rows), len(columns)), E4M3)
    synthetic_bf16(dev, out, 5, 7, 0.5, window)
    np.testing.assert_array_equal(out.download(), host_bf16((33, 40), 5, 7, 0.5)[at])
    synthetic_e4m3(dev, fp8, 5, 7, window)
    np.testing.assert_array_equal(fp8.download(), host_e4m3((33, 40), 5, 7)[at])

    bits, values = bf16_input(rng, 33, 48)
    q, scale = dev.empty((33, 16), E4M3), dev.empty((33,), F32)
    quantize_rows(dev, q, scale, dev.array(bits), first=32)
    want_q, want_scale = quantize_rows_e4m3(values.astype(np.float32))
    np.testing.assert_array_equal(scale.download(), want_scale)
    np.testing.assert_array_equal(q.download(), want_q[:, 32:])
