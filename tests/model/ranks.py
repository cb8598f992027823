"""Several ranks, simulated or on GPUs, and checkpoints that show a rank's mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from loaders.synthetic import SyntheticCheckpoint, random_checkpoint, synthetic_values, tensor_id
from qwen_raw.config import ModelConfig
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

# Hidden size 9·16, two KV heads (replicated from 4 ranks on), intermediate 1848 at 8 ranks, a vocabulary that divides
# by nothing.
ODD = ModelConfig(
    D=144, H=8, KV=2, HD=64, I=8 * 1848, V=203, L=1, rms_eps=1e-6, rope_theta=1e4, max_position=128, tied=False
)
# Every rank has KV heads of its own up to 8; shares of I that fp8 takes at 8 ranks; the head is the embedding.
TIED = ModelConfig(
    D=176, H=16, KV=8, HD=64, I=8 * 48, V=203, L=2, rms_eps=1e-5, rope_theta=1e6, max_position=128, tied=True
)
PAIRS = ("sim-2", *(pytest.param(f"cuda-{name}", marks=pytest.mark.gpu) for name in ("0,0", "0,1")))
CUDA = ("0,0", "0,0,0,0", "0,0,0,0,0,0,0,0", "0,1", "0,0,0,0,1,1,1,1")
KINDS = ("sim-2", "sim-4", "sim-8", *(pytest.param(f"cuda-{name}", marks=pytest.mark.gpu) for name in CUDA))


def open_ranks(kind: str, **options: Any) -> Iterator[list[Any]]:
    """The devices of "sim-4" or "cuda-0,0,1,1"; `options` are SimWorld's."""
    where, _, which = kind.partition("-")
    if where == "sim":
        with SimWorld(int(which), **options) as world:
            yield [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
        return
    from qwen_raw.driver.device import CudaDevice
    from qwen_raw.driver.probe import probe

    ordinals = [int(n) for n in which.split(",")]
    if max(ordinals) >= len(probe().gpus):
        pytest.skip("needs two GPUs")
    with ExitStack() as stack:
        yield [stack.enter_context(CudaDevice(n)) for n in ordinals]


def biased_checkpoint(config: ModelConfig, stored: Any = "bf16", seed: int = 3) -> SyntheticCheckpoint:
    """A random model whose biases are as large as what they are added to: one of another head cannot pass."""
    model = random_checkpoint(config, stored, seed)
    biases = {
        name: replace(t, load=partial(synthetic_values, t.shape, tensor_id(name), seed, 3.0), synthetic=None)
        for name, t in model.tensors.items()
        if name.endswith(".bias")
    }
    assert len(biases) == 3 * config.L
    return replace(model, tensors={**model.tensors, **biases})


def sure(rows: np.ndarray[Any, Any], tolerance: float) -> int:
    """How many rows of logits from the first on have a winner by more than the tolerance."""
    best = np.sort(rows, axis=1)
    close = np.flatnonzero(best[:, -1] - best[:, -2] <= tolerance)
    return int(close[0]) if close.size else len(rows)
