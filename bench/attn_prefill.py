"""Prefill's attention alone: µs and TFLOP/s of the plain kernel and Hopper's, PyTorch's beside them.

    python -m bench.attn_prefill [--heads 28/4/128 …] [--tokens 128 …] [--before 0 …] [--no-peers]

TFLOP/s counts 4·HD·H·Σ(before + t + 1), what is under the diagonal. A launch runs in a graph over enough sets of
inputs to leave the L2 behind. PyTorch's scaled_dot_product_attention, by its own flash kernel and by cuDNN's, runs in
a process of its own (bench/peers/torch_sdpa.py) and has no earlier keys. Where Hopper's kernel runs,
prefill takes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bench.common import command, environment, result_arguments, save, time_ms
from qwen_raw.cli.arguments import Parser, natural, positive
from qwen_raw.device import BF16, Buffer
from qwen_raw.driver.device import CudaDevice
from qwen_raw.kernels.attention import suits_sm90
from qwen_raw.kernels.attn_prefill import attn_prefill
from qwen_raw.kernels.attn_prefill_sm90 import attn_prefill_sm90
from qwen_raw.kernels.synthetic import synthetic_bf16

ROTATE_BYTES = 128 << 20
TARGET_US = 3000.0  # of a graph


class Heads(NamedTuple):
    """Of one rank."""

    H: int
    KV: int
    HD: int

    def __str__(self) -> str:
        return f"{self.H}/{self.KV}/{self.HD}"


# 7B, 0.5B, 72B, and 72B on two, four and eight ranks.
DEFAULT = [
    Heads(28, 4, 128),
    Heads(14, 2, 64),
    Heads(64, 8, 128),
    Heads(32, 4, 128),
    Heads(16, 2, 128),
    Heads(8, 1, 128),
]
TOKENS = [16, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
Inputs = tuple[Buffer, Buffer, Buffer, Buffer, Buffer]


def heads(text: str) -> Heads:
    """H/KV/HD."""
    try:
        H, KV, HD = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: three numbers, as 28/4/128") from None
    if min(H, KV, HD) < 1 or H % KV or HD not in (64, 128):
        raise argparse.ArgumentTypeError(f"{text!r}: query heads, a divisor of them, and 64 or 128")
    return Heads(H, KV, HD)


def inputs(dev: CudaDevice, h: Heads, tokens: int, before: int) -> list[Inputs]:
    """Sets of out, q, keys, values and span, random; enough to leave the L2 behind, at most 64."""
    keys = before + tokens
    count = max(2, min(64, ROTATE_BYTES // (4 * h.HD * (tokens * h.H + keys * h.KV))))
    span = dev.array(np.array([before, tokens], np.int32))
    found: list[Inputs] = []
    for i in range(count):
        q, out = (dev.empty((tokens, h.H, h.HD), BF16) for _ in range(2))
        k, v = (dev.empty((h.KV, keys, h.HD), BF16) for _ in range(2))
        for number, (buffer, scale) in enumerate(((q, 2.0), (k, 1.0), (v, 1.0))):
            synthetic_bf16(dev, buffer, 3 * i + number, 0, scale)
        found.append((out, q, k, v, span))
    return found


def graph_us(dev: CudaDevice, attend: Callable[..., None], sets: list[Inputs]) -> float:
    """Microseconds a launch: the median of seven graphs of some milliseconds."""
    attend(dev, *sets[0])
    once = time_ms(dev, lambda: attend(dev, *sets[1]), repeats=3).median * 1e3
    launches = max(4, min(200, int(TARGET_US / once)))
    with dev.capture() as capture:
        for i in range(launches):
            attend(dev, *sets[i % len(sets)])
    timing = time_ms(dev, capture.graph.launch, repeats=7, warmup=2)
    capture.graph.close()
    return timing.median * 1e3 / launches


def measure(dev: CudaDevice, h: Heads, tokens: int, before: int) -> dict[str, Any]:
    """One row."""
    sets = inputs(dev, h, tokens, before)
    row: dict[str, Any] = {"H": h.H, "KV": h.KV, "HD": h.HD, "tokens": tokens, "before": before}
    row["gflop"] = 4e-9 * h.HD * h.H * (tokens * before + tokens * (tokens + 1) // 2)
    hopper = suits_sm90(dev.arch, h.HD)
    kernels: dict[str, Callable[..., None]] = {"plain": attn_prefill}
    if hopper:
        kernels["sm90"] = attn_prefill_sm90
    for name, attend in kernels.items():
        row[f"{name}_us"] = graph_us(dev, attend, sets)
        row[f"{name}_tflop_s"] = row["gflop"] / row[f"{name}_us"] * 1e3
    print(line(row), flush=True)
    return row


def line(row: dict[str, Any]) -> str:
    """A row as people read it."""
    text = f"{row['H']:2}/{row['KV']}/{row['HD']:<3} {row['tokens']:5} after {row['before']:5}"
    for name in ("plain", "sm90", "flash", "cudnn"):
        if f"{name}_us" in row:
            text += f"   {name} {row[f'{name}_us']:8.1f} µs {row['gflop'] / row[f'{name}_us'] * 1e3:4.0f} TFLOP/s"
    return text


def peers(rows: list[dict[str, Any]], written: Callable[[], object]) -> None:
    """Add PyTorch's times to the rows without earlier keys, `written` after each; prints why if it does not run."""
    mine = {(row["H"], row["KV"], row["HD"], row["tokens"]): row for row in rows if not row["before"]}
    words = ["--shapes", json.dumps([list(shape) for shape in mine])]
    process = [sys.executable, "-m", "bench.peers.torch_sdpa", *words]
    with subprocess.Popen(process, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for text in filter(lambda text: text.startswith("{"), run.stdout):
            theirs = json.loads(text)
            row = mine[tuple(theirs.pop("shape"))]
            row |= theirs
            print(line(row), flush=True)
            written()
    if run.returncode:
        print(f"# PyTorch did not run to its end: exit code {run.returncode}")


def main() -> int:
    parser = Parser("python -m bench.attn_prefill", description="prefill's attention")
    words = " ".join(map(str, DEFAULT))
    parser.add_argument("--heads", type=heads, nargs="+", default=DEFAULT, help=f"H/KV/HD; default {words}")
    parser.add_argument("--tokens", type=positive, nargs="+", default=TOKENS)
    parser.add_argument("--before", type=natural, nargs="+", default=[0], help="keys that the cache holds already")
    parser.add_argument("--no-peers", action="store_true", help="without PyTorch")
    result_arguments(parser, "attn_prefill.json")
    a = parser.parse_args()
    dev = CudaDevice(0)
    print(f"# {dev.name}, {dev.driver}")
    rows = [measure(dev, h, tokens, before) for h in a.heads for before in a.before for tokens in a.tokens]
    env = environment(dev, a.commit)
    dev.close()
    write = partial(save, "attn_prefill", env, rows, a.output)
    write()
    if not a.no_peers:
        peers(rows, write)
    return 0


if __name__ == "__main__":
    command(main)
