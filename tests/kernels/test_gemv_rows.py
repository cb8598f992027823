"""gemv_rows_bf16.cu and gemv_rows_fp8.cu against float64: 1 to 16 rows, odd sizes, rows shared by several blocks."""

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, assert_sums_close, bf16_input, make_linear, rmsnorm, rotate, silu

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16, F32
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.gemv_rows import RowsWorkspace
from qwen_raw.kernels.gemv_rows_bf16 import GEMV_ROWS as BF16_ROWS
from qwen_raw.kernels.gemv_rows_fp8 import GEMV_ROWS as FP8_ROWS

KINDS = pytest.mark.parametrize("rows", [BF16_ROWS, FP8_ROWS], ids=["bf16", "fp8"])
EPS = 1e-6
# (M, N, K, ranges of rows): one of all; a tail in every dimension; one block; K that takes several splits.
PLAIN = [
    (1, 1, 16, None),
    (3, 37, 272, None),
    (8, 64, 1040, 1),
    (16, 129, 2064, 3),
    (5, 18, 528, 2),
    (7, 20, 8208, 2),
    (9, 33, 4112, 2),
]
NORMED = [
    (1, 1, 16, None),
    (3, 37, 272, None),
    (8, 64, 1040, 1),
    (16, 129, 2064, 3),
    (5, 18, 528, 2),
    (6, 33, 4112, 2),
    (4, 9, 4128, 2),
]


def workspace(dev: Any, M: int, N: int) -> RowsWorkspace:
    return RowsWorkspace.create(dev, 4 * M * N)


@KINDS
@pytest.mark.parametrize(("M", "N", "K", "R"), PLAIN)
def test_add(dev: Any, rng: np.random.Generator, rows: Any, M: int, N: int, K: int, R: int | None) -> None:
    w, W = make_linear(dev, rng, N, K, rows.fp8)
    x, X = bf16_input(rng, M, K)
    h = rng.standard_normal((M, N)).astype(np.float32)
    buffer = dev.array(h)
    rows.add(dev, buffer, dev.array(x), w, workspace(dev, M, N), R=R)
    assert_sums_close(buffer.download(), h + X @ W.T, np.abs(h) + np.abs(X) @ np.abs(W).T, what="h")


