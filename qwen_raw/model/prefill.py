"""Prefill of a chunk: T prompt tokens through every layer at once, keys and values into the cache.

A generator, as a decode step is: it yields after every sum over ranks (`qwen_raw.model.decode.level`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from qwen_raw.config import ModelConfig
from qwen_raw.device import Buffer, Device
from qwen_raw.kernels.attn_prefill import attn_prefill
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.gemm import Gemm
from qwen_raw.kernels.gemm_bf16 import GEMM as GEMM_BF16
from qwen_raw.kernels.gemm_fp8 import GEMM as GEMM_FP8
from qwen_raw.kernels.norm import rmsnorm, rmsnorm_split
from qwen_raw.model.residual import Residual
from qwen_raw.model.state import KVCache, PrefillBuffers
from qwen_raw.model.weights import Layer, Weights


def prefill_layer(
    dev: Device,
    c: ModelConfig,
    layer: Layer,
    k_cache: Buffer,
    v_cache: Buffer,
    rope: Buffer,
    b: PrefillBuffers,
    T: int,
    pos0: int,
    gemm: Gemm,
    residual: Residual,
    reduce: bool,
) -> Iterator[None]:
    """b.h[:T] → b.h[:T]; keys and values of positions pos0 … pos0 + T - 1 into the cache."""
    h, n = b.h.view((T, c.D)), b.n.view((T, c.D))
    q, attn, act = b.q.view((T, c.H, c.HD)), b.attn.view((T, c.H, c.HD)), b.act.view((T, c.I))
    rmsnorm(dev, n, h, layer.norm1, c.rms_eps)
    gemm.qkv(dev, q, k_cache, v_cache, n, layer.qkv, layer.qkv_bias, rope, pos0)
    attn_prefill(dev, attn, q, k_cache, v_cache, pos0)
    residual.products(gemm, h, attn.view((T, c.H * c.HD)), layer.o, n)  # n has been used: it takes the ranks' shares
    if reduce:
        residual.reduce(h, spare=n)
    yield
    rmsnorm(dev, n, h, layer.norm2, c.rms_eps)
    gemm.swiglu(dev, act, n, layer.gate, layer.up)
    residual.products(gemm, h, act, layer.down, n)
    if reduce:
        residual.reduce(h, spare=n)
    yield


def prefill_chunk(
    dev: Device,
    c: ModelConfig,
    w: Weights,
    cache: KVCache,
    rope: Buffer,
    b: PrefillBuffers,
    residual: Residual,
    ids: Sequence[int],
    pos0: int,
    reduce: bool = True,
) -> Iterator[None]:
    """Queue one chunk of at most b.chunk ids; the residual stream after the last layer is b.h[:T].

    `reduce`: False leaves the sums over ranks out, to load every other kernel before ranks wait for each other.
    """
    T = len(ids)
    device_ids = b.ids.view((T,))
    device_ids.upload(np.asarray(ids, np.int32))
    embed(dev, b.h.view((T, c.D)), w.embed, device_ids)
    gemm = GEMM_FP8 if w.fp8 else GEMM_BF16
    for layer, k, v in zip(w.layers, cache.k, cache.v, strict=True):
        yield from prefill_layer(dev, c, layer, k, v, rope, b, T, pos0, gemm, residual, reduce)


def all_logits(dev: Device, c: ModelConfig, w: Weights, b: PrefillBuffers, h: Buffer, out: Buffer) -> None:
    """Logits f32 [T, V] of every row of h f32 [T, D], as exact as decode's: the head's input goes in as hi + lo."""
    hi, lo = b.n.view(h.shape), b.low.view(h.shape)
    rmsnorm_split(dev, hi, lo, h, w.norm, c.rms_eps)
    GEMM_BF16.f32(dev, out, hi, w.head)
    GEMM_BF16.add(dev, out, lo, w.head)
