"""One decode step: the launches that turn the token in the device's state into the next one.

Nothing here comes from the host: the token, its position and the KV length are read from device memory, so the step is
captured once and replayed. Five launches a layer:

    norm + QKV + bias + RoPE + KV append · attention · O + residual · norm + gate/up + SwiGLU · down + residual

and around them the embedding, and norm + LM head with the choice of the id, in one launch where a rank holds all rows.
Under tensor parallelism O and down end in a
sum over ranks (qwen_raw/model/residual.py).

A step is a generator: it yields after every such sum, so that one thread can keep the ranks level (`level`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from qwen_raw.config import ModelConfig
from qwen_raw.device import Buffer, Device
from qwen_raw.errors import UsageError
from qwen_raw.kernels.attn_decode import attn_decode
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.gemv import Gemv
from qwen_raw.kernels.gemv_bf16 import GEMV as GEMV_BF16
from qwen_raw.kernels.gemv_exchange import Next
from qwen_raw.kernels.gemv_fp8 import GEMV as GEMV_FP8
from qwen_raw.kernels.sample import sample
from qwen_raw.model.residual import Residual
from qwen_raw.model.state import DecodeBuffers, KVCache
from qwen_raw.model.weights import Layer, Weights

STAGES = ("embed", "qkv", "attn", "o", "gate_up", "down", "reduce", "head", "sample")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is launched. All but the default is for benches and tests. Raises UsageError for an unknown stage."""

    skip: frozenset[str] = frozenset()  # stages left out: what a step costs without one is what that one costs
    blocks_per_sm: int | None = None  # of the matrix-vector products; None: the launchers' choice
    fuse_choice: bool = True  # one rank: the LM head chooses the id in its own launch
    pdl: bool = True  # dependent launches: blocks start while the previous kernel drains and wait inside (griddep_wait)

    def __post_init__(self) -> None:
        unknown = sorted(self.skip - set(STAGES))
        if unknown:
            raise UsageError(f"a step has no stage {', '.join(unknown)}: it has {', '.join(STAGES)}")


DEFAULT = StepOptions()


def level(steps: Iterable[Iterator[None]]) -> None:
    """Run the steps of all ranks, each to its next sum over ranks before any goes beyond it.

    A stream takes about a thousand launches and then makes the host wait; a rank that got so far ahead of one that has
    not been queued would wait for it for ever.
    """
    for _ in zip(*steps, strict=True):
        pass


def decode_layer(
    dev: Device,
    c: ModelConfig,
    layer: Layer,
    k_cache: Buffer,
    v_cache: Buffer,
    fine: Buffer | None,
    rope: Buffer,
    b: DecodeBuffers,
    gemv: Gemv,
    residual: Residual,
    options: StepOptions,
    number: int,
    following: Next,
) -> Iterator[None]:
    """b.h [D] → b.h [D], appending K and V of the token at b.sampler.pos. `number`: of the layer; `following`: it."""
    pos, skip, pdl = b.sampler.pos, options.skip, options.pdl
    if "qkv" not in skip:
        tables = (layer.qkv_bias, rope, pos)
        gemv.qkv(dev, b.q, k_cache, v_cache, b.h, layer.norm1, layer.qkv, *tables, c.rms_eps, fine=fine, pdl=pdl)
    if "attn" not in skip:
        attn_decode(dev, b.attn.view((c.H, c.HD)), b.q, k_cache, v_cache, pos, b.workspace, fine=fine, pdl=pdl)
    if "o" not in skip:
        gate_up = Next(gemv, "swiglu", (layer.gate, layer.up))
        residual.product(gemv, b.h, b.attn, layer.o, number=2 * number, following=gate_up, pdl=pdl)
    if "reduce" not in skip:
        residual.reduce(b.h, pdl=pdl)
    yield
    if "gate_up" not in skip:
        gemv.swiglu(dev, b.act, b.h, layer.norm2, layer.gate, layer.up, c.rms_eps, pdl=pdl)
    if "down" not in skip:
        residual.product(gemv, b.h, b.act, layer.down, number=2 * number + 1, following=following, pdl=pdl)
    if "reduce" not in skip:
        residual.reduce(b.h, pdl=pdl)
    yield


def lm_head(
    dev: Device, c: ModelConfig, w: Weights, h: Buffer, logits: Buffer, *, head: Gemv = GEMV_BF16, pdl: bool = False
) -> None:
    """logits f32 [V] of one row h f32 [D], the last norm included."""
    head.logits(dev, logits, h, w.norm, w.head, c.rms_eps, pdl=pdl)


def decode_step(
    dev: Device,
    c: ModelConfig,
    w: Weights,
    cache: KVCache,
    rope: Buffer,
    b: DecodeBuffers,
    residual: Residual,
    options: StepOptions = DEFAULT,
) -> Iterator[None]:
    """Queue one step. Without the "sample" stage the state stays as it is and the logits are in b.logits."""
    gemv, head = (GEMV_FP8 if w.fp8 else GEMV_BF16), GEMV_BF16
    if options.blocks_per_sm is not None:
        gemv, head = (replace(g, blocks_per_sm=options.blocks_per_sm) for g in (gemv, head))
    if "embed" not in options.skip:
        # An ordinary launch: what the last step wrote is visible to all of this one, before griddep_wait too.
        embed(dev, b.h.view((1, c.D)), w.embed, b.sampler.token)
    residual = residual.of_step(options.skip)
    following = [
        *(Next(gemv, "qkv", (layer.qkv,), c.HD // 2) for layer in w.layers[1:]),
        Next(head, "logits", (w.head,)),
    ]
    for number, (layer, (k, v, fine)) in enumerate(zip(w.layers, cache.layers, strict=True)):
        yield from decode_layer(dev, c, layer, k, v, fine, rope, b, gemv, residual, options, number, following[number])
    if options.fuse_choice and b.sampler.meeting is None and not {"head", "sample"} & options.skip:
        head.choose(dev, b.logits, b.h, w.norm, w.head, c.rms_eps, b.sampler, pdl=options.pdl)
        return
    if "head" not in options.skip:
        lm_head(dev, c, w, b.h, b.logits, head=head, pdl=options.pdl)
    if "sample" not in options.skip:
        sample(dev, b.logits, b.sampler, pdl=options.pdl)
