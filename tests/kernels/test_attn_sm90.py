"""attn_prefill_sm90.cu against float64: lengths around its tiles, earlier keys, group sizes, several tiles a block.

And kv_widen.cu, which makes bf16 of an e4m3 cache for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, Array, assert_close, attention, bf16_input, fp8_cache

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_bf16
from qwen_raw.device import BF16, E4M3, U8
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.attention import prefill_attention, suits_sm90
from qwen_raw.kernels.attn_prefill_sm90 import ARCH, attn_prefill_sm90
from qwen_raw.kernels.gemm_sm90 import Tokens, exponent_row
from qwen_raw.kernels.kv_widen import kv_widen

REL = 8e-3  # P and the output are bf16
NAN = 0x7FC0


@pytest.fixture
def hopper(dev: Any) -> Any:
    """The simulator, or a Hopper GPU."""
    if dev.kind == "cuda" and dev.arch != ARCH:
        pytest.skip(f"{dev.name} is no Hopper GPU")
    return dev


def check(
    dev: Any,
    rng: np.random.Generator,
    H: int,
    KV: int,
    HD: int,
    T: int,
    pos0: int,
    *,
    padding: int = 5,
    scale: float = 2.0,
) -> None:
    """Rows of padding, and keys behind the last token, are NaN: nothing of either may be seen or written."""
    rows, max_len = T + padding, pos0 + T + padding
    q, Q = bf16_input(rng, rows, H, HD, scale=scale)
    (k, K), (v, V) = bf16_input(rng, KV, max_len, HD), bf16_input(rng, KV, max_len, HD)
    q[T:], k[:, pos0 + T :], v[:, pos0 + T :] = NAN, NAN, NAN
    out = dev.empty((rows, H, HD), BF16)
    out.fill(POISON)
    span = dev.array(np.array([pos0, T], np.int32))
    attn_prefill_sm90(dev, out, dev.array(q), dev.array(k), dev.array(v), span)
    got = out.download()
    tokens = range(T) if pos0 + T < 500 else sorted({0, T - 1, *rng.integers(0, T, 14).tolist()})
    want = np.array([[attention(Q[t, h], *seen(K, V, h * KV // H, pos0 + t)) for h in range(H)] for t in tokens])
    assert_close(bf16_to_f32(got[list(tokens)]), want, rel=REL, what=f"{T} tokens after {pos0}")
    assert (got[T:] == 0xFFFF).all(), "a row of padding was written"


def seen(K: Array, V: Array, kv: int, position: int) -> tuple[Array, Array]:
    return K[kv, : position + 1], V[kv, : position + 1]


@pytest.mark.parametrize("HD", [64, 128])
@pytest.mark.parametrize(
    ("T", "pos0"),
    [(1, 0), (1, 255), (15, 1), (63, 100), (64, 64), (65, 0), (127, 1), (128, 0), (128, 128), (129, 127), (17, 300)],
)
def test_lengths(hopper: Any, rng: np.random.Generator, HD: int, T: int, pos0: int) -> None:
    """Around a tile's tokens and a stretch's keys, with no earlier keys and with some."""
    check(hopper, rng, 2, 1, HD, T, pos0)


@pytest.mark.parametrize("HD", [64, 128])
@pytest.mark.parametrize("G", range(1, 9))
def test_groups(hopper: Any, rng: np.random.Generator, HD: int, G: int) -> None:
    """Every head reads its KV head's cache."""
    check(hopper, rng, 2 * G, 2, HD, 9, 124)


@pytest.mark.parametrize("HD", [64, 128])
def test_several_tiles_a_block(hopper: Any, rng: np.random.Generator, HD: int) -> None:
    """In the simulator, 15 tiles of up to four stretches for four blocks: there, back, there and back."""
    check(hopper, rng, 5, 1, HD, 260, 130)