@KINDS
@pytest.mark.parametrize("R", [2, None])
def test_splits_that_are_not_a_cluster(
    dev: Any, rng: np.random.Generator, rows: Any, R: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices without clusters: they meet in the workspace."""
    monkeypatch.setattr(dev, "resident_clusters", lambda *_: 0)
    test_add(dev, rng, rows, 7, 20, 8208, R)
    test_swiglu(dev, rng, rows, 7, 20, 8208, R)


@KINDS
@pytest.mark.parametrize(("M", "N", "K"), [(8, 500, 2064), (3, 34, 12304), (16, 130, 4112)])
def test_splits_that_are_a_cluster(dev: Any, rng: np.random.Generator, rows: Any, M: int, N: int, K: int) -> None:
    """As many ranges as the launcher chooses: of several groups of tiles, of less than a tile; 2 to 8 splits."""
    test_add(dev, rng, rows, M, N, K, None)
    test_swiglu(dev, rng, rows, M, N, K, None)


@KINDS
@pytest.mark.parametrize("M", range(1, 17))
def test_every_number_of_rows_and_every_tail(dev: Any, rng: np.random.Generator, rows: Any, M: int) -> None:
    """N leaves M % 16 rows in the last tile of 16; rows past the last are not written."""
    N, K = 16 + M, 48
    w, W = make_linear(dev, rng, N, K, rows.fp8)
    x, X = bf16_input(rng, M, K)
    h = np.zeros((M + 1, N), np.float32)
    buffer = dev.array(h)
    rows.add(dev, buffer.view((M, N)), dev.array(x), w, workspace(dev, M, N), R=1)
    got = buffer.download()
    assert_close(got[:M], X @ W.T, rel=2e-5, what="h")
    assert not got[M].any()


@KINDS
@pytest.mark.parametrize("K", [896, 3584, 3696, 4864])
def test_row_lengths_of_the_models(dev: Any, rng: np.random.Generator, rows: Any, K: int) -> None:
    M, N = 8, 17
    w, W = make_linear(dev, rng, N, K, rows.fp8)
    x, X = bf16_input(rng, M, K)
    buffer = dev.zeros((M, N), F32)
    rows.add(dev, buffer, dev.array(x), w, workspace(dev, M, N), R=2)
    assert_close(buffer.download(), X @ W.T, rel=2e-5, what="h")


@KINDS
@pytest.mark.parametrize(("M", "N", "K", "R"), PLAIN[2:5])
def test_store(dev: Any, rng: np.random.Generator, rows: Any, M: int, N: int, K: int, R: int | None) -> None:
    w, W = make_linear(dev, rng, N, K, rows.fp8)
    x, X = bf16_input(rng, M, K)
    y = dev.empty((M, N), BF16)
    y.fill(POISON)
    rows.store(dev, y, dev.array(x), w, workspace(dev, M, N), R=R)
    assert_close(bf16_to_f32(y.download()), X @ W.T, rel=4e-3, what="y")


@KINDS
@pytest.mark.parametrize(("M", "I", "K", "R"), NORMED)
def test_swiglu(dev: Any, rng: np.random.Generator, rows: Any, M: int, I: int, K: int, R: int | None) -> None:  # noqa: E741
    (gate, G), (up, U) = make_linear(dev, rng, I, K, rows.fp8), make_linear(dev, rng, I, K, rows.fp8)
    g, gv = bf16_input(rng, K)
    h = (rng.standard_normal((M, K)) * 3).astype(np.float32)
    act = dev.empty((M, I), BF16)
    act.fill(POISON)
    rows.swiglu(dev, act, dev.array(h), dev.array(g), gate, up, EPS, workspace(dev, M, 2 * I), R=R)
    n = rmsnorm(h, gv, EPS)
    assert_close(bf16_to_f32(act.download()), silu(n @ G.T) * (n @ U.T), rel=4e-3, what="act")


@KINDS
@pytest.mark.parametrize(
    ("M", "H", "KV", "HD", "pos", "K"),
    [(1, 4, 2, 64, 0, 208), (5, 7, 1, 64, 5, 208), (16, 3, 3, 128, 16, 208), (8, 2, 2, 8, 1, 4112)],
)
def test_qkv(dev: Any, rng: np.random.Generator, rows: Any, M: int, H: int, KV: int, HD: int, pos: int, K: int) -> None:
    max_len, half = 32, HD // 2
    w, W = make_linear(dev, rng, (H + 2 * KV) * HD, K, rows.fp8)
    bias = (rng.standard_normal(w.N) * 10).astype(np.float32)  # large: a bias applied after the rotation cannot pass
    g, gv = bf16_input(rng, K)
    h = rng.standard_normal((M, K)).astype(np.float32)
    angle = rng.uniform(0, 6, (max_len, half))
    rope = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    q, caches = dev.empty((M, H, HD), BF16), [dev.empty((KV, max_len, HD), BF16) for _ in range(2)]
    for buffer in (q, *caches):
        buffer.fill(POISON)
    position, tables = dev.array(np.array([pos], np.int32)), (dev.array(bias), dev.array(rope))
    rows.qkv(dev, q, *caches, dev.array(h), dev.array(g), w, *tables, position, EPS, workspace(dev, M, w.N))

    x = (rmsnorm(h, gv, EPS) @ W.T + bias).reshape(M, H + 2 * KV, HD)
    cos, sin = (rope[pos : pos + M, None, :, i].astype(np.float64) for i in range(2))
    y = x.copy()
    y[..., :half], y[..., half:] = rotate(x[..., :half], x[..., half:], cos, sin)
    assert_close(bf16_to_f32(q.download()), y[:, :H], rel=4e-3, what="q")
    for cache, want, name in ((caches[0], y[:, H : H + KV], "k"), (caches[1], x[:, H + KV :], "v")):
        got = cache.download()
        assert_close(bf16_to_f32(got[:, pos : pos + M]), want.transpose(1, 0, 2), rel=4e-3, what=name)
        others = np.delete(got, range(pos, pos + M), axis=1)
        assert (others == 0xFFFF).all(), f"{name}: a row of another position was written"


@pytest.mark.parametrize(("M", "V", "K", "R"), [(1, 1, 8, None), (4, 130, 264, 2), (8, 333, 264, 2), (16, 50, 2064, 2)])
def test_logits(dev: Any, rng: np.random.Generator, M: int, V: int, K: int, R: int | None) -> None:
    w, W = make_linear(dev, rng, V, K, fp8=False)
    g, gv = bf16_input(rng, K)
    h = rng.standard_normal((M, K)).astype(np.float32)
    out = dev.empty((M, V), F32)
    out.fill(POISON)
    BF16_ROWS.logits(dev, out, dev.array(h), dev.array(g), w, EPS, workspace(dev, M, V), R=R)
    n = rmsnorm(h, gv, EPS)
    assert_sums_close(out.download(), n @ W.T, np.abs(n) @ np.abs(W).T, what="logits", bits=16)  # x in two parts


def test_the_same_logits_as_for_one_token(dev: Any, rng: np.random.Generator) -> None:
    """x is as exact as it is for one token: what speculation verifies is what decode would have said."""
    M, V, K = 6, 70, 528
    w, _ = make_linear(dev, rng, V, K, fp8=False)
    h, g = dev.array(rng.standard_normal((M, K)).astype(np.float32)), dev.array(bf16_input(rng, K)[0])
    together, one = dev.empty((M, V), F32), dev.empty((V,), F32)
    BF16_ROWS.logits(dev, together, h, g, w, EPS, workspace(dev, M, V))
    for m in range(M):
        GEMV.logits(dev, one, h.view((K,), m * K), g, w, EPS)
        assert_close(together.download()[m], one.download().astype(np.float64), rel=2e-5, what=f"row {m}")


@KINDS
def test_a_chain_shares_one_workspace(dev: Any, rng: np.random.Generator, rows: Any) -> None:
    """Dependent launches without a wait between them: the splits' counters are back at zero for the next."""
    M, N, K = 7, 20, 8208
    (a, A), (b, B) = (make_linear(dev, rng, N, K, rows.fp8) for _ in range(2))
    x, X = bf16_input(rng, M, K)
    h, inp, ws = dev.zeros((M, N), F32), dev.array(x), workspace(dev, M, N)
    for w in (a, b, a):
        rows.add(dev, h, inp, w, ws, pdl=True, R=2)
    assert_close(h.download(), X @ (2 * A + B).T, rel=2e-5, what="h")


def test_preconditions_are_checked(dev: Any, rng: np.random.Generator) -> None:
    w, _ = make_linear(dev, rng, 4, 24, fp8=False)
    ws = workspace(dev, 1, 1)
    with pytest.raises(QwenRawError, match="1 to 16"):
        BF16_ROWS.add(dev, dev.zeros((17, 4), F32), dev.zeros((17, 24), BF16), w, ws)
    with pytest.raises(QwenRawError, match="expected"):
        BF16_ROWS.add(dev, dev.zeros((2, 4), F32), dev.zeros((2, 16), BF16), w, ws)
    with pytest.raises(QwenRawError, match="this kernel takes"):
        FP8_ROWS.add(dev, dev.zeros((2, 4), F32), dev.zeros((2, 24), BF16), w, ws)
    long, _ = make_linear(dev, rng, 4, 16400, fp8=True)
    small = RowsWorkspace(dev.zeros((16,), F32), ws.counters)
    with pytest.raises(QwenRawError, match="a workspace of 16 floats"):
        h, g = dev.zeros((9, 16400), F32), dev.zeros((16400,), BF16)
        FP8_ROWS.swiglu(dev, dev.zeros((9, 4), BF16), h, g, long, long, EPS, small)
