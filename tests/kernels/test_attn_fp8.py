"""attn_decode.cu and attn_prefill.cu on an e4m3 cache, against float64 on the values that the cache holds."""

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, attention, bf16_input, fp8_cache

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16
from qwen_raw.kernels.attn_decode import MIN_SPLIT, Split, Workspace, attn_decode
from qwen_raw.kernels.attn_prefill import attn_prefill

HEADS = [(4, 2, 64), (7, 1, 64), (3, 3, 128), (8, 1, 128), (17, 1, 64)]  # (H, KV, HD)
SPLITS = [Split(0, 5, 7), Split(3, 1, 10), Split(2, 3, 7), Split(2, 1, 7, 3, 6)]
REL = 8e-3  # the output is bf16


def want_rows(Q: Any, K: Any, V: Any, seen: list[int]) -> Any:
    """[T, H, HD] in float64; token t sees the first seen[t] keys."""
    T, H, _ = Q.shape
    G = H // K.shape[0]
    return np.stack(
        [[attention(Q[t, h], K[h // G, : seen[t]], V[h // G, : seen[t]]) for h in range(H)] for t in range(T)]
    )


@pytest.mark.parametrize(("H", "KV", "HD"), HEADS)
@pytest.mark.parametrize("split", SPLITS, ids=lambda s: f"{s.clusters}x{s.cluster}+{s.singles}")
@pytest.mark.parametrize("T", [1, 5])
def test_decode(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, split: Split, T: int) -> None:
    """Rows past the last key are NaN, second parts too."""
    max_len = 4 * MIN_SPLIT + 21
    ws, out = Workspace.create(dev, H, KV, HD, max_len, T=T, split=split), dev.empty((T, H, HD), BF16)
    for n in (T, 17 + T, MIN_SPLIT, 2 * MIN_SPLIT + 1, max_len):
        q, Q = bf16_input(rng, T, H, HD, scale=2.0)
        k, v, fine, K, V = fp8_cache(rng, KV, max_len, HD, n)
        out.fill(POISON)
        pos = dev.array(np.array([n - T], np.int32))
        attn_decode(dev, out, dev.array(q), dev.array(k), dev.array(v), pos, ws, fine=dev.array(fine))
        want = want_rows(Q, K, V, [n - T + t + 1 for t in range(T)])
        assert_close(bf16_to_f32(out.download()), want, rel=REL, what=f"{n} keys")


@pytest.mark.parametrize(("H", "KV", "HD"), HEADS)
@pytest.mark.parametrize(("rows", "T", "pos0"), [(1, 1, 0), (17, 17, 0), (65, 65, 3), (65, 17, 3), (130, 1, 71)])
def test_prefill(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, rows: int, T: int, pos0: int) -> None:
    max_len = 72
    q, Q = bf16_input(rng, rows, H, HD, scale=2.0)
    q[T:] = 0x7FC0
    k, v, fine, K, V = fp8_cache(rng, KV, max_len, HD, pos0 + T)
    out = dev.empty((rows, H, HD), BF16)
    out.fill(POISON)
    span = dev.array(np.array([pos0, T], np.int32))
    attn_prefill(dev, out, dev.array(q), dev.array(k), dev.array(v), span, fine=dev.array(fine))
    got = out.download()
    want = want_rows(Q[:T], K, V, [pos0 + t + 1 for t in range(T)])
    assert_close(bf16_to_f32(got[:T]), want, rel=REL, what="out")
    assert (got[T:] == 0xFFFF).all(), "a row of padding was written"


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "KV"), [(28, 4), (64, 8), (8, 1)])
def test_decode_lengths_on_a_gpu(cuda_device: Any, rng: np.random.Generator, H: int, KV: int) -> None:
    """Lengths up to 600, a few long ones, the launcher's own split, dependent launches."""
    dev, HD, longest = cuda_device, 128, 32768 // KV
    q, Q = bf16_input(rng, 1, H, HD, scale=2.0)
    k, v, fine, K, V = fp8_cache(rng, KV, longest, HD, longest)
    ws, out = Workspace.create(dev, H, KV, HD, longest), dev.empty((H, HD), BF16)
    buffers, fine_buffer = [dev.array(x) for x in (q[0], k, v)], dev.array(fine)
    for n in (*range(1, 601, 7), 1023, 2049, 4096, longest - 1, longest):
        out.fill(POISON)
        attn_decode(dev, out, *buffers, dev.array(np.array([n - 1], np.int32)), ws, fine=fine_buffer, pdl=True)
        assert_close(bf16_to_f32(out.download()), want_rows(Q, K, V, [n])[0], rel=REL, what=f"{n} keys")