@pytest.mark.parametrize("HD", [64, 128])
def test_peaked_scores(hopper: Any, rng: np.random.Generator, HD: int) -> None:
    """Scores of hundreds: one key takes all, and the maximum keeps the exponentials finite."""
    check(hopper, rng, 2, 2, HD, 40, 150, scale=60.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "KV", "HD"), [(28, 4, 128), (14, 2, 64), (8, 1, 128)])
def test_long_on_a_gpu(cuda_device: Any, rng: np.random.Generator, H: int, KV: int, HD: int) -> None:
    """Whole chunks of a long prompt."""
    if cuda_device.arch != ARCH:
        pytest.skip(f"{cuda_device.name} is no Hopper GPU")
    for T, pos0 in ((1000, 0), (2048, 2048), (77, 6000)):
        check(cuda_device, rng, H, KV, HD, T, pos0)


def test_one_launch_serves_every_length(hopper: Any, rng: np.random.Generator) -> None:
    """A captured launch reads the span when it runs."""
    dev, rows, H, HD, max_len = hopper, 150, 2, 64, 400
    (q, Q), (k, K), (v, V) = (bf16_input(rng, *shape) for shape in ((rows, H, HD), (1, max_len, HD), (1, max_len, HD)))
    out, span = dev.empty((rows, H, HD), BF16), dev.zeros((2,), np.dtype(np.int32))
    buffers = [dev.array(x) for x in (q, k, v)]
    attn_prefill_sm90(dev, out, *buffers, span)  # loads the kernel; no token, so nothing is written
    with dev.capture() as capture:
        attn_prefill_sm90(dev, out, *buffers, span)
    for pos0, T in ((0, 150), (250, 150), (200, 3), (0, 1)):
        out.fill(POISON)
        span.upload(np.array([pos0, T], np.int32))
        capture.graph.launch()
        got = out.download()
        want = np.array([[attention(Q[t, h], *seen(K, V, 0, pos0 + t)) for h in range(H)] for t in range(T)])
        assert_close(bf16_to_f32(got[:T]), want, rel=REL, what=f"{T} tokens after {pos0}")
        assert (got[T:] == 0xFFFF).all()


def test_what_it_refuses(hopper: Any) -> None:
    span, cache = hopper.zeros((2,), np.dtype(np.int32)), hopper.zeros((1, 8, 80), BF16)
    q = hopper.zeros((1, 2, 80), BF16)
    with pytest.raises(QwenRawError, match="head_dim 80"):
        attn_prefill_sm90(hopper, q, q, cache, cache, span)
    q, codes = hopper.zeros((1, 2, 64), BF16), hopper.zeros((1, 8, 64), E4M3)
    with pytest.raises(QwenRawError, match="k_cache"):
        attn_prefill_sm90(hopper, q, q, codes, codes, span)
    q, cache = hopper.zeros((1, 3, 64), BF16), hopper.zeros((2, 8, 64), BF16)
    with pytest.raises(QwenRawError, match="do not divide"):
        attn_prefill_sm90(hopper, q, q, cache, cache, span)


@pytest.mark.parametrize(("KV", "HD"), [(2, 64), (1, 128), (3, 16)])
@pytest.mark.parametrize(("pos0", "T"), [(0, 1), (0, 40), (30, 7), (3, 0)])
def test_widened(dev: Any, rng: np.random.Generator, KV: int, HD: int, pos0: int, T: int) -> None:
    """Every value to the bit, second parts included; rows behind the last token are neither read nor written."""
    max_len, n = 45, pos0 + T
    k, v, fine, K, V = fp8_cache(rng, KV, max_len, HD, n)
    out = [dev.empty((KV, max_len, HD), BF16) for _ in range(2)]
    for buffer in out:
        buffer.fill(POISON)
    span = dev.array(np.array([pos0, T], np.int32))
    kv_widen(dev, *out, dev.array(k), dev.array(v), span, fine=dev.array(fine))
    for buffer, values in zip(out, (K, V), strict=True):
        got = buffer.download()
        assert (got[:, :n] == f32_to_bf16(values[:, :n].astype(np.float32))).all()
        assert (got[:, n:] == 0xFFFF).all()


