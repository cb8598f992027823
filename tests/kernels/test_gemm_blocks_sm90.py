"""Products with a scale for each 128 columns of a token (include/block_scale.cuh), against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_reference import assert_close, block_tokens, make_linear

from qwen_raw.device import E4M3, U8
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels import gemm_fp8_sm90
from qwen_raw.kernels.gemm_sm90 import ARCH, OPERATIONS, VARIANTS, Choice, GemmSm90, Tokens

N = 440
E4M3_CUT = 2.0**-9  # of the largest result: an e4m3 tensor core keeps about 14 bits of a sum (docs/prefill.md)


@pytest.fixture
def gemm(dev: Any) -> GemmSm90:
    if dev.kind == "cuda" and dev.arch != ARCH:
        pytest.skip(f"{dev.name} is no Hopper GPU")
    return gemm_fp8_sm90.create(dev)


@pytest.mark.parametrize("split", [1, 99])
@pytest.mark.parametrize("change", [0.0, 0.02, 0.9])
@pytest.mark.parametrize("name", OPERATIONS["add_blocks"])
def test_add(dev: Any, rng: np.random.Generator, gemm: GemmSm90, name: str, change: float, split: int) -> None:
    """Tiles whole and in pieces; 19 slices, with a tail, are more than a pack of exponents."""
    T, K = 133, 18 * 128 + 16
    w, W = make_linear(dev, rng, N, K, True)
    x, X = block_tokens(dev, rng, T, K, change)
    tolerance = 2e-5 + (E4M3_CUT if dev.kind == "cuda" else 0.0)
    h = rng.standard_normal((T, N)).astype(np.float32)
    out = dev.array(h)
    gemm.add(dev, out, x, w, Choice(VARIANTS[name], split))
    want = X @ W.T
    for t in range(T):  # a row's magnitude is its own
        assert_close(out.download()[t : t + 1], h[t] + want[t : t + 1], rel=tolerance * 4, what=f"h of token {t}")


def test_what_is_refused(dev: Any, rng: np.random.Generator, gemm: GemmSm90) -> None:
    w, _ = make_linear(dev, rng, 64, 256, True)
    h, codes = dev.zeros((133, 64), np.dtype(np.float32)), dev.zeros((133, 256), E4M3)
    with pytest.raises(QwenRawError, match="exponents"):
        gemm.add(dev, h, Tokens(codes, exponents=dev.zeros((133, 2), U8)), w)
    with pytest.raises(QwenRawError, match="does not have the variant"):
        gemm.add(dev, h, Tokens(codes, exponents=dev.zeros((133, 16), U8)), w, Choice(VARIANTS["cut128"], 2))
