"""Decode's matrix-vector products alone: µs, GB/s and share of the read ceiling, over every shape of the given models.

    python -m bench.gemv [--model 7b …] [--tp 1 …] [--dtype bf16 fp8] [--blocks-per-sm N …] [--torch]

Each product runs in a graph over enough copies of its weights to leave the L2 behind (512 MiB at least), with
programmatic dependent launch, as in decode. GB/s counts the weights alone. Beside it, on the same weights: the bare
product by cuBLASLt in bf16, without what ours does before and after (it has none for one row of fp8 weights); and with
--torch the same work as torch.compile makes it (bench/peers/torch_compile.py, in a process of its own).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.common import check_shares, command, environment, read_ceiling, result_arguments, save, time_ms
from bench.peers.cublaslt import CublasLt, open_cublaslt
from loaders.synthetic import SIZES
from qwen_raw.cli.arguments import Parser, natural, positive
from qwen_raw.config import ModelConfig
from qwen_raw.device import BF16, E4M3, F32, I32, Buffer
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.gemv import Gemv
from qwen_raw.kernels.gemv_bf16 import GEMV as GEMV_BF16
from qwen_raw.kernels.gemv_fp8 import GEMV as GEMV_FP8
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.synthetic import synthetic_bf16, synthetic_e4m3

ROTATE_BYTES = 512 << 20
LAUNCHES = 64
EPS = 1e-6
GEMVS = {"bf16": GEMV_BF16, "fp8": GEMV_FP8}


class Case:
    """One product on its own buffers: `launch(i)` uses the i-th copy of the weights."""

    def __init__(self, dev: CudaDevice, c: ModelConfig, op: str, gemv: Gemv, tp: int) -> None:
        self.dev, self.op, self.gemv, fp8 = dev, op, gemv, gemv.fp8
        heads, kv = c.H // tp, max(1, c.KV // tp)
        qkv_rows = (heads + 2 * kv) * c.HD
        self.N, self.K = {
            "qkv": (qkv_rows, c.D),
            "o": (c.D, heads * c.HD),
            "gate_up": (2 * (c.I // tp), c.D),
            "down": (c.D, c.I // tp),
            "head": (c.V // tp, c.D),
        }[op]
        self.nbytes = self.N * self.K * (1 if fp8 else 2)
        copies = max(2, -(-ROTATE_BYTES // self.nbytes))
        self.weights = [self._linear(i, fp8) for i in range(copies)]
        self.h, self.x, self.g = (
            dev.zeros((n,), t) for n, t in ((max(self.N, self.K), F32), (self.K, BF16), (c.D, BF16))
        )
        synthetic_bf16(dev, self.x, 3, 0, 1.0)
        self.h.upload(np.random.default_rng(0).standard_normal(self.h.shape).astype(np.float32))
        self.g.upload(np.full(c.D, 0x3F80, np.uint16))
        self.out = self._outputs(c, heads, kv)

    def _linear(self, i: int, fp8: bool) -> Linear:
        weight = self.dev.empty((self.N, self.K), E4M3 if fp8 else BF16)
        if fp8:
            synthetic_e4m3(self.dev, weight, i, 1)
            return Linear(weight, self.dev.array(np.full(self.N, 1e-4, np.float32)))
        synthetic_bf16(self.dev, weight, i, 1, 0.02)
        return Linear(weight)

    def _outputs(self, c: ModelConfig, heads: int, kv: int) -> list[Buffer]:
        if self.op == "qkv":
            cache = [self.dev.zeros((kv, 16, c.HD), BF16) for _ in range(2)]
            rope, pos = self.dev.zeros((16, c.HD // 2, 2), F32), self.dev.zeros((1,), I32)
            return [self.dev.zeros((heads, c.HD), BF16), *cache, self.dev.zeros((self.N,), F32), rope, pos]
        if self.op == "gate_up":
            return [self.dev.zeros((self.N // 2,), BF16)]
        return [self.dev.zeros((self.N,), F32)]

    def launch(self, i: int, gemv: Gemv, grid: int | None) -> None:
        w, dev = self.weights[i % len(self.weights)], self.dev
        h, options = self.h.view((self.K,)), {"pdl": True, "grid": grid}
        if self.op == "qkv":
            q, k, v, bias, rope, pos = self.out
            gemv.qkv(dev, q, k, v, h, self.g, w, bias, rope, pos, EPS, **options)  # type: ignore[arg-type]
        elif self.op == "gate_up":
            gate, up = (self._half(w, part) for part in range(2))
            gemv.swiglu(dev, self.out[0], h, self.g, gate, up, EPS, **options)  # type: ignore[arg-type]
        elif self.op == "head":
            gemv.logits(dev, self.out[0], h, self.g, w, EPS, **options)  # type: ignore[arg-type]
        else:
            gemv.add(dev, self.out[0], self.x, w, **options)  # type: ignore[arg-type]

    def library(self, lt: CublasLt, x: Buffer, y: Buffer) -> Callable[[int], None]:
        """Launches of cuBLASLt: the bare product y bf16 [M, N] = x [M, K]·Wᵀ of the i-th copy of the weights."""
        product, stream = lt.product(x.shape[0], self.N, self.K, fp8=False, scale=None), int(self.dev.stream.handle)
        return lambda i: product.launch(y, x, self.weights[i % len(self.weights)].weight, stream)

    def _half(self, w: Linear, part: int) -> Linear:
        n = self.N // 2
        scale = w.scale.view((n,), part * n) if w.scale is not None else None
        return Linear(w.weight.view((n, self.K), part * n * self.K), scale)


def graph_us(dev: CudaDevice, launch: Callable[[int], None]) -> float:
    """Microseconds a launch in a graph of LAUNCHES."""
    launch(0)
    with dev.capture() as capture:
        for i in range(LAUNCHES):
            launch(i)
    timing = time_ms(dev, capture.graph.launch, repeats=7, warmup=2)
    capture.graph.close()
    return timing.median * 1e3 / LAUNCHES


def torch_rows(rows: list[dict[str, Any]], repeats: int = 7) -> None:
    """Add torch_us and the version to `rows`, from a process of PyTorch a dtype; prints why if it fails."""
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = {(row["op"], row["N"], row["K"]): row for row in rows if row["dtype"] == dtype}
        words = ["--shapes", json.dumps([list(key) for key in mine]), "--dtype", dtype, "--launches", str(LAUNCHES)]
        command = [sys.executable, "-m", "bench.peers.torch_compile", *words, "--repeats", str(repeats)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in filter(lambda text: text.startswith("{"), done.stdout.splitlines()):
            theirs = json.loads(line)
            row = mine[theirs["op"], theirs["N"], theirs["K"]]
            row |= {"torch_us": theirs["us"], "torch": theirs["torch"]}
            print(f"torch.compile {dtype} {row['op']:8} {theirs['us']:8.2f} µs beside {row['us']:8.2f}", flush=True)
        if done.returncode:
            print(f"# torch.compile: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")


def measure(
    dev: CudaDevice, size: str, tp: int, dtype: str, blocks: list[int], ceiling: float, lt: CublasLt | None
) -> list[dict[str, Any]]:
    """One row a product and blocks-per-SM setting (0: the launcher's own choice)."""
    rows = []
    for op in ("qkv", "o", "gate_up", "down", "head"):
        if op == "head" and dtype != "bf16":
            continue
        case = Case(dev, SIZES[size], op, GEMVS[dtype], tp)
        theirs = None
        if lt is not None and dtype == "bf16":
            y = dev.empty((1, case.N), BF16)
            theirs = graph_us(dev, case.library(lt, case.x.view((1, case.K)), y))
        for n in blocks:
            grid = n * dev.sm_count or None
            try:
                us = graph_us(dev, lambda i, g=grid, c=case: c.launch(i, c.gemv, g))  # type: ignore[misc]
            except QwenRawError as error:  # a setting that the kernel refuses is a row too
                print(f"{size:5} tp{tp} {dtype} {op:8} blocks/SM {n}: {error}")
                continue
            rate = case.nbytes / (us * 1e-6)
            variant, threads, _ = case.gemv.variants.choose({"o": "add", "down": "add"}.get(op, op), case.K)
            row = {"model": size, "tp": tp, "dtype": dtype, "op": op, "N": case.N, "K": case.K, "blocks_per_sm": n}
            row |= {"variant": variant, "threads": threads, "us": us, "gb_s": rate / 1e9}
            rows.append(row | {"of_read": rate / ceiling} | ({"cublaslt_us": theirs} if theirs else {}))
            print(
                f"{size:5} tp{tp} {dtype} {op:8} {f'{case.N}×{case.K}':14} blocks/SM {n} "
                f"{variant:3} {threads:4} thr "
                f"{us:8.2f} µs {rate / 1e9:7.0f} GB/s {rate / ceiling:6.3f}"
                + (f"   cuBLASLt {theirs:8.2f} µs" if theirs else ""),
                flush=True,
            )
    return rows


def main() -> int:
    parser = Parser("python -m bench.gemv", description="decode's matrix-vector products")
    parser.add_argument("--model", nargs="+", default=["7b"], choices=list(SIZES))
    parser.add_argument("--tp", nargs="+", type=positive, default=[1])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp8"], choices=list(GEMVS))
    parser.add_argument("--blocks-per-sm", nargs="+", type=natural, default=[0], help="0: the launcher's own choice")
    parser.add_argument("--no-peers", action="store_true", help="without cuBLASLt")
    parser.add_argument("--torch", action="store_true", help="torch.compile too, where PyTorch is installed")
    result_arguments(parser, "gemv.json")
    a = parser.parse_args()
    check_shares(a.model, a.tp, fp8="fp8" in a.dtype)
    dev = CudaDevice(0)
    ceiling = read_ceiling(dev)
    print(f"# {dev.name}, {dev.driver}; reads reach {ceiling / 1e12:.2f} TB/s")
    lt, peer = open_cublaslt(dev, not a.no_peers)
    rows = []
    for size in a.model:
        for tp in a.tp:
            for dtype in a.dtype:
                rows += measure(dev, size, tp, dtype, a.blocks_per_sm, ceiling, lt)
                save("gemv", environment(dev, a.commit) | peer, rows, a.output)
    if a.torch:
        torch_rows(rows)
        save("gemv", environment(dev, a.commit) | peer, rows, a.output)
    dev.close()
    return 0


if __name__ == "__main__":
    command(main)
