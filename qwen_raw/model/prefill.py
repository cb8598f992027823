"""Prefill of a chunk: prompt tokens through every layer at once, keys and values into the cache.

A chunk has `rows` rows, of which the first T are tokens and the rest is padding. T and the position of row 0 are in
device memory (PrefillBuffers.span), so one captured graph serves every length up to its rows. Rows do not see each
other but in attention, which reads the keys of tokens only: padding is computed and dropped. It costs time, and changes
nothing.

At several ranks the norm behind O or down is usually part of their sum (qwen_raw/kernels/allreduce_rows.py): each row
of the residual stream is then kept by one rank, until the last sum of a chunk gives all of them to all.

A generator, as a decode step is: it yields after every sum over ranks (`qwen_raw.model.decode.level`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from qwen_raw.config import ModelConfig
from qwen_raw.device import Buffer, Device
from qwen_raw.kernels import products
from qwen_raw.kernels.allreduce_rows import RowsWorkspace, allreduce_rows
from qwen_raw.kernels.attention import on_hopper, prefill_attention
from qwen_raw.kernels.attn_prefill_sm90 import BLOCK_HD
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.gemm_bf16 import GEMM as GEMM_BF16
from qwen_raw.kernels.gemm_sm90 import Tokens
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.norm import rmsnorm_split
from qwen_raw.kernels.products import Products
from qwen_raw.model.residual import Residual
from qwen_raw.model.state import KVCache, PrefillBuffers
from qwen_raw.model.weights import Layer, Weights

# Of a layer; norm and reduce twice. quantise: what no kernel before has, for fp8 on Hopper; reduce: of several ranks.
# A sum by rows norms too: then only the chunk's first norm is a step by itself.
STAGES = ("norm", "qkv", "attn", "quantise", "o", "gate_up", "down", "reduce")


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
    skip: frozenset[str],
    first: bool,
    following: Buffer | None,
) -> Iterator[None]:
    """b.h[:rows] → b.h[:rows]; keys and values of the tokens that b.span says into the cache. `skip`: of STAGES.

    `first`: of the chunk's layers; `following`: the next one's norm, None behind the last.
    """
    h, n, span, gemm = b.h.view((rows, c.D)), b.n.view((rows, c.D)), b.span, b.products
    q, attn, act = b.q.view((rows, c.H, c.HD)), b.attn.view((rows, c.H, c.HD)), b.act.view((rows, c.I))
    hopper = products.suits_sm90(dev.arch, c)  # small models show what probabilities in bf16 cost
    by_rows = sums_by_rows(residual, gemm)
    x = gemm.room(n)
    if "norm" not in skip and (first or by_rows is None):
        gemm.norm(dev, x, h, layer.norm1, c.rms_eps)
    if "qkv" not in skip:
        gemm.qkv(dev, q, k_cache, v_cache, x, layer.qkv, layer.qkv_bias, rope, span, fine)
    heads = quantised_heads(dev, c, layer, k_cache, wide, b, rows, residual)
    if "attn" not in skip:
        prefill_attention(dev, attn, q, k_cache, v_cache, span, fine=fine, wide=wide, hopper=hopper, blocks=heads)
    _into_residual(dev, "o", heads or attn.view((rows, c.H * c.HD)), layer.o, h, n, gemm, residual, skip)
    if by_rows is not None and "reduce" not in skip:
        allreduce_rows(by_rows, rows, c.D, layer.norm2, c.rms_eps, pdl=True, pushed=_pushed(by_rows, gemm, rows))
    yield
    x = gemm.room(n)
    if "norm" not in skip and by_rows is None:
        gemm.norm(dev, x, h, layer.norm2, c.rms_eps)
    if "gate_up" not in skip:
        gemm.swiglu(dev, act, x, layer.gate, layer.up)
    _into_residual(dev, "down", act, layer.down, h, n, gemm, residual, skip)
    if by_rows is not None and "reduce" not in skip:
        allreduce_rows(by_rows, rows, c.D, following, c.rms_eps, pdl=True, pushed=_pushed(by_rows, gemm, rows))
    yield


def sums_by_rows(residual: Residual, gemm: Products) -> RowsWorkspace | None:
    """What sums by rows and makes what these products take. None: the sum and the norm are two steps."""
    ws = residual.rows
    return ws if ws is not None and ws.kind == gemm.normed else None


def _pushed(by_rows: RowsWorkspace, gemm: Products, rows: int) -> bool:
    """Whether O and down push their rows' shares to the owners."""
    return gemm.pushes(rows) and by_rows.takes_pushed(rows)


