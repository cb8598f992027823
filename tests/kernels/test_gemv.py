"""gemv_bf16.cu and gemv_fp8.cu against float64: every kernel, both weight types, odd sizes, several grids."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_reference import (
    POISON,
    assert_close,
    assert_sums_close,
    bf16_input,
    make_linear,
    rmsnorm,
    rotate,
    silu,
)

from loaders.dtypes import bf16_to_f32, f32_to_bf16, f32_to_e4m3
from qwen_raw.device import BF16, F32, I32
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.gemv_bf16 import GEMV as BF16_GEMV
from qwen_raw.kernels.gemv_fp8 import GEMV as FP8_GEMV
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.sample import Sampler, sample

GEMVS = pytest.mark.parametrize("gemv", [BF16_GEMV, FP8_GEMV], ids=["bf16", "fp8"])
# (N, K): multiples of nothing, a tail of every unrolled round, one row, rows past one block.
SHAPES = [(1, 16), (37, 272), (64, 1024), (129, 2064), (18, 528)]
EPS = 1e-6


def rounded(gemv: Any) -> float:
    """What a normed product may be off by: a bf16 result's half ulp, and with e4m3 weights that of f16 operands."""
    return 5e-3 if gemv.fp8 else 4e-3


def assert_act_close(act: Any, G: Any, U: Any, n: Any, gemv: Any, rough: float = 0.0) -> None:
    """act bf16 [I] = silu(G·n)·(U·n), with what f16 operands put into the sums, which cancellation may leave small."""
    gate, up = G @ n, U @ n
    d_gate, d_up = (2.0**-11 * gemv.fp8 * (np.abs(W) @ np.abs(n)) for W in (G, U))
    slack = 1.1 * d_gate * np.abs(up) + np.abs(silu(gate)) * d_up + d_gate * d_up
    got, want = bf16_to_f32(act.download()).astype(np.float64), silu(gate) * up
    limit = (4e-3 + rough) * np.abs(want).max() + slack
    assert (np.abs(got - want) <= limit).all(), (
        f"act is off by {np.max(np.abs(got - want) / limit):.1f} times the limit"
    )


@GEMVS
@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("grid", [None, 1, 3])
def test_add(dev: Any, rng: np.random.Generator, gemv: Any, N: int, K: int, grid: int | None) -> None:
    w, W = make_linear(dev, rng, N, K, gemv.fp8)
    x, X = bf16_input(rng, K)
    h = rng.standard_normal(N).astype(np.float32)
    buffer = dev.array(h)
    gemv.add(dev, buffer, dev.array(x), w, grid=grid)
    assert_sums_close(buffer.download(), h + W @ X, np.abs(h) + np.abs(W) @ np.abs(X), what="h")


@GEMVS
@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize("grid", [None, 3])
def test_store(dev: Any, rng: np.random.Generator, gemv: Any, N: int, K: int, grid: int | None) -> None:
    w, W = make_linear(dev, rng, N, K, gemv.fp8)
    x, X = bf16_input(rng, K)
    y = dev.empty((N,), BF16)
    y.fill(POISON)
    gemv.store(dev, y, dev.array(x), w, grid=grid)
    assert_close(bf16_to_f32(y.download()), W @ X, rel=4e-3, what="y")


@GEMVS
def test_inputs_of_every_magnitude(dev: Any, rng: np.random.Generator, gemv: Any) -> None:
    """Plain inputs from 2^-24 to 2^19. As f16 operands they are exact from 2^-13 up, and off by 2^-21 at most below."""
    N, K = 37, 1040
    w, W = make_linear(dev, rng, N, K, gemv.fp8)
    bits = f32_to_bf16((rng.standard_normal(K) * 2.0 ** rng.integers(-24, 18, K)).astype(np.float32))
    X = bf16_to_f32(bits).astype(np.float64)
    for part in (np.abs(X) < 2.0**-13, np.abs(X) < 1, np.abs(X) >= 1):
        some, buffer = np.where(part, bits, 0).astype(np.uint16), dev.zeros((N,), F32)
        gemv.add(dev, buffer, dev.array(some), w)
        terms = np.abs(W) @ np.abs(np.where(part, X, 0))
        rounded = 2.0**-21 * np.abs(W) @ (part & (np.abs(X) < 2.0**-13)) if gemv.fp8 else 0.0
        assert_sums_close(buffer.download(), W @ np.where(part, X, 0), terms + 2.0**20 * rounded, what="h")


