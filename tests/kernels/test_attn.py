"""attn_decode.cu and attn_prefill.cu against float64: head dims, group sizes, split edges, tokens, a long cache."""

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, attention, bf16_input

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.attn_decode import ENOUGH, MIN_SPLIT, Split, Workspace, attn_decode, choose_split
from qwen_raw.kernels.attn_prefill import attn_prefill

HEADS = [
    (4, 2, 64),
    (7, 1, 64),
    (3, 3, 128),
    (8, 1, 128),
    (17, 1, 64),
]  # (H, KV, HD); a group of 17 takes two block rows
REL = 8e-3  # P and the output are bf16


# How a head's keys are split: blocks of one cluster, clusters of one block, and both. The last key counts are small,
# so that a few hundred keys fill several clusters.
SPLITS = [Split(0, 1, 8), Split(0, 5, 7), Split(1, 2, 8), Split(2, 1, 9), Split(3, 1, 10), Split(2, 3, 7)]
SPLITS += [Split(1, 1, 8, 1, 7), Split(1, 1, 7, 3, 5)]  # and blocks by themselves
LENGTHS = [1, 2, 15, 16, 17, MIN_SPLIT - 1, MIN_SPLIT, MIN_SPLIT + 1, 2 * MIN_SPLIT, 3 * MIN_SPLIT + 5]


def decode_case(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, n: int, max_len: int) -> tuple[Any, ...]:
    """q and caches whose rows past n are NaN, and the reference output [H, HD] over keys 0 … n - 1."""
    q, k, v, want = tokens_case(rng, 1, H, KV, HD, n, max_len)
    return q[0], k, v, want[0]