@pytest.mark.parametrize(("H", "KV", "T", "pos0"), [(3, 1, 130, 0), (18, 2, 5, 140)])
def test_e4m3_with_a_scale_for_each_head(
    hopper: Any, rng: np.random.Generator, H: int, KV: int, T: int, pos0: int
) -> None:
    """Heads of very different magnitudes, each in units of its own power of two; 18 need a second pack of exponents."""
    dev, HD, rows, max_len = hopper, 128, T + 5, pos0 + T
    q, Q = bf16_input(rng, rows, H, HD, scale=2.0)
    (k, K), (v, V) = bf16_input(rng, KV, max_len, HD), bf16_input(rng, KV, max_len, HD)
    v = f32_to_bf16((bf16_to_f32(v) * (10.0 ** np.arange(0, 2 * KV, 2))[:, None, None]).astype(np.float32))
    V = bf16_to_f32(v).astype(np.float64)
    out = Tokens(dev.empty((rows, H * HD), E4M3), exponents=dev.empty((rows, exponent_row(H * HD)), U8))
    for buffer in (out.values, out.exponents):
        buffer.fill(POISON)
    span = dev.array(np.array([pos0, T], np.int32))
    attn_prefill_sm90(dev, out, dev.array(q), dev.array(k), dev.array(v), span)
    codes, e = out.values.download(), out.exponents.download()
    assert (codes[T:] == 0xFF).all() and (e[T:] == 0xFF).all(), "a row of padding was written"
    assert (e[:, H:] == 0xFF).all(), "exponents of no head were written"
    for t in sorted({0, 1, T - 1, *rng.integers(0, T, 6).tolist()}):
        for h in range(H):
            want = attention(Q[t, h], *seen(K, V, h * KV // H, pos0 + t))
            unit = 2.0 ** (int(e[t, h]) - 127)
            got = e4m3_to_f32(codes[t, h * HD : (h + 1) * HD]).astype(np.float64) * unit
            slack = REL * np.abs(want).max() + unit * 2.0**-10
            assert (np.abs(got - want) <= 2.0**-4 * np.abs(want) + slack).all(), f"token {t}, head {h}"
            assert np.abs(got).max() > 1.7 * unit, "a head that fits into the next smaller scale"


def test_which_kernel_is_taken(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert suits_sm90(ARCH, 64) and suits_sm90(ARCH, 128)
    assert not suits_sm90("sm_80", 128) and not suits_sm90("sim", 128) and not suits_sm90(ARCH, 80)
    taken: list[Any] = []
    for name in ("attn_prefill", "attn_prefill_sm90", "kv_widen"):
        note = lambda _, *buffers, name=name, **fine: taken.append((name, buffers[-2], fine))  # noqa: E731
        monkeypatch.setattr(f"qwen_raw.kernels.attention.{name}", note)
    span, q, cache, wide = (dev.zeros(shape, BF16) for shape in ((2,), (1, 2, 128), (1, 8, 128), (1, 8, 128)))
    codes = dev.zeros((1, 8, 128), E4M3)
    for suits in (True, False):
        monkeypatch.setattr("qwen_raw.kernels.attention.suits_sm90", lambda *_, suits=suits: suits)
        prefill_attention(dev, q, q, cache, cache, span)
        prefill_attention(dev, q, q, codes, codes, span, fine=codes)
        prefill_attention(dev, q, q, codes, codes, span, fine=codes, wide=(wide, wide))
    plain, fine = ("attn_prefill", codes, {"fine": codes}), {"fine": codes}
    on_hopper = [("attn_prefill_sm90", cache, {}), plain, ("kv_widen", codes, fine), ("attn_prefill_sm90", wide, {})]
    assert taken == [*on_hopper, ("attn_prefill", cache, {"fine": None}), plain, plain]