@GEMVS
@pytest.mark.parametrize("scale", [2e-4, 300.0, 3e4])
def test_residual_streams_of_every_magnitude(dev: Any, rng: np.random.Generator, gemv: Any, scale: float) -> None:
    """RMSNorm's scalar comes after the sums: what is multiplied is as large or small as the residual stream."""
    I, K = 19, 528  # noqa: E741
    (gate, G), (up, U) = make_linear(dev, rng, I, K, gemv.fp8), make_linear(dev, rng, I, K, gemv.fp8)
    g, gv = bf16_input(rng, K)
    h = (rng.standard_normal(K) * scale).astype(np.float32)
    act = dev.empty((I,), BF16)
    act.fill(POISON)
    gemv.swiglu(dev, act, dev.array(h), dev.array(g), gate, up, 1e-12)
    n = rmsnorm(h, gv, 1e-12)
    rough = 8e-3 if gemv.fp8 and scale < 1e-3 else 0.0  # where f16 operands have as few bits as bf16
    assert_act_close(act, G, U, n, gemv, rough)


@GEMVS
@pytest.mark.parametrize(("I", "K"), SHAPES)
def test_swiglu(dev: Any, rng: np.random.Generator, gemv: Any, I: int, K: int) -> None:  # noqa: E741
    (gate, G), (up, U) = make_linear(dev, rng, I, K, gemv.fp8), make_linear(dev, rng, I, K, gemv.fp8)
    g, gv = bf16_input(rng, K)
    h = (rng.standard_normal(K) * 3).astype(np.float32)
    act = dev.empty((I,), BF16)
    act.fill(POISON)
    gemv.swiglu(dev, act, dev.array(h), dev.array(g), gate, up, EPS)
    n = rmsnorm(h, gv, EPS)
    assert_act_close(act, G, U, n, gemv)


