"""An e4m3 cache: every kernel that appends to it writes the codes of what it writes into a bf16 one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_reference import POISON, bf16_input, f16_input, fine_tables, make_linear

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f32_to_e4m3
from qwen_raw.config import FINE
from qwen_raw.device import BF16, E4M3
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels import gemm_bf16_sm90, gemm_fp8_sm90
from qwen_raw.kernels.gemm_bf16 import GEMM as GEMM_BF16
from qwen_raw.kernels.gemm_fp8 import GEMM as GEMM_FP8
from qwen_raw.kernels.gemm_sm90 import ARCH, VARIANTS, Choice, Tokens
from qwen_raw.kernels.gemv_bf16 import GEMV as GEMV_BF16
from qwen_raw.kernels.gemv_fp8 import GEMV as GEMV_FP8
from qwen_raw.kernels.gemv_rows import RowsWorkspace
from qwen_raw.kernels.gemv_rows_bf16 import GEMV_ROWS as ROWS_BF16
from qwen_raw.kernels.gemv_rows_fp8 import GEMV_ROWS as ROWS_FP8
from qwen_raw.kernels.kv_cache import fine_bytes
from qwen_raw.kernels.quantize import quantize_rows

H, K, MAX_LEN, POS, EPS = 3, 80, 24, 5, 1e-6
HEADS = pytest.mark.parametrize(("KV", "HD"), [(3, 64), (1, 128)])
Append = Callable[..., None]  # (dev, q [T, H, HD], k, v, w, bias, rope, rng, **fine)


def vector(gemv: Any) -> Append:
    def append(dev: Any, q: Any, k: Any, v: Any, w: Any, bias: Any, rope: Any, rng: Any, **fine: Any) -> None:
        h, g = dev.array(rng.standard_normal(K).astype(np.float32)), dev.array(bf16_input(rng, K)[0])
        pos = dev.array(np.array([POS], np.int32))
        gemv.qkv(dev, q.view(q.shape[1:]), k, v, h, g, w, bias, rope, pos, EPS, grid=7, **fine)

    return append


def rows(gemv: Any) -> Append:
    def append(dev: Any, q: Any, k: Any, v: Any, w: Any, bias: Any, rope: Any, rng: Any, **fine: Any) -> None:
        h, g = rng.standard_normal((q.shape[0], K)).astype(np.float32), dev.array(bf16_input(rng, K)[0])
        pos, ws = dev.array(np.array([POS], np.int32)), RowsWorkspace.create(dev, 4 * q.shape[0] * w.N)
        gemv.qkv(dev, q, k, v, dev.array(h), g, w, bias, rope, pos, EPS, ws, **fine)

    return append


def chunk(gemm: Any) -> Append:
    def append(dev: Any, q: Any, k: Any, v: Any, w: Any, bias: Any, rope: Any, rng: Any, **fine: Any) -> None:
        a, span = dev.array(f16_input(rng, q.shape[0], K)[0]), dev.array(np.array([POS, q.shape[0]], np.int32))
        gemm.qkv(dev, q, k, v, a, w, bias, rope, span, **fine)

    return append


def hopper(module: Any, variant: str) -> Append:
    def append(dev: Any, q: Any, k: Any, v: Any, w: Any, bias: Any, rope: Any, rng: Any, **fine: Any) -> None:
        gemm, span = module.create(dev), dev.array(np.array([POS, q.shape[0]], np.int32))
        a = dev.array(bf16_input(rng, q.shape[0], K)[0])
        x = Tokens(a)
        if gemm.fp8:
            x = Tokens(dev.empty(a.shape, E4M3), dev.empty((q.shape[0],), np.dtype(np.float32)))
            quantize_rows(dev, x.values, x.scale, a)
        gemm.qkv(dev, q, k, v, x, w, bias, rope, span, Choice(VARIANTS[variant]), **fine)

    return append


# (how it appends, fp8 weights, tokens)
WRITERS = {
    "gemv_bf16": (vector(GEMV_BF16), False, 1),
    "gemv_fp8": (vector(GEMV_FP8), True, 1),
    "gemv_rows_bf16": (rows(ROWS_BF16), False, 5),
    "gemv_rows_fp8": (rows(ROWS_FP8), True, 5),
    "gemm_bf16": (chunk(GEMM_BF16), False, 9),
    "gemm_fp8": (chunk(GEMM_FP8), True, 9),
    "gemm_bf16_sm90_few": (hopper(gemm_bf16_sm90, "few16"), False, 9),
    "gemm_bf16_sm90_many": (hopper(gemm_bf16_sm90, "many128"), False, 9),
    "gemm_fp8_sm90_many": (hopper(gemm_fp8_sm90, "many128"), True, 9),
}


@HEADS
@pytest.mark.parametrize("writer", WRITERS)
def test_append(dev: Any, rng: np.random.Generator, writer: str, KV: int, HD: int) -> None:
    """Codes of the bf16 values, second parts of what that took off, and not a byte beside them."""
    append, fp8, T = WRITERS[writer]
    if "sm90" in writer and dev.kind == "cuda" and dev.arch != ARCH:
        pytest.skip("no Hopper GPU")
    outputs, seed = [], int(rng.integers(1 << 32))
    for kind in (BF16, E4M3):
        rng = np.random.default_rng(seed)
        w, _ = make_linear(dev, rng, (H + 2 * KV) * HD, K, fp8)
        bias, angle = (rng.standard_normal(w.N) * 10).astype(np.float32), rng.uniform(0, 6, (MAX_LEN, HD // 2))
        rope = dev.array(np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32))
        q, k, v = dev.empty((T, H, HD), BF16), dev.empty((KV, MAX_LEN, HD), kind), dev.empty((KV, MAX_LEN, HD), kind)
        slots, pairs = fine_tables(rng, KV, HD)
        fine = np.full(fine_bytes(KV, MAX_LEN, HD), POISON, np.uint8)
        fine[KV * MAX_LEN * FINE :] = np.r_[slots.reshape(-1), pairs.reshape(-1)]
        buffer = dev.array(fine)
        for poisoned in (q, k, v):
            poisoned.fill(POISON)
        append(dev, q, k, v, w, dev.array(bias), rope, rng, **({"fine": buffer} if kind == E4M3 else {}))
        outputs.append([x.download() for x in (q, k, v)])
    (q16, k16, v16), (q8, k8, v8) = outputs
    assert np.array_equal(q16, q8)
    here = np.s_[:, POS : POS + T]
    for name, wide, codes in (("k", k16, k8), ("v", v16, v8)):
        want = np.full(codes.shape, POISON, np.uint8)
        want[here] = f32_to_e4m3(bf16_to_f32(wide[here]))
        assert np.array_equal(codes, want), name
    rest = bf16_to_f32(k16[here]) - e4m3_to_f32(k8[here])
    want = np.full((KV, MAX_LEN, FINE), POISON, np.uint8)
    for kv in range(KV):
        columns = np.r_[pairs[kv].astype(int), pairs[kv].astype(int) + HD // 2]
        want[kv, POS : POS + T] = f32_to_e4m3(rest[kv][:, columns])
    got = buffer.download()
    assert np.array_equal(got[: want.size].reshape(want.shape), want), "second parts"
    assert np.array_equal(got[want.size :], fine[want.size :]), "the tables"


def test_a_wrong_cache_is_refused(dev: Any, rng: np.random.Generator) -> None:
    q, k, v, fine = dev.zeros((1, 2, 64), BF16), *(dev.zeros((1, 8, 64), E4M3) for _ in range(2)), dev.zeros((9,), E4M3)
    narrow = dev.zeros((1, 8, 64), BF16)
    w, _ = make_linear(dev, rng, 4 * 64, K, False)
    bias, rope = dev.zeros((w.N,), np.dtype(np.float32)), dev.zeros((8, 32, 2), np.dtype(np.float32))
    for caches, more, what in (
        ((k, v), {}, "needs the second parts"),
        ((k, v), {"fine": fine}, "second parts of keys is"),
        ((k, narrow), {"fine": fine}, "v_cache is"),
        ((narrow, narrow), {"fine": fine}, "bf16 cache has no second parts"),
    ):
        with pytest.raises(QwenRawError, match=what):
            chunk(GEMM_BF16)(dev, q, *caches, w, bias, rope, rng, **more)
