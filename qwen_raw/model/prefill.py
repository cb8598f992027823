"""Prefill of a chunk: prompt tokens through every layer at once, keys and values into the cache.

A chunk has `rows` rows, of which the first T are tokens and the rest is padding. T and the position of row 0 are in
device memory (PrefillBuffers.span), so one captured graph serves every length up to its rows. Rows do not see each
other but in attention, which reads the keys of tokens only: padding is computed and dropped. It costs time, and changes
nothing.

A generator, as a decode step is: it yields after every sum over ranks (`qwen_raw.model.decode.level`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from qwen_raw.config import ModelConfig
from qwen_raw.device import Buffer, Device
from qwen_raw.kernels import products
from qwen_raw.kernels.attention import prefill_attention
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.gemm_bf16 import GEMM as GEMM_BF16
from qwen_raw.kernels.norm import rmsnorm_split
from qwen_raw.model.residual import Residual
from qwen_raw.model.state import KVCache, PrefillBuffers
from qwen_raw.model.weights import Layer, Weights


def prefill_layer(
    dev: Device,
    c: ModelConfig,
    layer: Layer,
    k_cache: Buffer,
    v_cache: Buffer,
    fine: Buffer | None,
    wide: tuple[Buffer, Buffer] | None,
    rope: Buffer,
    b: PrefillBuffers,
    rows: int,
    residual: Residual,
    reduce: bool,
) -> Iterator[None]:
    """b.h[:rows] → b.h[:rows]; keys and values of the tokens that b.span says into the cache."""
    h, n, span, gemm = b.h.view((rows, c.D)), b.n.view((rows, c.D)), b.span, b.products
    q, attn, act = b.q.view((rows, c.H, c.HD)), b.attn.view((rows, c.H, c.HD)), b.act.view((rows, c.I))
    gemm.norm(dev, n, h, layer.norm1, c.rms_eps)
    gemm.qkv(dev, q, k_cache, v_cache, n, layer.qkv, layer.qkv_bias, rope, span, fine)
    hopper = products.suits_sm90(dev.arch, c)  # small models show what probabilities in bf16 cost
    prefill_attention(dev, attn, q, k_cache, v_cache, span, fine=fine, wide=wide, hopper=hopper)
    residual.products(gemm, h, attn.view((rows, c.H * c.HD)), layer.o, n)  # n has been used: it takes ranks' shares
    if reduce:
        residual.reduce(h, spare=n)
    yield
    gemm.norm(dev, n, h, layer.norm2, c.rms_eps)
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
    rows: int,
    reduce: bool = True,
    layers: int | None = None,
    embedded: bool = True,
) -> Iterator[None]:
    """Queue the chunk that b.put has uploaded; the residual stream after the last layer is b.h[:rows].

    `rows`: at least the chunk's tokens. `reduce`: False leaves the sums over ranks out, and `layers` all but the first
    so many layers: to load kernels. `embedded`: False where b.h[:rows] holds what the layers are to take.
    """
    if embedded:
        embed(dev, b.h.view((rows, c.D)), w.embed, b.ids(rows))
    for layer, (k, v, fine) in islice(zip(w.layers, cache.layers, strict=True), layers):
        yield from prefill_layer(dev, c, layer, k, v, fine, cache.wide, rope, b, rows, residual, reduce)


def all_logits(dev: Device, c: ModelConfig, w: Weights, b: PrefillBuffers, h: Buffer, out: Buffer) -> None:
    """Logits f32 [T, V] of every row of h f32 [T, D], as exact as decode's: the head's input goes in as hi + lo."""
    hi, lo = b.n.view(h.shape), b.low.view(h.shape)
    rmsnorm_split(dev, hi, lo, h, w.norm, c.rms_eps)
    GEMM_BF16.f32(dev, out, hi, w.head)
    GEMM_BF16.add(dev, out, lo, w.head)
