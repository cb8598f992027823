"""A model as named tensors: a folder in Hugging Face layout, or anything else that fills the same class.

Names are Hugging Face's: model.embed_tokens.weight, model.norm.weight, lm_head.weight, and in each model.layers.N
self_attn.{q,k,v}_proj.{weight,bias}, self_attn.o_proj.weight, mlp.{gate,up,down}_proj.weight,
{input,post_attention}_layernorm.weight. Linears are [out, in].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from loaders.config_json import load_config, load_generation_defaults, read_json
from loaders.dtypes import F32, U16, f32_to_bf16
from loaders.quant_format import QuantFormat, parse_quantization
from loaders.safetensors_file import read_safetensors
from loaders.tensor import Tensor
from qwen_raw.config import GenerationDefaults, ModelConfig
from qwen_raw.errors import UsageError

FLOATS = ("BF16", "F16", "F32")
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", "_proj.output_scale")
KNOWN_UNUSED = (".input_scale", ".rotary_emb.inv_freq")  # nothing is lost without them
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A linear's weight [N, K]; where `scale` [N] float32 is set, the weight is e4m3 and stands for e4m3 · scale."""

    weight: Tensor
    scale: F32 | None
    bias: F32 | None  # [N] float32

    def f32(self) -> F32:
        """The weight's values, float32 [N, K]."""
        wide = self.weight.f32()
        if self.scale is not None:
            wide *= self.scale[:, None]  # e4m3 → float32 made a new array
        return wide

    def bf16(self) -> U16:
        """The weight's values as bfloat16 bits [N, K]."""
        return self.weight.bf16() if self.scale is None else f32_to_bf16(self.f32())


@dataclass(frozen=True)
class Checkpoint:
    """One model, opened: nothing but headers has been read."""

    config: ModelConfig
    generation: GenerationDefaults
    tensors: Mapping[str, Tensor]  # what the model needs, no more
    quant: QuantFormat | None = None
    path: Path | None = None  # None: the model is not a folder, and has no tokenizer
    unused: tuple[str, ...] = ()  # names in the files that the model does not use
    notes: tuple[str, ...] = field(default=())  # lines a user should see

    @property
    def dtype(self) -> Literal["bf16", "fp8"]:
        """What the linears are stored as; fp16 and fp32 files count as bf16, which they are converted to."""
        return "fp8" if any(tensor.dtype == "F8_E4M3" for tensor in self.tensors.values()) else "bf16"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def linear(self, name: str) -> LinearWeight:
        """The linear `name`, e.g. "model.layers.0.self_attn.q_proj"; a tied "lm_head" is the embedding."""
        module = name.removesuffix(".weight")
        if self.config.tied and module == "lm_head":
            module = EMBEDDING.removesuffix(".weight")
        weight = self.tensors.get(f"{module}.weight")
        if weight is None:
            raise UsageError(f"{self.config.name or 'the model'} has no tensor {module}.weight")
        bias = self.tensors.get(f"{module}.bias")
        scale = _row_scale(self.tensors[f"{module}.weight_scale"], weight) if weight.dtype == "F8_E4M3" else None
        return LinearWeight(weight, scale, None if bias is None else bias.f32())


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of each linear of the layers, by module name."""
    q, kv = config.H * config.HD, config.KV * config.HD
    of_layer = {
        "self_attn.q_proj": (q, config.D),
        "self_attn.k_proj": (kv, config.D),
        "self_attn.v_proj": (kv, config.D),
        "self_attn.o_proj": (config.D, q),
        "mlp.gate_proj": (config.I, config.D),
        "mlp.up_proj": (config.I, config.D),
        "mlp.down_proj": (config.D, config.I),
    }
    return {f"model.layers.{n}.{part}": shape for n in range(config.L) for part, shape in of_layer.items()}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a bf16 checkpoint of this config: 12 a layer, embedding, norm, and an untied head."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.V, config.D), "model.norm.weight": (config.D,)}
    for module, (out, inner) in linear_shapes(config).items():
        shapes[f"{module}.weight"] = (out, inner)
        if module.endswith(("q_proj", "k_proj", "v_proj")):
            shapes[f"{module}.bias"] = (out,)
    for n in range(config.L):
        shapes[f"model.layers.{n}.input_layernorm.weight"] = (config.D,)
        shapes[f"model.layers.{n}.post_attention_layernorm.weight"] = (config.D,)
    if not config.tied:
        shapes[HEAD] = (config.V, config.D)
    return shapes


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a folder in Hugging Face layout, memory-mapping the weights. UsageError, one line."""
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; expected one with config.json and *.safetensors")
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} has no config.json; expected a folder with config.json and *.safetensors")
    config = load_config(folder)
    values = read_json(folder / "config.json")
    quant = parse_quantization(
        values.get("quantization_config") or values.get("compression_config"), str(folder / "config.json")
    )
    found = _read_folder(folder)
    tensors = _select(found, config, quant, folder)
    unused = tuple(sorted(found.keys() - tensors.keys()))
    return Checkpoint(
        config=config,
        generation=load_generation_defaults(folder),
        tensors=tensors,
        quant=quant,
        path=folder,
        unused=unused,
        notes=_notes(found, config, unused),
    )


