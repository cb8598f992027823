"""Loading a checkpoint folder: the host never holds a second copy of a tensor, converted or not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import TINY

from loaders.checkpoint import tensor_shapes
from loaders.config_json import parse_config

ROOT = Path(__file__).parents[2]
# One layer of 0.5B's widths; the embedding is by far the largest tensor.
CONFIG: dict[str, Any] = TINY | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 60000,
    "tie_word_embeddings": True,
}
LARGEST = 60000 * 896 * 2
SLACK = 64 << 20  # pieces on their way, what a conversion passes through, the allocator

# Prints by how many bytes anonymous memory rose, while loading, above what it was before plus what stays.
SCRIPT = """
import sys, threading, time
from loaders.checkpoint import open_checkpoint
from qwen_raw.model.shard import Shard
from qwen_raw.model.weights import load_weights
from qwen_raw.simt.device import SimDevice

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

peak, stop = 0, threading.Event()

def watch():
    global peak
    while not stop.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

checkpoint = open_checkpoint(sys.argv[1])
with SimDevice() as device:
    watcher = threading.Thread(target=watch)
    watcher.start()
    weights = load_weights(device, checkpoint, Shard(checkpoint.config), fp8=False)
    stop.set()
    watcher.join()
    print(peak - anonymous(), weights.embed.nbytes)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in f16, which has to become bf16 on the way: random bits of small numbers."""
    path = tmp_path_factory.mktemp("checkpoint")
    shapes = tensor_shapes(parse_config(CONFIG))
    header, at = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    rng = np.random.default_rng(1)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write((rng.integers(0, 1 << 16, int(np.prod(shape)), np.uint16) & np.uint16(0xBBFF)).tobytes())
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_no_second_copy_of_a_tensor(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    if "C++17 compiler" in done.stderr:
        pytest.skip("the simulator needs a C++17 compiler")
    assert done.returncode == 0, done.stderr
    extra, embedding = map(int, done.stdout.split())
    assert embedding == LARGEST > SLACK
    assert extra < SLACK, f"{extra / 2**20:.0f} MiB more than the weights"
