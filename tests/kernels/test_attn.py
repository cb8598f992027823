"""attn_decode.cu and attn_prefill.cu against float64: head dims, group sizes, split edges, a long cache."""

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, attention, bf16_input

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.attn_decode import MIN_SPLIT, Workspace, attn_decode
from qwen_raw.kernels.attn_prefill import attn_prefill

HEADS = [
    (4, 2, 64),
    (7, 1, 64),
    (3, 3, 128),
    (8, 1, 128),
    (17, 1, 64),
]  # (H, KV, HD); a group of 17 takes two block rows
REL = 8e-3  # P and the output are bf16


def decode_case(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, n: int, max_len: int) -> tuple[Any, ...]:
    """q and caches whose rows past n are NaN, and the reference output [H, HD] over keys 0 … n - 1."""
    q, Q = bf16_input(rng, H, HD, scale=2.0)
    (k, K), (v, V) = bf16_input(rng, KV, max_len, HD), bf16_input(rng, KV, max_len, HD)
    k[:, n:], v[:, n:] = 0x7FC0, 0x7FC0
    want = np.stack([attention(Q[h], K[h // (H // KV), :n], V[h // (H // KV), :n]) for h in range(H)])
    return q, k, v, want


@pytest.mark.parametrize(("H", "KV", "HD"), HEADS)
@pytest.mark.parametrize("n", [1, 15, 16, MIN_SPLIT, MIN_SPLIT + 1, 3 * MIN_SPLIT - 1])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, n: int, splits: int) -> None:
    max_len = 3 * MIN_SPLIT
    q, k, v, want = decode_case(dev, rng, H, KV, HD, n, max_len)
    ws = Workspace.create(dev, H, KV, HD, max_len, splits)
    ws.part.fill(POISON)
    pos, out = dev.array(np.array([n - 1], np.int32)), dev.empty((H, HD), BF16)
    qd, kd, vd = dev.array(q), dev.array(k), dev.array(v)
    for _ in range(2):  # the second launch finds the counters where the first left them
        out.fill(POISON)
        attn_decode(dev, out, qd, kd, vd, pos, ws)
        assert_close(bf16_to_f32(out.download()), want, rel=REL, what="out")


def test_decode_peaked_scores(dev: Any, rng: np.random.Generator) -> None:
    """Scores of ±1000: one key takes everything, the maximum keeps the exponentials finite."""
    H, KV, HD, n = 4, 1, 64, 100
    q, k, v, _ = decode_case(dev, rng, H, KV, HD, n, 128)
    q = (q & 0x807F) | 0x4200  # magnitudes of 32 to 64, signs kept
    K, V, Q = (bf16_to_f32(x).astype(np.float64) for x in (k, v, q))
    want = np.stack([attention(Q[h], K[0, :n], V[0, :n]) for h in range(H)])
    out, ws = dev.empty((H, HD), BF16), Workspace.create(dev, H, KV, HD, 128, 2)
    attn_decode(dev, out, dev.array(q), dev.array(k), dev.array(v), dev.array(np.array([n - 1], np.int32)), ws)
    assert_close(bf16_to_f32(out.download()), want, rel=REL, what="out")


@pytest.mark.parametrize(("H", "KV", "HD"), HEADS)
@pytest.mark.parametrize(("T", "pos0"), [(1, 0), (16, 0), (17, 0), (65, 3), (2, 64)])
def test_prefill(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, T: int, pos0: int) -> None:
    max_len = 72
    q, Q = bf16_input(rng, T, H, HD, scale=2.0)
    (k, K), (v, V) = bf16_input(rng, KV, max_len, HD), bf16_input(rng, KV, max_len, HD)
    k[:, pos0 + T :], v[:, pos0 + T :] = 0x7FC0, 0x7FC0
    out = dev.empty((T, H, HD), BF16)
    out.fill(POISON)
    attn_prefill(dev, out, dev.array(q), dev.array(k), dev.array(v), pos0)
    want = np.empty((T, H, HD))
    for t in range(T):
        for h in range(H):
            kv, n = h // (H // KV), pos0 + t + 1
            want[t, h] = attention(Q[t, h], K[kv, :n], V[kv, :n])
    assert_close(bf16_to_f32(out.download()), want, rel=REL, what="out")


def test_unknown_head_dim_is_refused(dev: Any) -> None:
    out, q, cache = dev.zeros((1, 2, 80), BF16), dev.zeros((1, 2, 80), BF16), dev.zeros((1, 8, 80), BF16)
    with pytest.raises(QwenRawError, match="head_dim 80"):
        attn_prefill(dev, out, q, cache, cache, 0)