def _read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that model.safetensors.index.json lists."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():  # first, as in transformers
        return read_safetensors(single)
    if index.exists():
        return _read_shards(folder, index)
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
    instead = f"; {others[0]} cannot be read" if others else ""
    raise UsageError(f"{folder} has neither model.safetensors nor model.safetensors.index.json{instead}")


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UsageError(f"{index} has no weight_map of tensor names to file names")
    found: dict[str, Tensor] = {}
    owner: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise UsageError(f"{index} names the shard {shard!r}, expected a file name in the same folder")
        if not (folder / shard).exists():
            raise UsageError(f"{folder} lacks the shard {shard} that its index lists")
        for name, tensor in read_safetensors(folder / shard).items():
            if name in found:
                raise UsageError(f"{folder}: duplicate tensor {name}, in {owner[name]} and in {shard}")
            found[name], owner[name] = tensor, shard
    for name, shard in weight_map.items():
        if owner.get(name) != shard:
            raise UsageError(f"{folder}: tensor {name} is missing from {shard}, where the index says it is")
    return found


def _select(
    found: dict[str, Tensor], config: ModelConfig, quant: QuantFormat | None, folder: Path
) -> dict[str, Tensor]:
    """The tensors the model needs, with FP8 scales; each checked for presence, shape and dtype."""
    quantised = set() if quant is None else {f"{module}.weight" for module in linear_shapes(config)}
    chosen: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        allowed = (*FLOATS, "F8_E4M3") if name in quantised else FLOATS
        chosen[name] = tensor = _take(found, name, shape, allowed, folder)
        if tensor.dtype == "F8_E4M3":
            chosen[f"{name}_scale"] = scale = _take(found, f"{name}_scale", None, FLOATS, folder)
            if scale.shape not in ((), (1,), (1, 1), shape[:1], (shape[0], 1)):
                rows = shape[0]
                raise UsageError(
                    f"{folder}: tensor {scale.name} has shape {list(scale.shape)}, expected one scale or one for each "
                    f"of {rows} rows"
                )
    if quant is not None and not any(tensor.dtype == "F8_E4M3" for tensor in chosen.values()):
        raise UsageError(f"{folder}: config.json has a quantization_config, but no linear is F8_E4M3")
    return chosen


def _take(
    found: dict[str, Tensor], name: str, shape: tuple[int, ...] | None, allowed: tuple[str, ...], folder: Path
) -> Tensor:
    tensor = found.get(name)
    if tensor is None:
        packed = name.endswith(".weight") and f"{name.removesuffix('.weight')}.qweight" in found
        hint = " (there is a .qweight: GPTQ and AWQ are not supported)" if packed else ""
        if name == HEAD:
            hint = " (tie_word_embeddings is false, so the head must be in the files)"
        raise UsageError(f"{folder}: tensor {name} is missing{hint}")
    if shape is not None and tensor.shape != shape:
        raise UsageError(f"{folder}: tensor {name} has shape {list(tensor.shape)}, config.json implies {list(shape)}")
    if tensor.dtype not in allowed:
        fp8 = "; F8_E4M3 is read where config.json has a quantization_config, and only for the layers' linears"
        hint = fp8 if tensor.dtype == "F8_E4M3" else ""
        raise UsageError(f"{folder}: tensor {name} is {tensor.dtype}, expected {' or '.join(allowed)}{hint}")
    return tensor


def _notes(found: dict[str, Tensor], config: ModelConfig, unused: tuple[str, ...]) -> tuple[str, ...]:
    """What a user should know of tensors that are in the files and not used."""
    notes: list[str] = []
    head = found.get(HEAD)
    if config.tied and head is not None:
        embedding = found[EMBEDDING]
        same = head.dtype == embedding.dtype and np.array_equal(head.raw, embedding.raw)
        if not same:
            notes.append(f"{HEAD} differs from the embedding and is ignored, because tie_word_embeddings is true")
    if any(name.endswith(KV_SCALES) for name in unused):
        notes.append("the checkpoint's KV cache scales are ignored: the cache is kept in bf16")
    strange = [name for name in unused if name != HEAD and not name.endswith((*KV_SCALES, *KNOWN_UNUSED))]
    if strange:
        notes.append(
            f"{len(strange)} tensors in the files are not used: {', '.join(strange[:3])}{', …' * (len(strange) > 3)}"
        )
    return tuple(notes)


def _row_scale(scale: Tensor, weight: Tensor) -> F32:
    """The scale as float32 [N]: one number is repeated for every row."""
    values = scale.f32().reshape(-1)
    if not np.isfinite(values).all() or (values < 0).any():
        raise UsageError(f"tensor {scale.name} holds a value that is no scale (negative, infinite or NaN)")
    return np.ascontiguousarray(np.broadcast_to(values, weight.shape[:1]))
