"""Small checkpoints on disk: a safetensors writer that can also write what is malformed, and folders around it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.checkpoint import tensor_shapes
from loaders.config_json import parse_config
from loaders.dtypes import f32_to_bf16

Array = npt.NDArray[Any]
Tensors = dict[str, tuple[str, Array]]  # name → (safetensors dtype, bits)

TINY: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 50,
}


def header_of(tensors: Tensors) -> dict[str, Any]:
    """The header of a well-formed file with these tensors in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, bits) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    return header


def write_raw(path: Path, header: bytes, data: bytes) -> Path:
    """Length, header, data: nothing is checked."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    data = b"".join(bits.tobytes() for _, bits in tensors.values())
    return write_raw(path, json.dumps(header_of(tensors)).encode(), data)


def model_tensors(values: Mapping[str, Any] = TINY, seed: int = 0) -> Tensors:
    """Random bf16 tensors for a config.json."""
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(parse_config(dict(values)))
    return {name: ("BF16", f32_to_bf16(rng.standard_normal(s, dtype=np.float32))) for name, s in shapes.items()}


def write_folder(folder: Path, values: Mapping[str, Any] = TINY, tensors: Tensors | None = None) -> Path:
    """A single-file checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(values)))
    write_safetensors(folder / "model.safetensors", model_tensors(values) if tensors is None else tensors)
    return folder


def write_shards(folder: Path, shards: dict[str, Tensors], weight_map: dict[str, str] | None = None) -> Path:
    """A sharded checkpoint of TINY; `weight_map` as the shards have it unless given."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    for file, tensors in shards.items():
        write_safetensors(folder / file, tensors)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "tokenizer.json", folder / "tokenizer.json")
