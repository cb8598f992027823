"""Start-up: until a model is ready to generate, and a checkpoint folder to the GPU beside a plain read of its file.

    python -m bench.startup [--model random:7b:bf16 …] [--checkpoint 0.5b]

Ready means what `qwen_raw.load` returns: device opened, kernels compiled or taken from the cache, weights in place. Run
it twice for the time with a warm kernel cache. The checkpoint is written to a temporary folder first, random bytes in
that size's shapes. It is read and loaded from the page cache, which bounds both from above, and again after the system
was asked to forget the file's pages: from the disk, as far as there is one below.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import qwen_raw
from bench.common import command, environment, result_arguments, save
from bench.decode import check_models, split_spec
from loaders.checkpoint import open_checkpoint, tensor_shapes
from loaders.synthetic import SIZES
from qwen_raw.cli.arguments import Parser
from qwen_raw.config import ModelConfig
from qwen_raw.driver.device import CudaDevice
from qwen_raw.model.shard import Shard
from qwen_raw.model.weights import load_weights

CHUNK = 16 << 20


def write_checkpoint(folder: Path, c: ModelConfig) -> Path:
    """config.json and model.safetensors in bf16, random bits of finite numbers. Returns the weights' file."""
    values = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "hidden_size": c.D, "intermediate_size": c.I, "max_position_embeddings": c.max_position,
        "num_attention_heads": c.H, "num_hidden_layers": c.L, "num_key_value_heads": c.KV, "rms_norm_eps": c.rms_eps,
        "rope_theta": c.rope_theta, "tie_word_embeddings": c.tied, "vocab_size": c.V,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    header, at = {}, 0
    for name, shape in tensor_shapes(c).items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(header).encode()
    noise = (np.random.default_rng(0).integers(0, 1 << 16, CHUNK // 2, np.uint16) & np.uint16(0xBFFF)).tobytes()
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, at, CHUNK):
            file.write(noise[: min(CHUNK, at - begin)])
    return path


def plain_read(path: Path) -> float:
    """Seconds to read the file through one buffer."""
    buffer = bytearray(CHUNK)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def ready(spec: str) -> dict[str, Any]:
    """Seconds until `spec` is ready."""
    model, dtype = split_spec(spec)
    begin = time.perf_counter()
    with qwen_raw.load(model, device="cuda", dtype=dtype):
        seconds = time.perf_counter() - begin
    print(f"{spec}: ready in {seconds:.2f} s", flush=True)
    return {"model": model, "dtype": dtype, "ready_s": seconds}


def forget(path: Path) -> None:
    """Ask the system to drop the file's pages from its cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def checkpoint(dev: CudaDevice, size: str) -> list[dict[str, Any]]:
    """A folder of `size`: plain read and load, GB/s each, from the page cache and without it."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        path = write_checkpoint(Path(name), SIZES[size])
        nbytes = path.stat().st_size
        for cold in (False, True):
            prepare: Callable[[Path], object] = forget if cold else plain_read
            prepare(path)
            read_s = plain_read(path)
            prepare(path)
            begin = time.perf_counter()
            opened = open_checkpoint(name)
            weights = load_weights(dev, opened, Shard(opened.config), fp8=False)
            load_s = time.perf_counter() - begin
            del weights
            row: dict[str, Any] = {"checkpoint": size, "page_cache": not cold, "bytes": nbytes}
            row |= {"read_gb_s": nbytes / read_s / 1e9, "load_gb_s": nbytes / load_s / 1e9}
            rows.append(row)
            print(
                f"folder of {size}, {nbytes / 1e9:.2f} GB, {'forgotten' if cold else 'in the page cache'}: "
                f"read {row['read_gb_s']:.2f}, loaded {row['load_gb_s']:.2f} GB/s",
                flush=True,
            )
    return rows


def main() -> int:
    parser = Parser("python -m bench.startup", description="time until a model is ready")
    parser.add_argument("--model", nargs="+", default=["random:7b:bf16"])
    parser.add_argument("--checkpoint", choices=list(SIZES), default="0.5b")
    result_arguments(parser, "startup.json")
    a = parser.parse_args()
    check_models(a.model)
    dev = CudaDevice(0)
    rows = [ready(spec) for spec in a.model] + checkpoint(dev, a.checkpoint)
    save("startup", environment(dev, a.commit), rows, a.output)
    dev.close()
    return 0


if __name__ == "__main__":
    command(main)
