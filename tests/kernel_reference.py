"""Host references in float64 and the comparison all kernel tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_bf16, f32_to_e4m3, quantize_rows_e4m3
from qwen_raw.kernels.gemm_sm90 import Tokens, exponent_row
from qwen_raw.kernels.kv_cache import COARSE, FINE_PAIRS
from qwen_raw.kernels.linear import Linear

Array = np.ndarray[Any, Any]
BLOCK_STEP = 8  # of exponents, as in include/block_scale.cuh
POISON = 0xFF  # every byte: NaN as fp32, bf16 and e4m3, so an element never written cannot pass


def f16_input(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> tuple[Array, Array]:
    """(bits uint16, the same values float64), normal with deviation `scale`."""
    values = (rng.standard_normal(shape) * scale).astype(np.float16)
    return values.view(np.uint16), values.astype(np.float64)


def f16_values(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float64)


def bf16_input(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> tuple[Array, Array]:
    """(bits uint16, the same values float64), normal with deviation `scale`."""
    bits = f32_to_bf16((rng.standard_normal(shape) * scale).astype(np.float32))
    return bits, bf16_to_f32(bits).astype(np.float64)


def make_linear(dev: Any, rng: np.random.Generator, N: int, K: int, fp8: bool) -> tuple[Linear, Array]:
    """A random weight on the device, and its exact values float64 [N, K]."""
    w = (rng.standard_normal((N, K)) / np.sqrt(K)).astype(np.float32)
    if not fp8:
        bits = f32_to_bf16(w)
        return Linear(dev.array(bits)), bf16_to_f32(bits).astype(np.float64)
    q, scale = quantize_rows_e4m3(w)
    values = e4m3_to_f32(q).astype(np.float64) * scale[:, None].astype(np.float64)
    return Linear(dev.array(q), dev.array(scale.astype(np.float32))), values


def block_tokens(dev: Any, rng: np.random.Generator, T: int, K: int, change: float) -> tuple[Tokens, Array]:
    """Random rows on the device, whose scale changes from a block to the next with this probability; their values."""
    n = -(-K // 128)
    codes = rng.integers(0, 256, (T, K), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # no NaN
    steps = np.where(rng.random((T, n)) < change, rng.integers(-1, 2, (T, n)), 0)
    e = 120 + BLOCK_STEP * np.cumsum(steps, axis=1)
    exponents = rng.integers(0, 256, (T, exponent_row(K)), dtype=np.uint8)
    exponents[:, :n] = e
    values = e4m3_to_f32(codes).astype(np.float64) * np.repeat(2.0 ** (e - 127.0), 128, axis=1)[:, :K]
    return Tokens(dev.array(codes), exponents=dev.array(exponents)), values


def rmsnorm(h: Array, g: Array, eps: float) -> Array:
    """RMSNorm over the last axis, not rounded."""
    h = h.astype(np.float64)
    return h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * g


def rmsnorm_f16(h: Array, g: Array, eps: float) -> Array:
    """RMSNorm rounded once to f16, saturating, as prefill feeds it to QKV and gate/up."""
    return rmsnorm(h, g, eps).clip(-65504, 65504).astype(np.float16).astype(np.float64)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rotate(x: Array, y: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    return x * cos - y * sin, y * cos + x * sin


def attention(q: Array, k: Array, v: Array) -> Array:
    """q [HD], k and v [n, HD] → [HD], all float64."""
    s = k @ q / np.sqrt(q.shape[0])
    p = np.exp(s - s.max())
    return (p / p.sum()) @ v


def assert_close(got: Array, want: Array, *, rel: float, what: str) -> None:
    """‖got - want‖∞ within rel·max|want|; reports the worst element's place. NaN never passes."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    error = np.abs(got - want)
    error[~np.isfinite(got)] = np.inf
    limit = rel * max(float(np.abs(want).max()), 1e-30)
    worst = np.unravel_index(int(error.argmax()), error.shape) if error.size else ()
    assert error.max() <= limit, (
        f"{what}: worst at {tuple(int(i) for i in worst)}: got {got[worst]}, expected {want[worst]}, "
        f"{error.max() / limit:.1f} times the tolerance"
    )


def assert_sums_close(got: Array, want: Array, terms: Array, *, what: str, bits: int = 20) -> None:
    """fp32 sums: within 2^-bits of the sum of their terms' magnitudes, which they may be far smaller than."""
    error, limit = np.abs(np.asarray(got, np.float64) - want), np.asarray(terms, np.float64) * 2.0**-bits
    assert (error <= limit).all(), f"{what}: off by {(error / limit).max():.1f} times the tolerance"


def fine_tables(rng: np.random.Generator, KV: int, HD: int) -> tuple[Array, Array]:
    """(slots uint8 [KV, HD/2], pairs uint8 [KV, FINE_PAIRS]) of pairs chosen at random, the last one among them."""
    slots, last = np.full((KV, HD // 2), COARSE, np.uint8), HD // 2 - 1
    pairs = np.stack([np.r_[np.sort(rng.choice(last, FINE_PAIRS - 1, replace=False)), last] for _ in range(KV)])
    np.put_along_axis(slots, pairs, np.arange(FINE_PAIRS, dtype=np.uint8)[None], 1)
    return slots, pairs.astype(np.uint8)


def fp8_cache(rng: np.random.Generator, KV: int, max_len: int, HD: int, n: int) -> tuple[Array, ...]:
    """An e4m3 cache with n keys, its other rows NaN: k, v, fine (kv_cache.cuh), and the float64 values of K and V.

    Pairs with a second part are thirty times as large as the others: without it the scores would be wrong.
    """
    slots, pairs = fine_tables(rng, KV, HD)
    K, V = (rng.standard_normal((KV, max_len, HD)).astype(np.float32) for _ in range(2))
    dims = np.concatenate([pairs, pairs + HD // 2], axis=1).astype(np.int64)  # [KV, FINE]
    heads, keys, dims = np.arange(KV)[:, None, None], np.arange(max_len)[None, :, None], dims[:, None]
    K[heads, keys, dims] += 30 * rng.standard_normal((KV, 1, dims.shape[-1])).astype(np.float32)
    k, v = f32_to_e4m3(K), f32_to_e4m3(V)
    whole = e4m3_to_f32(k).astype(np.float64)
    codes = f32_to_e4m3(K[heads, keys, dims] - e4m3_to_f32(k)[heads, keys, dims])
    whole[heads, keys, dims] += e4m3_to_f32(codes)
    values = e4m3_to_f32(v).astype(np.float64)
    k[:, n:], v[:, n:], codes[:, n:] = 0x7F, 0x7F, 0x7F
    return k, v, np.concatenate([part.reshape(-1) for part in (codes, slots, pairs)]), whole, values
