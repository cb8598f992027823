"""One rank's weights on the device: which parts of which checkpoint tensors they are (qwen_raw/model/shard.py)."""

from __future__ import annotations

from dataclasses import dataclass

from qwen_raw.device import Buffer, Device
from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import Progress
from qwen_raw.kernels.linear import Linear
from qwen_raw.model.loading import CheckpointLike, Part, WeightLoader
from qwen_raw.model.shard import Shard


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer; H, KV and I are this rank's."""

    norm1: Buffer  # bf16 [D]
    qkv: Linear  # [(H + 2·KV)·HD, D]: all Q rows, then K, then V
    qkv_bias: Buffer  # f32 [(H + 2·KV)·HD]
    o: Linear  # [D, H·HD]
    norm2: Buffer  # bf16 [D]
    gate: Linear  # [I, D]
    up: Linear  # [I, D]
    down: Linear  # [D, I]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.o, self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class Weights:
    """One rank's share of the model. Tied checkpoints share one buffer between `embed` and `head`."""

    embed: Buffer  # bf16 [V, D], all rows
    layers: tuple[Layer, ...]
    norm: Buffer  # bf16 [D]
    head: Linear  # bf16 [V, D], this rank's rows
    fp8: bool  # the layers' linears are e4m3

    @property
    def bytes_per_token(self) -> int:
        """What one decode step reads: every linear and the LM head once; norms and one embedding row are noise."""
        return sum(w.nbytes for layer in self.layers for w in layer.linears) + self.head.nbytes


def weight_bytes(shard: Shard, fp8: bool) -> int:
    """Device bytes of a rank's weights, so that a model that cannot fit is refused before anything is allocated."""
    c = shard.local
    tables = shard.whole.V * c.D * 2 + (0 if c.tied else c.V * c.D * 2)
    return c.linear_params() * (1 if fp8 else 2) + tables


def check_shapes(shard: Shard, fp8: bool) -> None:
    """Refuse dimensions that the kernels do not have, by name."""
    c = shard.local
    if c.HD not in (64, 128):
        raise QwenRawError(f"head_dim {c.HD}: the attention kernels have 64 and 128; --device cpu runs any")
    pack, share = 16 if fp8 else 8, f" / {shard.world}" if shard.world > 1 else ""
    for name, n in (("hidden_size", c.D), (f"intermediate_size{share}", c.I), (f"attention width{share}", c.H * c.HD)):
        if n % pack:
            raise QwenRawError(f"{name} {n} is not a multiple of {pack}, which {'fp8' if fp8 else 'bf16'} rows need")


def load_weights(
    dev: Device, checkpoint: CheckpointLike, shard: Shard, *, fp8: bool, progress: Progress | None = None
) -> Weights:
    """Move a rank's part of every tensor to its device, in its final layout; one matrix at a time."""
    c, table = shard.whole, (shard.whole.V, shard.whole.D)
    check_shapes(shard, fp8)
    load = WeightLoader(dev, checkpoint, fp8=fp8, total=weight_bytes(shard, fp8), progress=progress)
    embed = load.matrix(Part.of_rows("model.embed_tokens.weight", table, range(c.V)))
    layers = tuple(load_layer(load, shard, f"model.layers.{i}.") for i in range(c.L))
    norm = load.vector("model.norm.weight", c.D)
    if c.tied:
        head = embed.view((len(shard.vocab), c.D), shard.vocab.start * c.D)
    else:
        head = load.matrix(Part.of_rows("lm_head.weight", table, shard.vocab))
    load.finish()
    return Weights(embed, layers, norm, Linear(head), fp8)


def load_layer(load: WeightLoader, shard: Shard, prefix: str) -> Layer:
    """The layer whose tensors' names begin with `prefix`."""
    c, inner = shard.whole, shard.inner
    kv = shard.head_rows(shard.kv_heads)
    qkv = [
        Part.of_rows(f"{prefix}self_attn.q_proj", (c.H * c.HD, c.D), shard.head_rows(shard.heads)),
        Part.of_rows(f"{prefix}self_attn.k_proj", (c.KV * c.HD, c.D), kv),
        Part.of_rows(f"{prefix}self_attn.v_proj", (c.KV * c.HD, c.D), kv),
    ]
    gate_up = load.linear([Part.of_rows(f"{prefix}mlp.{name}_proj", (c.I, c.D), inner) for name in ("gate", "up")])
    o = Part.of_columns(f"{prefix}self_attn.o_proj", (c.D, c.H * c.HD), shard.head_rows(shard.heads))
    return Layer(
        norm1=load.vector(f"{prefix}input_layernorm.weight", c.D),
        qkv=load.linear(qkv),
        qkv_bias=load.biases(qkv),
        o=load.linear([o]),
        norm2=load.vector(f"{prefix}post_attention_layernorm.weight", c.D),
        gate=gate_up.rows(0, len(inner)),
        up=gate_up.rows(len(inner), len(inner)),
        down=load.linear([Part.of_columns(f"{prefix}mlp.down_proj", (c.D, c.I), inner)]),
    )
