"""gemv_each_bf16.cu and gemv_each_fp8.cu: rows of a pass have, bit for bit, what the one-token kernels give each."""

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, bf16_input, make_linear

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16, F32
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels import gemv_each
from qwen_raw.kernels.attn_decode import Split, Workspace, attn_decode, attn_decode_each
from qwen_raw.kernels.gemv_each import GemvEach
from qwen_raw.kernels.gemv_each_bf16 import GEMV_EACH as EACH_BF16
from qwen_raw.kernels.gemv_each_fp8 import GEMV_EACH as EACH_FP8

KINDS = pytest.mark.parametrize("each", [EACH_BF16, EACH_FP8], ids=["bf16", "fp8"])
EPS = 1e-6
# (M, N, K): a weight pack; tails in every dimension; fewer rows than are in flight, and more; every variant.
PLAIN = [(1, 1, 16), (3, 37, 272), (8, 70, 1040), (16, 9, 2064), (5, 18, 4112), (2, 5, 8208), (7, 11, 19440)]
NORMED = [(1, 2, 16), (3, 37, 272), (8, 70, 1040), (16, 9, 2064), (5, 18, 3600), (6, 7, 4112)]


@pytest.fixture(params=["together", "apart"])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of the pass in a block, where they fit, or few: then the grid has groups of them."""
    if request.param == "apart":
        monkeypatch.setattr(gemv_each, "MOST_INPUT", 9 << 10)
        monkeypatch.setattr(gemv_each, "CHUNK", 8)


def bits(buffer: Any) -> np.ndarray[Any, Any]:
    got = buffer.download()
    return got.view(np.uint32 if got.dtype.itemsize == 4 else np.uint16)


@KINDS
@pytest.mark.parametrize(("M", "N", "K"), PLAIN)
def test_add_and_store(dev: Any, rng: np.random.Generator, each: GemvEach, most: None, M: int, N: int, K: int) -> None:
    w, _ = make_linear(dev, rng, N, K, each.gemv.fp8)
    x = dev.array(bf16_input(rng, M, K)[0])
    start = rng.standard_normal((M, N)).astype(np.float32)
    h, y = dev.array(start), dev.empty((M, N), BF16)
    y.fill(POISON)
    each.add(dev, h, x, w)
    each.store(dev, y, x, w)
    for m in range(M):
        row = x.view((K,), m * K)
        one_h, one_y = dev.array(start[m]), dev.empty((N,), BF16)
        each.gemv.add(dev, one_h, row, w)
        each.gemv.store(dev, one_y, row, w)
        assert (bits(h)[m] == bits(one_h)).all() and (bits(y)[m] == bits(one_y)).all(), f"row {m}"


@KINDS
@pytest.mark.parametrize(("M", "N", "K"), NORMED)
def test_swiglu(dev: Any, rng: np.random.Generator, each: GemvEach, most: None, M: int, N: int, K: int) -> None:
    (gate, _), (up, _) = (make_linear(dev, rng, N, K, each.gemv.fp8) for _ in range(2))
    g = dev.array(bf16_input(rng, K)[0])
    h = dev.array((rng.standard_normal((M, K)) * 3).astype(np.float32))
    act, one = dev.empty((M, N), BF16), dev.empty((N,), BF16)
    act.fill(POISON)
    each.swiglu(dev, act, h, g, gate, up, EPS)
    for m in range(M):
        each.gemv.swiglu(dev, one, h.view((K,), m * K), g, gate, up, EPS)
        assert (bits(act)[m] == bits(one)).all(), f"row {m}"
    assert np.isfinite(bf16_to_f32(act.download())).all()


def test_long_rows_of_e4m3(dev: Any, rng: np.random.Generator) -> None:
    """Two packs a thread with normed inputs, which no bf16 row is long enough for."""
    assert EACH_FP8.gemv.variants.choose("swiglu", 8208)[0] == "c2"
    test_swiglu(dev, rng, EACH_FP8, None, 3, 2, 8208)


@pytest.mark.parametrize(("M", "V", "K"), NORMED)
def test_logits(dev: Any, rng: np.random.Generator, most: None, M: int, V: int, K: int) -> None:
    w, _ = make_linear(dev, rng, V, K, fp8=False)
    g = dev.array(bf16_input(rng, K)[0])
    h = dev.array(rng.standard_normal((M, K)).astype(np.float32))
    out, one = dev.empty((M, V), F32), dev.empty((V,), F32)
    out.fill(POISON)
    EACH_BF16.logits(dev, out, h, g, w, EPS)
    for m in range(M):
        EACH_BF16.gemv.logits(dev, one, h.view((K,), m * K), g, w, EPS)
        assert (bits(out)[m] == bits(one)).all(), f"row {m}"


@KINDS
@pytest.mark.parametrize(
    ("M", "H", "KV", "HD", "pos", "K"), [(5, 7, 1, 64, 5, 208), (16, 3, 3, 128, 16, 208), (8, 2, 2, 8, 1, 4112)]
)
def test_qkv(
    dev: Any, rng: np.random.Generator, each: GemvEach, M: int, H: int, KV: int, HD: int, pos: int, K: int
) -> None:
    max_len, half = 40, HD // 2
    w, _ = make_linear(dev, rng, (H + 2 * KV) * HD, K, each.gemv.fp8)
    bias = dev.array(rng.standard_normal(w.N).astype(np.float32))
    angle = rng.uniform(0, 6, (max_len, half))
    rope = dev.array(np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32))
    g, h = dev.array(bf16_input(rng, K)[0]), dev.array(rng.standard_normal((M, K)).astype(np.float32))
    q, one = dev.empty((M, H, HD), BF16), dev.empty((H, HD), BF16)
    caches, wanted = ([dev.empty((KV, max_len, HD), BF16) for _ in range(2)] for _ in range(2))
    for buffer in (q, *caches, *wanted):
        buffer.fill(POISON)
    each.qkv(dev, q, *caches, h, g, w, bias, rope, dev.array(np.array([pos], np.int32)), EPS)
    for m in range(M):
        at = dev.array(np.array([pos + m], np.int32))
        each.gemv.qkv(dev, one, *wanted, h.view((K,), m * K), g, w, bias, rope, at, EPS)
        assert (bits(q)[m] == bits(one)).all(), f"row {m}"
    for cache, want in zip(caches, wanted, strict=True):
        assert (bits(cache) == bits(want)).all()
        assert (np.delete(cache.download(), range(pos, pos + M), axis=1) == 0xFFFF).all()


@pytest.mark.parametrize("split", [None, Split(0, 3, 7), Split(1, 2, 7, 2, 7)], ids=["chosen", "blocks", "clusters"])
@pytest.mark.parametrize(("M", "H", "KV", "HD", "pos"), [(1, 2, 2, 64, 0), (5, 7, 1, 64, 126), (8, 6, 2, 128, 509)])
def test_attention(
    dev: Any, rng: np.random.Generator, split: Split | None, M: int, H: int, KV: int, HD: int, pos: int
) -> None:
    """Lengths on both sides of those at which a tile gets another block: each token has the split of its own."""
    max_len = 520
    k, v = (dev.array(bf16_input(rng, KV, max_len, HD)[0]) for _ in range(2))
    q = dev.array(bf16_input(rng, M, H, HD)[0])
    one_ws = Workspace.create(dev, H, KV, HD, max_len, split=split)
    ws = Workspace.create(dev, H, KV, HD, max_len, split=one_ws.split, each=M)
    out, one = dev.empty((M, H, HD), BF16), dev.empty((H, HD), BF16)
    for _ in range(2):  # what a launch leaves in the workspace is what the next one needs
        out.fill(POISON)
        attn_decode_each(dev, out, q, k, v, dev.array(np.array([pos], np.int32)), ws)
        for m in range(M):
            at = dev.array(np.array([pos + m], np.int32))
            attn_decode(dev, one, q.view((H, HD), m * H * HD), k, v, at, one_ws)
            assert (bits(out)[m] == bits(one)).all(), f"row {m}"


def test_preconditions_are_checked(dev: Any, rng: np.random.Generator) -> None:
    w, _ = make_linear(dev, rng, 4, 24, fp8=False)
    with pytest.raises(QwenRawError, match="1 to 16"):
        EACH_BF16.add(dev, dev.zeros((17, 4), F32), dev.zeros((17, 24), BF16), w)
    with pytest.raises(QwenRawError, match="expected"):
        EACH_BF16.add(dev, dev.zeros((2, 4), F32), dev.zeros((2, 16), BF16), w)
    with pytest.raises(QwenRawError, match="this kernel takes"):
        EACH_FP8.add(dev, dev.zeros((2, 4), F32), dev.zeros((2, 24), BF16), w)
    with pytest.raises(QwenRawError, match="at most 8"):
        ws = Workspace.create(dev, 9, 1, 64, 64, each=2)
        attn_decode_each(
            dev,
            *(dev.zeros((2, 9, 64), BF16) for _ in range(2)),
            *(dev.zeros((1, 64, 64), BF16) for _ in range(2)),
            dev.zeros((1,), np.dtype(np.int32)),
            ws,
        )
