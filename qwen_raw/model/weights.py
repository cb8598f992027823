"""One rank's weights on the device: which checkpoint tensors they are, and the shard rule beside each.

Column-parallel (a rank holds some of the rows): Q, K, V, gate, up, LM head. Row-parallel (some columns): O, down.
Norms and the embedding are whole on every rank. This version holds rank 0 of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwen_raw.config import ModelConfig
from qwen_raw.device import Buffer, Device
from qwen_raw.errors import QwenRawError
from qwen_raw.generation.runner import Progress
from qwen_raw.kernels.linear import Linear
from qwen_raw.model.loading import CheckpointLike, WeightLoader


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer."""

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
    """The whole model. Tied checkpoints share one buffer between `embed` and `head`."""

    embed: Buffer  # bf16 [V, D]
    layers: tuple[Layer, ...]
    norm: Buffer  # bf16 [D]
    head: Linear  # bf16 [V, D]
    fp8: bool  # the layers' linears are e4m3

    @property
    def bytes_per_token(self) -> int:
        """What one decode step reads: every linear and the LM head once; norms and one embedding row are noise."""
        return sum(w.nbytes for layer in self.layers for w in layer.linears) + self.head.nbytes


def weight_bytes(c: ModelConfig, fp8: bool) -> int:
    """Device bytes of the weights, so that a model that cannot fit is refused before anything is allocated."""
    tables = c.V * c.D * 2 * (1 if c.tied else 2)
    return c.linear_params() * (1 if fp8 else 2) + tables


def check_shapes(c: ModelConfig, fp8: bool) -> None:
    """Refuse dimensions that the kernels do not have, by name."""
    if c.HD not in (64, 128):
        raise QwenRawError(f"head_dim {c.HD}: the attention kernels have 64 and 128; --device cpu runs any")
    pack = 16 if fp8 else 8
    for name, n in (("hidden_size", c.D), ("intermediate_size", c.I), ("attention width", c.H * c.HD)):
        if n % pack:
            raise QwenRawError(f"{name} {n} is not a multiple of {pack}, which {'fp8' if fp8 else 'bf16'} rows need")


def load_weights(dev: Device, checkpoint: CheckpointLike, *, fp8: bool, progress: Progress | None = None) -> Weights:
    """Move every tensor to the device, in its final layout; one matrix at a time, no second host copy."""
    c = checkpoint.config
    check_shapes(c, fp8)
    load = WeightLoader(dev, checkpoint, fp8=fp8, total=weight_bytes(c, fp8), progress=progress)
    embed = load.matrix("model.embed_tokens.weight", (c.V, c.D))
    layers = tuple(_load_layer(load, c, f"model.layers.{i}.") for i in range(c.L))
    norm = load.vector("model.norm.weight", c.D)
    head = Linear(embed if c.tied else load.matrix("lm_head.weight", (c.V, c.D)))
    load.finish()
    return Weights(embed, layers, norm, head, fp8)


def _load_layer(load: WeightLoader, c: ModelConfig, prefix: str) -> Layer:
    def mlp(name: str, N: int, K: int) -> Linear:
        return load.linear([f"{prefix}mlp.{name}_proj"], [N], K)

    qkv_names: Sequence[str] = [f"{prefix}self_attn.{x}_proj" for x in "qkv"]
    qkv_rows = [c.H * c.HD, c.KV * c.HD, c.KV * c.HD]
    return Layer(
        norm1=load.vector(f"{prefix}input_layernorm.weight", c.D),
        qkv=load.linear(qkv_names, qkv_rows, c.D),
        qkv_bias=load.biases(qkv_names, qkv_rows),
        o=load.linear([f"{prefix}self_attn.o_proj"], [c.D], c.H * c.HD),
        norm2=load.vector(f"{prefix}post_attention_layernorm.weight", c.D),
        gate=mlp("gate", c.I, c.D),
        up=mlp("up", c.I, c.D),
        down=mlp("down", c.D, c.I),
    )
