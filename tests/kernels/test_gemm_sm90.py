"""gemm_bf16_sm90.cu and gemm_fp8_sm90.cu against float64: every operation in every variant, tiles whole and cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, assert_close, bf16_input, make_linear, rotate, silu

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, quantize_rows_e4m3
from qwen_raw.device import BF16, E4M3, F32
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels import gemm_bf16_sm90, gemm_fp8_sm90
from qwen_raw.kernels.gemm_sm90 import (
    ARCH,
    CUTS,
    DEALT,
    OPERATIONS,
    VARIANTS,
    Choice,
    GemmSm90,
    Tokens,
    choose,
    most_pieces,
)
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.synthetic import synthetic_bf16, synthetic_e4m3

E4M3_CUT = 2.0**-9  # of the largest result: an e4m3 tensor core keeps about 14 bits of a sum (docs/prefill.md)


@pytest.fixture(params=["bf16", "fp8"])
def gemm(request: pytest.FixtureRequest, dev: Any) -> Iterator[GemmSm90]:
    if dev.kind == "cuda" and dev.arch != ARCH:
        pytest.skip(f"{dev.name} is no Hopper GPU")
    yield (gemm_fp8_sm90 if request.param == "fp8" else gemm_bf16_sm90).create(dev)


def tolerance(gemm: GemmSm90, dev: Any, rel: float) -> float:
    return rel + (E4M3_CUT if gemm.fp8 and dev.kind == "cuda" else 0.0)


def tokens(dev: Any, rng: np.random.Generator, T: int, K: int, fp8: bool) -> tuple[Tokens, np.ndarray[Any, Any]]:
    """Random rows on the device, and their exact values."""
    if not fp8:
        bits, values = bf16_input(rng, T, K)
        return Tokens(dev.array(bits)), values
    q, scale = quantize_rows_e4m3((rng.standard_normal((T, K)) * rng.uniform(0.1, 9, (T, 1))).astype(np.float32))
    values = e4m3_to_f32(q).astype(np.float64) * scale[:, None].astype(np.float64)
    return Tokens(dev.array(q), dev.array(scale.astype(np.float32))), values


def cases(op: str) -> list[Any]:
    """Every variant of an operation; each with whole tiles, and with all of them cut along K."""
    return [
        pytest.param(name, split, id=f"{name}-{split}")
        for name in OPERATIONS[op]
        for split in ((1, 99) if VARIANTS[name].cluster else CUTS)
    ]


def sizes(name: str, tokens: int | None = None) -> int:
    """Tokens: two tiles of a many-token variant with a tail, or one tile less three."""
    v = VARIANTS[name]
    return tokens or (v.BN - 3 if v.few else 133)


N = 440  # 8 short of whole tiles of most widths


def depth(name: str) -> int:
    """K with a tail within a slice, of four slices at least where clusters cut tiles in as many."""
    return 272 if VARIANTS[name].cluster else 400


@pytest.mark.parametrize(("name", "split"), cases("add"))
def test_add(dev: Any, rng: np.random.Generator, gemm: GemmSm90, name: str, split: int) -> None:
    T, K = sizes(name), depth(name)
    w, W = make_linear(dev, rng, N, K, gemm.fp8)
    x, X = tokens(dev, rng, T, K, gemm.fp8)
    h = rng.standard_normal((T, N)).astype(np.float32)
    for _ in range(2):  # the second launch finds what the first has left in the workspace
        buffer = dev.array(h)
        gemm.add(dev, buffer, x, w, Choice(VARIANTS[name], split))
        assert_close(buffer.download(), h + X @ W.T, rel=tolerance(gemm, dev, 2e-5), what="h")


@pytest.mark.parametrize(("name", "split"), cases("store"))
def test_store(dev: Any, rng: np.random.Generator, gemm: GemmSm90, name: str, split: int) -> None:
    T, K = sizes(name), depth(name)
    w, W = make_linear(dev, rng, N, K, gemm.fp8)
    x, X = tokens(dev, rng, T, K, gemm.fp8)
    c = dev.empty((T, N), BF16)
    c.fill(POISON)
    gemm.store(dev, c, x, w, Choice(VARIANTS[name], split))
    assert_close(bf16_to_f32(c.download()), X @ W.T, rel=tolerance(gemm, dev, 4e-3), what="c")


def make_pair(dev: Any, rng: np.random.Generator, rows: int, columns: int, fp8: bool) -> tuple[Any, Any, Any]:
    """(gate, up) in one allocation, and their exact values."""
    both, W = make_linear(dev, rng, 2 * rows, columns, fp8)
    parts = [
        Linear(
            both.weight.view((rows, columns), i * rows * columns),
            None if both.scale is None else both.scale.view((rows,), i * rows),
        )
        for i in range(2)
    ]
    return parts, W[:rows], W[rows:]


@pytest.mark.parametrize("name", DEALT)
@pytest.mark.parametrize("part", [133, 128, 64])
def test_rows_are_dealt_out(dev: Any, rng: np.random.Generator, gemm: GemmSm90, name: str, part: int) -> None:
    """The bits of `store`, in as many places as there are parts."""
    T, K = 133, depth(name)
    w, _ = make_linear(dev, rng, N, K, gemm.fp8)
    x, _ = tokens(dev, rng, T, K, gemm.fp8)
    whole = dev.empty((T, N), BF16)
    gemm.store(dev, whole, x, w, Choice(VARIANTS[name], 99))
    parts = [dev.empty((min(part, T - first) + 1, N), BF16) for first in range(0, T, part)]
    for buffer in parts:
        buffer.fill(POISON)
    gemm.push(dev, [b.view((b.shape[0] - 1, N)) for b in parts], x, w, Choice(VARIANTS[name], 99))
    found = [buffer.download() for buffer in parts]
    np.testing.assert_array_equal(np.concatenate([rows[:-1] for rows in found]), whole.download())
    assert all((rows[-1].view(np.uint8) == POISON).all() for rows in found), "stored beyond a part's rows"


@pytest.mark.parametrize(("name", "split"), cases("swiglu"))
def test_swiglu(dev: Any, rng: np.random.Generator, gemm: GemmSm90, name: str, split: int) -> None:
    T, K, I = sizes(name), depth(name), 216  # noqa: E741
    (gate, up), G, U = make_pair(dev, rng, I, K, gemm.fp8)
    x, X = tokens(dev, rng, T, K, gemm.fp8)
    act = dev.empty((T, I), BF16)
    act.fill(POISON)
    gemm.swiglu(dev, act, x, gate, up, Choice(VARIANTS[name], split))
    want = silu(X @ G.T) * (X @ U.T)
    assert_close(bf16_to_f32(act.download()), want, rel=tolerance(gemm, dev, 4e-3), what="act")


@pytest.mark.parametrize(("name", "split"), cases("qkv"))
@pytest.mark.parametrize(("H", "KV", "HD"), [(4, 2, 64), (3, 1, 128), (7, 1, 128)])
def test_qkv(
    dev: Any, rng: np.random.Generator, gemm: GemmSm90, name: str, split: int, H: int, KV: int, HD: int
) -> None:
    if H == 7 and name != "many144":
        pytest.skip("nine heads: for eight tiles that share one")
    if VARIANTS[name].heads_of_128 and HD != 128:
        pytest.skip("tiles that are cut, or mix heads, are of heads of 128")
    T, pos0, half, columns = sizes(name), 3, HD // 2, 144 if VARIANTS[name].cluster else depth(name)
    max_len = T + 6
    w, W = make_linear(dev, rng, (H + 2 * KV) * HD, columns, gemm.fp8)
    x, X = tokens(dev, rng, T, columns, gemm.fp8)
    bias = (rng.standard_normal(w.N) * 10).astype(np.float32)
    angle = rng.uniform(0, 6, (max_len, half))
    rope = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    q, caches = dev.empty((T, H, HD), BF16), [dev.empty((KV, max_len, HD), BF16) for _ in range(2)]
    for buffer in (q, *caches):
        buffer.fill(POISON)
    choice = Choice(VARIANTS[name], split)
    span = dev.array(np.array([pos0, T - 2], np.int32))  # two rows of padding
    gemm.qkv(dev, q, *caches, x, w, dev.array(bias), dev.array(rope), span, choice)
    assert (q.download()[T - 2 :] == 0xFFFF).all(), "q: a row of padding was written"
    q, T, X = q.view((T - 2, H, HD)), T - 2, X[: T - 2]

    rel = tolerance(gemm, dev, 4e-3)
    y = (X @ W.T + bias).reshape(T, H + 2 * KV, HD)
    cos, sin = (rope[pos0 : pos0 + T, None, :, i].astype(np.float64) for i in range(2))
    turned = y.copy()
    turned[..., :half], turned[..., half:] = rotate(y[..., :half], y[..., half:], cos, sin)
    assert_close(bf16_to_f32(q.download()), turned[:, :H], rel=rel, what="q")
    for cache, want, what in ((caches[0], turned[:, H : H + KV], "k"), (caches[1], y[:, H + KV :], "v")):
        got = cache.download()
        assert_close(bf16_to_f32(got[:, pos0 : pos0 + T]), want.transpose(1, 0, 2), rel=rel, what=what)
        outside = np.delete(got, range(pos0, pos0 + T), axis=1)
        assert (outside == 0xFFFF).all(), f"{what}: a row of another position was written"


@pytest.mark.parametrize("T", [1, 16, 17, 64, 65, 128, 200, 256, 257, 300])
def test_any_number_of_tokens(dev: Any, rng: np.random.Generator, gemm: GemmSm90, T: int) -> None:
    """With the variant and the cut that are chosen for it."""
    w, W = make_linear(dev, rng, 136, 80, gemm.fp8)
    x, X = tokens(dev, rng, T, 80, gemm.fp8)
    h = dev.zeros((T, 136), F32)
    gemm.add(dev, h, x, w)
    assert_close(h.download(), X @ W.T, rel=tolerance(gemm, dev, 2e-5), what="h")


def test_pieces_of_every_size(dev: Any, rng: np.random.Generator, gemm: GemmSm90) -> None:
    """From a tile for many blocks to many tiles for a block, some cut and some not; the same bits every time."""
    for rows, columns, T in ((128, 2048, 5), (1024, 80, 5), (1000, 400, 3)):
        w, W = make_linear(dev, rng, rows, columns, gemm.fp8)
        x, X = tokens(dev, rng, T, columns, gemm.fp8)
        results = []
        for pieces in (99, 99, 1, 2, 3):
            h = dev.zeros((T, rows), F32)
            gemm.add(dev, h, x, w, Choice(VARIANTS["few16"], pieces))
            results.append(h.download())
            what = f"{rows} × {columns}, {pieces} pieces"
            # Twice what larger products may be off by: the largest of few results is a smaller one.
            assert_close(results[-1], X @ W.T, rel=2 * tolerance(gemm, dev, 2e-5), what=what)
        np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("T", [128, 512, 2048])
def test_real_shapes_one_behind_the_other(dev: Any, gemm: GemmSm90, T: int) -> None:
    """7B's shapes on a GPU, many dependent launches: what is chosen gives what the plainest variant gives."""
    if dev.kind != "cuda":
        pytest.skip("large products: on a GPU only")
    D, I, H, KV, HD = 3584, 18944, 28, 4, 128  # noqa: E741
    plain = Choice(VARIANTS["many128"])
    x = dev.empty((T, D), E4M3 if gemm.fp8 else BF16)
    w = dev.empty((2 * I, D), E4M3 if gemm.fp8 else BF16)
    for seed, buffer in enumerate((x, w)):
        if gemm.fp8:
            synthetic_e4m3(dev, buffer, seed, 1)
        else:
            synthetic_bf16(dev, buffer, seed, 1, 1.0 - 0.98 * seed)
    ones = dev.array(np.full(2 * I, 1e-2, np.float32))
    tokens = Tokens(x, ones.view((T,)) if gemm.fp8 else None)

    def rows(first: int, n: int) -> Linear:
        return Linear(w.view((n, D), first * D), ones.view((n,), first) if gemm.fp8 else None)

    bias, rope = dev.zeros((2 * I,), F32), dev.array(np.ones((T, HD // 2, 2), np.float32))
    span = dev.array(np.array([0, T], np.int32))
    results = []
    for choice, launches in ((None, 40), (plain, 1)):
        h, act = dev.zeros((T, D), F32), dev.zeros((T, I), BF16)
        q, k, v = (dev.zeros(shape, BF16) for shape in ((T, H, HD), (KV, T, HD), (KV, T, HD)))
        for _ in range(launches):
            heads = rows(0, (H + 2 * KV) * HD)
            gemm.qkv(dev, q, k, v, tokens, heads, bias.view((heads.N,)), rope, span, choice)
            gemm.swiglu(dev, act, tokens, rows(0, I), rows(I, I), choice)
            gemm.add(dev, h, tokens, rows(0, D), choice)
        results.append([h.download() / launches, *(bf16_to_f32(b.download()) for b in (act, q, k, v))])
    for got, want, what in zip(*results, ("h", "act", "q", "k", "v"), strict=True):
        assert_close(got, want, rel=2e-2 if gemm.fp8 else 8e-3, what=what)


def test_most_pieces() -> None:
    assert [most_pieces(rest, 132, 56) for rest in (0, 1, 28, 66, 67, 131)] == [1, 16, 4, 2, 1, 1]


def test_choices_are_legal() -> None:
    """For the shapes of the known models: a variant that the operation has, and few-token variants wide enough."""
    for op, names in OPERATIONS.items():
        for T in (1, 16, 17, 64, 65, 128, 129, 256, 257, 384, 512, 1000, 2048):
            for rows, slices in ((1152, 14), (4608, 56), (37888, 56), (3584, 296), (29568, 128)):
                choice = choose(op, T, rows, slices, 132)
                assert choice.variant.name in names
                assert not choice.variant.few or choice.variant.BN >= T
    # What was fastest where it was measured.
    assert choose("add", 2048, 3584, 56, 132).variant.name == "many224"
    assert choose("add", 2048, 8192, 64, 132).variant.name == "many256"
    assert choose("add", 128, 3584, 296, 132) == Choice(VARIANTS["cut128"], 4)
    assert choose("add", 128, 8192, 116, 132) == Choice(VARIANTS["cut128"], 2)
    assert choose("qkv", 128, 4608, 56, 132) == Choice(VARIANTS["cut128"], 3)
    assert choose("qkv", 2048, 5120, 64, 132) == Choice(VARIANTS["many160"])
    assert choose("add", 512, 3584, 56, 132) == Choice(VARIANTS["many112"])
    assert choose("swiglu", 512, 37888, 56, 132) == Choice(VARIANTS["many192"])
    assert choose("swiglu", 2048, 29568, 128, 132) == Choice(VARIANTS["many224"])
    assert choose("qkv", 512, 4608, 56, 132) == Choice(VARIANTS["many144"])
    assert choose("qkv", 512, 5120, 128, 132) == Choice(VARIANTS["many160"])
    assert choose("swiglu", 128, 29568, 128, 132).variant.name == "many224"
    assert choose("qkv", 128, 4608, 56, 132, HD=64).variant.name == "many128"
    assert choose("swiglu", 2048, 37888, 56, 132).variant.name == "many256"
    assert choose("add", 16, 3584, 56, 132).variant.name == "few16"


def test_what_does_not_fit_is_refused(dev: Any, rng: np.random.Generator, gemm: GemmSm90) -> None:
    w, _ = make_linear(dev, rng, 136, 80, gemm.fp8)
    x, _ = tokens(dev, rng, 17, 80, gemm.fp8)
    h = dev.zeros((17, 136), F32)
    with pytest.raises(QwenRawError, match="does not have the variant few16"):
        gemm.add(dev, h, x, w, Choice(VARIANTS["few16"]))
    odd, _ = make_linear(dev, rng, 132, 80, gemm.fp8)
    with pytest.raises(QwenRawError, match="132 rows of weights are not a multiple of 8"):
        gemm.add(dev, dev.zeros((17, 132), F32), x, odd)
    (gate, up), _, _ = make_pair(dev, rng, 16, 80, gemm.fp8)
    with pytest.raises(QwenRawError, match="load both as one"):
        gemm.swiglu(dev, dev.zeros((17, 16), BF16), x, up, gate)