def tokens_case(rng: np.random.Generator, T: int, H: int, KV: int, HD: int, n: int, max_len: int) -> tuple[Any, ...]:
    """q [T, H, HD] and caches with n keys, those of the T tokens last; rows past n are NaN. Reference [T, H, HD]."""
    q, Q = bf16_input(rng, T, H, HD, scale=2.0)
    (k, K), (v, V) = bf16_input(rng, KV, max_len, HD), bf16_input(rng, KV, max_len, HD)
    k[:, n:], v[:, n:] = 0x7FC0, 0x7FC0
    G, want = H // KV, np.empty((T, H, HD))
    for t in range(T):
        for h in range(H):
            keys = n - T + t + 1
            want[t, h] = attention(Q[t, h], K[h // G, :keys], V[h // G, :keys])
    return q, k, v, want


@pytest.mark.parametrize(("H", "KV", "HD"), HEADS)
@pytest.mark.parametrize("split", SPLITS, ids=lambda s: f"{s.clusters}x{s.cluster}+{s.singles}")
def test_decode(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, split: Split) -> None:
    """One workspace for all lengths: each launch finds it as the one before has left it."""
    max_len = LENGTHS[-1]
    ws = Workspace.create(dev, H, KV, HD, max_len, split=split)
    out = dev.empty((H, HD), BF16)
    for n in LENGTHS:
        q, k, v, want = decode_case(dev, rng, H, KV, HD, n, max_len)
        out.fill(POISON)
        attn_decode(dev, out, *(dev.array(x) for x in (q, k, v)), dev.array(np.array([n - 1], np.int32)), ws)
        assert_close(bf16_to_f32(out.download()), want, rel=REL, what=f"{n} keys")
    assert (ws.part.download().view(np.uint32) == 0xFFFFFFFF).all(), "the workspace is armed again"
    assert not ws.arrivals.download().any()


@pytest.mark.parametrize(("H", "KV", "HD"), HEADS[1:4])
@pytest.mark.parametrize("log_cluster", [2, 3])
@pytest.mark.parametrize("T", [1, 3])
def test_blocks_beside_larger_clusters(
    dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, log_cluster: int, T: int
) -> None:
    """A cluster of four or eight blocks, and three by themselves, of which the last has no keys at first."""
    max_len = ((1 << log_cluster) + 3) * MIN_SPLIT
    ws = Workspace.create(dev, H, KV, HD, max_len, T=T, split=Split(log_cluster, 1, 7, 3, 6))
    out = dev.empty((T, H, HD), BF16)
    for n in (max_len - MIN_SPLIT - 3, max_len):
        q, k, v, want = tokens_case(rng, T, H, KV, HD, n, max_len)
        out.fill(POISON)
        attn_decode(dev, out, *(dev.array(x) for x in (q, k, v)), dev.array(np.array([n - T], np.int32)), ws)
        assert_close(bf16_to_f32(out.download()), want, rel=REL, what=f"{n} keys")


@pytest.mark.parametrize(("H", "KV", "HD"), HEADS)
@pytest.mark.parametrize("split", SPLITS[3:], ids=lambda s: f"{s.clusters}x{s.cluster}+{s.singles}")
@pytest.mark.parametrize("T", [2, 5, 8])
def test_decode_some_tokens(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, split: Split, T: int) -> None:
    """Each token sees the keys up to its own."""
    max_len = LENGTHS[-1]
    ws = Workspace.create(dev, H, KV, HD, max_len, T=T, split=split)
    out = dev.empty((T, H, HD), BF16)
    for n in (T, T + 9, MIN_SPLIT + T - 1, 2 * MIN_SPLIT + 1, max_len):
        q, k, v, want = tokens_case(rng, T, H, KV, HD, n, max_len)
        out.fill(POISON)
        attn_decode(dev, out, *(dev.array(x) for x in (q, k, v)), dev.array(np.array([n - T], np.int32)), ws)
        assert_close(bf16_to_f32(out.download()), want, rel=REL, what=f"{n} keys")


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "KV"), [(28, 4), (64, 8), (16, 2), (8, 1)])
def test_decode_lengths_on_a_gpu(cuda_device: Any, rng: np.random.Generator, H: int, KV: int) -> None:
    """Every length up to 300, a few long ones, the launcher's own split, dependent launches."""
    dev, HD, longest = cuda_device, 128, 32768
    q, k, v, _ = tokens_case(rng, 1, H, KV, HD, 1, longest)
    k, v = bf16_input(rng, KV, longest, HD)[0], bf16_input(rng, KV, longest, HD)[0]
    K, V, Q = (bf16_to_f32(x).astype(np.float64) for x in (k, v, q[0]))
    ws, out = Workspace.create(dev, H, KV, HD, longest), dev.empty((H, HD), BF16)
    qd, kd, vd = dev.array(q[0]), dev.array(k), dev.array(v)
    for n in (*range(1, 301), 1023, 2049, 4096, 4097, 9999, longest):
        want = np.stack([attention(Q[h], K[h * KV // H, :n], V[h * KV // H, :n]) for h in range(H)])
        out.fill(POISON)
        attn_decode(dev, out, qd, kd, vd, dev.array(np.array([n - 1], np.int32)), ws, pdl=True)
        assert_close(bf16_to_f32(out.download()), want, rel=REL, what=f"{n} keys")


def test_the_split_fills_the_device(dev: Any) -> None:
    """One rule for every number of heads: what the device holds at once, most of it; no split where keys are few."""
    kernel = dev.kernel("attn_decode", "attn_decode_bf16_hd128_n1")
    for KV in (1, 2, 4, 8):
        s = choose_split(dev, 8, 128, KV, 32768)
        at_once = dev.resident_clusters(kernel, 256, 40_000, s.cluster) if s.log_cluster else dev.sm_count
        room = min(at_once, dev.sm_count >> s.log_cluster) << s.log_cluster
        assert ENOUGH * room < s.grid(KV) <= max(room, KV)
    s = choose_split(dev, 8, 128, 1, MIN_SPLIT)
    assert (s.blocks, s.singles) == (1, 0)


def test_decode_peaked_scores(dev: Any, rng: np.random.Generator) -> None:
    """Scores of ±1000: one key takes everything, the maximum keeps the exponentials finite."""
    H, KV, HD, n = 4, 1, 64, 100
    q, k, v, _ = decode_case(dev, rng, H, KV, HD, n, 128)
    q = (q & 0x807F) | 0x4200  # magnitudes of 32 to 64, signs kept
    K, V, Q = (bf16_to_f32(x).astype(np.float64) for x in (k, v, q))
    want = np.stack([attention(Q[h], K[0, :n], V[0, :n]) for h in range(H)])
    out, ws = dev.empty((H, HD), BF16), Workspace.create(dev, H, KV, HD, 128, split=Split(1, 1, 8))
    attn_decode(dev, out, dev.array(q), dev.array(k), dev.array(v), dev.array(np.array([n - 1], np.int32)), ws)
    assert_close(bf16_to_f32(out.download()), want, rel=REL, what="out")


@pytest.mark.parametrize(("H", "KV", "HD"), HEADS)
@pytest.mark.parametrize(
    ("rows", "T", "pos0"),
    [(1, 1, 0), (16, 16, 0), (17, 17, 0), (65, 65, 3), (2, 2, 64), (65, 17, 3), (130, 1, 71)],
)
def test_prefill(dev: Any, rng: np.random.Generator, H: int, KV: int, HD: int, rows: int, T: int, pos0: int) -> None:
    """Rows from T on are padding: left as they are, and no key beyond the last token's is looked at."""
    max_len = 72
    q, Q = bf16_input(rng, rows, H, HD, scale=2.0)
    q[T:] = 0x7FC0
    (k, K), (v, V) = bf16_input(rng, KV, max_len, HD), bf16_input(rng, KV, max_len, HD)
    k[:, pos0 + T :], v[:, pos0 + T :] = 0x7FC0, 0x7FC0
    out = dev.empty((rows, H, HD), BF16)
    out.fill(POISON)
    attn_prefill(dev, out, dev.array(q), dev.array(k), dev.array(v), dev.array(np.array([pos0, T], np.int32)))
    want = np.empty((T, H, HD))
    for t in range(T):
        for h in range(H):
            kv, n = h // (H // KV), pos0 + t + 1
            want[t, h] = attention(Q[t, h], K[kv, :n], V[kv, :n])
    assert_close(bf16_to_f32(out.download()[:T]), want, rel=REL, what="out")
    assert (out.download()[T:] == 0xFFFF).all(), "a row of padding was written"


def test_unknown_head_dim_is_refused(dev: Any) -> None:
    out, q, cache = dev.zeros((1, 2, 80), BF16), dev.zeros((1, 2, 80), BF16), dev.zeros((1, 8, 80), BF16)
    with pytest.raises(QwenRawError, match="head_dim 80"):
        attn_prefill(dev, out, q, cache, cache, dev.zeros((2,), np.dtype(np.int32)))
