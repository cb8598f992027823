"""Prefill of several ranks through Hopper's kernels, which push shares to the rows' owners: simulated, and on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from model.ranks import CUDA, biased_checkpoint, open_ranks

from qwen_raw.config import ModelConfig
from qwen_raw.kernels import attention, products
from qwen_raw.kernels.gemm_sm90 import ARCH
from qwen_raw.model.residual import Summed
from qwen_raw.model.runner import DeviceRunner

MODEL = ModelConfig(
    D=96, H=8, KV=4, HD=64, I=8 * 48, V=104, L=2, rms_eps=1e-5, rope_theta=1e6, max_position=512, tied=True
)


@pytest.fixture(params=["sim-2", "sim-4", *(pytest.param(f"cuda-{name}", marks=pytest.mark.gpu) for name in CUDA)])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Devices that take Hopper's kernels for every model."""
    monkeypatch.setattr(products, "suits_sm90", lambda arch, c: True)
    monkeypatch.setattr(attention, "suits_sm90", lambda arch, HD: True)
    for devices in open_ranks(request.param):
        if devices[0].kind == "cuda" and devices[0].arch != ARCH:
            pytest.skip(f"{devices[0].name} is no Hopper GPU")
        yield devices


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [40, 270])
def test_logits_and_streams(
    ranks: list[Any], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int
) -> None:
    """As one rank's; of 270 rows, more than a tile's, shares are pushed; the last of four ranks then owns none."""
    if len(ranks) > 4:
        pytest.skip("the model has four KV heads")
    monkeypatch.setattr("qwen_raw.model.runner.LOGIT_ROWS", rows)
    model, ids = biased_checkpoint(MODEL), rng.integers(0, MODEL.V, rows).tolist()
    found = []
    for devices in (ranks[:1], ranks):
        runner = DeviceRunner(
            devices, model, dtype=dtype, max_model_len=rows + 2, text_vocab=MODEL.V, owns_device=False, comm="lamport"
        )
        found.append(runner.logits(ids))
        if devices is ranks:
            residual = runner.ranks[0].residual
            assert isinstance(residual, Summed) and residual.rows is not None
            pushed = runner.ranks[0].prefill.products.pushes(rows) and residual.rows.takes_pushed(rows)
            assert pushed == (rows > 128)
            streams = [rank.prefill.h.view((rows, MODEL.D)).download() for rank in runner.ranks]
            assert all((h.view(np.uint32) == streams[0].view(np.uint32)).all() for h in streams)
        runner.close()
    want, got = found
    worst = np.abs(got - want).max() / np.abs(want).max()
    assert worst < {"bf16": 2e-2, "fp8": 1e-1}[dtype], f"off by {worst:.2%} of the largest logit"
