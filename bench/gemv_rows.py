"""Decode's products for 1 to 16 tokens at once: µs, GB/s and share of the read ceiling, cuBLASLt beside.

    python -m bench.gemv_rows [--model 7b …] [--tp 1 …] [--dtype bf16 fp8] [--rows 2 4 8 16] [--no-peers]

As bench/gemv.py: a graph over copies of the weights that leave the L2 behind, dependent launches, GB/s of the weights
alone. cuBLASLt (bf16 only) computes the bare product into bf16: no norm, bias, rotation or activation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.common import check_shares, command, environment, read_ceiling, result_arguments, save
from bench.gemv import EPS, GEMVS, Case, graph_us
from bench.peers.cublaslt import CublasLt, open_cublaslt
from loaders.synthetic import SIZES
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.config import ModelConfig
from qwen_raw.device import BF16, F32
from qwen_raw.driver.device import CudaDevice
from qwen_raw.kernels.gemv_rows import MAX_ROWS, RowsWorkspace
from qwen_raw.kernels.gemv_rows_bf16 import GEMV_ROWS as ROWS_BF16
from qwen_raw.kernels.gemv_rows_fp8 import GEMV_ROWS as ROWS_FP8
from qwen_raw.kernels.synthetic import synthetic_bf16

ROWS = {"bf16": ROWS_BF16, "fp8": ROWS_FP8}


class RowsCase:
    """The products of `Case` on activations of MAX_ROWS tokens."""

    def __init__(self, dev: CudaDevice, c: ModelConfig, op: str, dtype: str, tp: int) -> None:
        self.dev, self.op, self.rows = dev, op, ROWS[dtype]
        self.one = Case(dev, c, op, GEMVS[dtype], tp)
        self.N, self.K, self.heads = self.one.N, self.one.K, (c.H // tp, c.HD)
        self.x = dev.empty((MAX_ROWS, self.K), BF16)
        synthetic_bf16(dev, self.x, 3, 0, 1.0)
        rng = np.random.default_rng(0)
        self.h = dev.array(rng.standard_normal((MAX_ROWS, self.K)).astype(np.float32))
        self.out = dev.zeros((MAX_ROWS, self.N), F32)
        self.ws = RowsWorkspace.create(dev, 16 * MAX_ROWS * self.N)

    def launch(self, i: int, M: int) -> None:
        one, dev, rows, ws = self.one, self.dev, self.rows, self.ws
        w = one.weights[i % len(one.weights)]
        h, wide = self.h.view((M, self.K)), self.out.view((M, self.N))
        if self.op == "qkv":
            q = self.out.view((M, *self.heads), dtype=BF16)
            _, k, v, bias, rope, pos = one.out
            rows.qkv(dev, q, k, v, h, one.g, w, bias, rope, pos, EPS, ws, pdl=True)
        elif self.op == "gate_up":
            act = self.out.view((M, self.N // 2), dtype=BF16)
            rows.swiglu(dev, act, h, one.g, one._half(w, 0), one._half(w, 1), EPS, ws, pdl=True)
        elif self.op == "head":
            rows.logits(dev, wide, h, one.g, w, EPS, ws, pdl=True)
        else:
            rows.add(dev, wide, self.x.view((M, self.K)), w, ws, pdl=True)


def measure(
    dev: CudaDevice, size: str, tp: int, dtype: str, counts: list[int], ceiling: float, lt: CublasLt | None
) -> list[dict[str, Any]]:
    """One row a product and number of tokens."""
    found = []
    for op in ("qkv", "o", "gate_up", "down", "head"):
        if op == "head" and dtype != "bf16":
            continue
        case = RowsCase(dev, SIZES[size], op, dtype, tp)
        for M in counts:
            us = graph_us(dev, lambda i, M=M, c=case: c.launch(i, M))  # type: ignore[misc]
            rate = case.one.nbytes / (us * 1e-6)
            row: dict[str, Any] = {"model": size, "tp": tp, "dtype": dtype, "op": op, "rows": M, "N": case.N}
            row |= {"K": case.K, "us": us, "gb_s": rate / 1e9, "of_read": rate / ceiling}
            text = f"{us:8.2f} µs {rate / 1e9:7.0f} GB/s {rate / ceiling:6.3f}"
            if lt is not None and dtype == "bf16":
                y = case.out.view((M, case.N), dtype=BF16)
                row["cublaslt_us"] = graph_us(dev, case.one.library(lt, case.x.view((M, case.K)), y))
                text += f"   cuBLASLt {row['cublaslt_us']:8.2f} µs"
            found.append(row)
            print(f"{size:5} tp{tp} {dtype} {op:8} {f'{case.N}×{case.K}':14} {M:2} rows {text}", flush=True)
    return found


def main() -> int:
    parser = Parser("python -m bench.gemv_rows", description="decode's products for several tokens")
    parser.add_argument("--model", nargs="+", default=["7b"], choices=list(SIZES))
    parser.add_argument("--tp", nargs="+", type=positive, default=[1])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp8"], choices=list(ROWS))
    parser.add_argument(
        "--rows", nargs="+", type=int, choices=range(1, MAX_ROWS + 1), metavar="N", default=[2, 4, 8, 16]
    )
    parser.add_argument("--no-peers", action="store_true", help="without cuBLASLt")
    result_arguments(parser, "gemv_rows.json")
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
                rows += measure(dev, size, tp, dtype, a.rows, ceiling, lt)
                save("gemv_rows", environment(dev, a.commit) | peer, rows, a.output)
    dev.close()
    return 0


if __name__ == "__main__":
    command(main)