def quantised_heads(
    dev: Device,
    c: ModelConfig,
    layer: Layer,
    k_cache: Buffer,
    wide: tuple[Buffer, Buffer] | None,
    b: PrefillBuffers,
    rows: int,
    residual: Residual,
) -> Tokens | None:
    """Room in b.attn for attention's output as e4m3 with exponents; None: it is bf16, which `quantise` may turn."""
    hopper = on_hopper(dev.arch, c.HD, k_cache, wide, hopper=products.suits_sm90(dev.arch, c))
    if not (residual.adds and hopper and c.HD == BLOCK_HD):
        return None
    return b.products.blocks(dev, b.attn.view((rows, c.H * c.HD)), layer.o)


def _into_residual(
    dev: Device,
    stage: str,
    a: Buffer | Tokens,
    w: Linear,
    h: Buffer,
    n: Buffer,
    gemm: Products,
    residual: Residual,
    skip: frozenset[str],
) -> None:
    """h += a·Wᵀ over all ranks; n takes their shares.

    Where they are summed by rows they stay there, or go to the rows' owners.
    """
    x = a if isinstance(a, Tokens) else gemm.room(a)
    if not isinstance(a, Tokens) and "quantise" not in skip:
        gemm.quantise(dev, x, a)
    by_rows = sums_by_rows(residual, gemm)
    if stage not in skip and by_rows is not None and _pushed(by_rows, gemm, n.shape[0]):
        gemm.push(dev, by_rows.parts(*n.shape), x, w)
    elif stage not in skip:
        residual.products(gemm, h, x, w, n)
    if "reduce" not in skip and by_rows is None:
        residual.reduce(h, spare=n)


def prefill_chunk(
    dev: Device,
    c: ModelConfig,
    w: Weights,
    cache: KVCache,
    rope: Buffer,
    b: PrefillBuffers,
    residual: Residual,
    rows: int,
    skip: frozenset[str] = frozenset(),
    layers: int | None = None,
    embedded: bool = True,
) -> Iterator[None]:
    """Queue the chunk that b.put has uploaded; the residual stream after the last layer is b.h[:rows].

    `rows`: at least the chunk's tokens. `skip`: stages that are left out in every layer, to see what they cost, or to
    load kernels without ranks that wait; `layers`: only the first so many. `embedded`: False where b.h[:rows] holds
    what the layers are to take.
    """
    if embedded:
        embed(dev, b.h.view((rows, c.D)), w.embed, b.ids(rows))
    some = list(islice(zip(w.layers, cache.layers, strict=True), layers))
    norms = [layer.norm1 for layer, _ in some[1:]]
    for i, (layer, (k, v, fine)) in enumerate(some):
        following = norms[i] if i < len(norms) else None
        yield from prefill_layer(
            dev, c, layer, k, v, fine, cache.wide, rope, b, rows, residual, skip, i == 0, following
        )


def all_logits(dev: Device, c: ModelConfig, w: Weights, b: PrefillBuffers, h: Buffer, out: Buffer) -> None:
    """Logits f32 [T, V] of every row of h f32 [T, D], as exact as decode's: the head's input goes in as hi + lo."""
    hi, lo = b.n.view(h.shape), b.low.view(h.shape)
    rmsnorm_split(dev, hi, lo, h, w.norm, c.rms_eps)
    GEMM_BF16.f32(dev, out, hi, w.head)
    GEMM_BF16.add(dev, out, lo, w.head)