@GEMVS
def test_normed_inputs_keep_eleven_bits(dev: Any, rng: np.random.Generator, gemv: Any) -> None:
    """Integers of 11 bits whose sum nearly cancels: rounded to bf16 they would be off by a good part of it."""
    N, K, HD = 6, 528, 2  # Q, K and V of one head: V is not rotated
    h = np.sort(rng.integers(1024, 2048, K)).astype(np.float32) * rng.choice([-1, 1], K)
    signs = np.sign(h) * np.where(np.arange(K) % 2, 1, -1)
    order = rng.permutation(K)
    h, signs = h[order], np.tile(signs[order], (N, 1))
    if gemv.fp8:
        w = Linear(dev.array(f32_to_e4m3(signs.astype(np.float32))), dev.array(np.ones(N, np.float32)))
    else:
        w = Linear(dev.array(f32_to_bf16(signs.astype(np.float32))))
    q, caches = dev.empty((1, HD), BF16), [dev.zeros((1, 4, HD), BF16) for _ in range(2)]
    tables = (dev.zeros((N,), F32), dev.zeros((4, HD // 2, 2), F32), dev.zeros((1,), I32))
    hg = dev.array(h.astype(np.float32)), dev.array(np.full(K, 0x3F80, np.uint16))
    gemv.qkv(dev, q, *caches, *hg, w, *tables, EPS)
    want = signs[:HD] @ rmsnorm(h, np.ones(K), EPS)
    assert_close(bf16_to_f32(caches[1].download())[0, 0], want, rel=rounded(gemv), what="v")


@GEMVS
def test_long_rows_have_two_packs_a_thread(dev: Any, rng: np.random.Generator, gemv: Any) -> None:
    """Normed rows past the largest block with one pack: their last packs belong to few threads."""
    I, K = 3, 8208 if gemv.fp8 else 3600  # noqa: E741
    assert gemv.variants.choose("swiglu", K)[0] == "c2"
    (gate, G), (up, U) = make_linear(dev, rng, I, K, gemv.fp8), make_linear(dev, rng, I, K, gemv.fp8)
    g, gv = bf16_input(rng, K)
    h = rng.standard_normal(K).astype(np.float32)
    act = dev.empty((I,), BF16)
    act.fill(POISON)
    gemv.swiglu(dev, act, dev.array(h), dev.array(g), gate, up, EPS, grid=2)
    n = rmsnorm(h, gv, EPS)
    assert_act_close(act, G, U, n, gemv)


@GEMVS
@pytest.mark.parametrize(("H", "KV", "HD"), [(4, 2, 64), (7, 1, 64), (3, 3, 128)])
@pytest.mark.parametrize("pos", [0, 5, 31])
def test_qkv(dev: Any, rng: np.random.Generator, gemv: Any, H: int, KV: int, HD: int, pos: int) -> None:
    K, max_len = 208, 32
    w, W = make_linear(dev, rng, (H + 2 * KV) * HD, K, gemv.fp8)
    bias = (rng.standard_normal(w.N) * 10).astype(np.float32)  # large: a bias applied after the rotation cannot pass
    g, gv = bf16_input(rng, K)
    h = rng.standard_normal(K).astype(np.float32)
    angle = rng.uniform(0, 6, (max_len, HD // 2))
    rope = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    q, caches = dev.empty((H, HD), BF16), [dev.empty((KV, max_len, HD), BF16) for _ in range(2)]
    for buffer in (q, *caches):
        buffer.fill(POISON)
    position = dev.array(np.array([pos], np.int32))
    gemv.qkv(dev, q, *caches, dev.array(h), dev.array(g), w, dev.array(bias), dev.array(rope), position, EPS)

    y = (W @ rmsnorm(h, gv, EPS) + bias).reshape(H + 2 * KV, HD)
    half = HD // 2
    cos, sin = rope[pos, :, 0].astype(np.float64), rope[pos, :, 1].astype(np.float64)
    turned = y.copy()
    turned[:, :half], turned[:, half:] = rotate(y[:, :half], y[:, half:], cos, sin)
    assert_close(bf16_to_f32(q.download()), turned[:H], rel=rounded(gemv), what="q")
    for buffer, want, name in ((caches[0], turned[H : H + KV], "k"), (caches[1], y[H + KV :], "v")):
        got = buffer.download()
        assert_close(bf16_to_f32(got[:, pos]), want, rel=rounded(gemv), what=name)
        others = np.delete(got, pos, axis=1)
        assert (others == 0xFFFF).all(), f"{name}: a row of another position was written"


@pytest.mark.parametrize(("V", "K"), [(1, 8), (4160, 24), (333, 264)])
def test_logits(dev: Any, rng: np.random.Generator, V: int, K: int) -> None:
    w, W = make_linear(dev, rng, V, K, fp8=False)
    g, gv = bf16_input(rng, K)
    h = rng.standard_normal(K).astype(np.float32)
    out = dev.empty((V,), F32)
    out.fill(POISON)
    BF16_GEMV.logits(dev, out, dev.array(h), dev.array(g), w, EPS)
    n = rmsnorm(h, gv, EPS)
    assert_sums_close(out.download(), W @ n, np.abs(W) @ np.abs(n), what="logits")


@pytest.mark.parametrize(("V", "text", "grid"), [(1, 1, None), (333, 300, 3), (4160, 4096, None)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_choose(dev: Any, rng: np.random.Generator, V: int, text: int, grid: int | None, temperature: float) -> None:
    """The LM head that chooses: logits as without, and the state, id and hash that `sample` makes of them."""
    w, W = make_linear(dev, rng, V, 264, fp8=False)
    g, gv = bf16_input(rng, 264)
    h = rng.standard_normal(264).astype(np.float32)
    fused, plain = Sampler.create(dev, V), Sampler.create(dev, V)
    out = dev.empty((V,), F32)
    for step, pos in enumerate((7, 8, 40)):
        for s in (fused, plain):
            s.set_params(temperature, 99, text)
            s.set_position(1, pos)
        out.fill(POISON)
        BF16_GEMV.choose(dev, out, dev.array(h + np.float32(step)), dev.array(g), w, EPS, fused, grid=grid)
        n = rmsnorm(h + np.float32(step), gv, EPS)
        assert_sums_close(out.download(), W @ n, np.abs(W) @ np.abs(n), what="logits")
        sample(dev, out, plain)
        assert (fused.state.download() == plain.state.download()).all()
        assert (fused.ring.words[2 * step : 2 * step + 2] == plain.ring.words[2 * step : 2 * step + 2]).all()


def test_choose_takes_two_launches_where_its_scratch_is_small(dev: Any, rng: np.random.Generator) -> None:
    w, _ = make_linear(dev, rng, 64, 16, fp8=False)
    s = Sampler.create(dev, 64)
    s.set_params(0.0, 0, 64)
    s.set_position(1, 0)
    out, blocks = dev.empty((64,), F32), s.best.shape[0]
    few = replace(s, best=s.best.view((1, 2)), blocks=1)
    assert blocks > 1
    s.best.fill(POISON)
    BF16_GEMV.choose(dev, out, dev.array(np.ones(16, np.float32)), dev.array(np.ones(16, np.uint16)), w, EPS, few)
    assert int(s.state.download()[0]) == int(out.download().argmax())
    assert (s.best.download()[1:] == 2**64 - 1).all(), "scratch beyond what was given was written"


def test_short_rows_have_more_blocks(dev: Any) -> None:
    """As many as leave each block twice the rows that it keeps in flight; two where rows are long or few."""
    n = 16 * dev.sm_count
    most = [BF16_GEMV.most_blocks(dev, 128, 1, rows) for rows in (n, 5 * n, 100 * n)]
    assert most == [2, 5, 8]
    assert BF16_GEMV.most_blocks(dev, 448, 1, 100 * n) == 2
    assert BF16_GEMV.most_blocks(dev, 128, 2, 2 * n) == 4, "two packs a row: half as many rows in flight"
    assert replace(BF16_GEMV, blocks_per_sm=1).most_blocks(dev, 128, 1, 100 * n) == 1


@GEMVS
def test_more_rows_than_one_wave_has_memory_for(dev: Any, rng: np.random.Generator, gemv: Any) -> None:
    """A vocabulary on a small GPU: the launcher takes several waves of blocks."""
    N, K = dev.sm_count * dev.smem_per_block // 4 // 3 + 5, 16  # a warp's sum and two constants a row
    w, W = make_linear(dev, rng, N, K, gemv.fp8)
    x, X = bf16_input(rng, K)
    buffer = dev.zeros((N,), F32)
    gemv.add(dev, buffer, dev.array(x), w)
    assert_close(buffer.download(), W @ X, rel=2e-5, what="h")
    with pytest.raises(QwenRawError, match="bytes of shared memory each"):
        gemv.add(dev, buffer, dev.array(x), w, grid=1)


def test_preconditions_are_checked(dev: Any) -> None:
    h, x = dev.zeros((4,), F32), dev.zeros((24,), BF16)
    with pytest.raises(QwenRawError, match="multiple of 8"):
        BF16_GEMV.add(dev, h, dev.zeros((20,), BF16), Linear(dev.zeros((4, 20), BF16)))
    with pytest.raises(QwenRawError, match="expected"):
        BF16_GEMV.add(dev, h, x, Linear(dev.zeros((4, 16), BF16)))
    with pytest.raises(QwenRawError, match="this kernel takes"):
        FP8_GEMV.add(dev, h, x, Linear(dev.zeros((4, 24), BF16)))
    whole = dev.zeros((4, 28), BF16)
    with pytest.raises(QwenRawError, match="16-byte aligned"):
        BF16_GEMV.add(dev, h, x, Linear(whole.view((4, 24), 4)))
