"""Prefill's products, ours and cuBLASLt's, each as a whole: what `gemm auto` chooses by.

    python -m bench.gemm_choice [--model 7b …] [--tp 1 …] [--dtype bf16 fp8] [--tokens 128 …] [--table]

Ours with its epilogue; cuBLASLt's with what it needs behind it: bias, RoPE and cache for Q, K and V, SwiGLU for gate
and up; h += is its own, and so are the scales of e4m3. Both over enough copies of the weights to leave the L2 behind,
in turns. `--table` also writes the times to qwen_raw/kernels/gemm_winners.json, beside those of shapes that were not
measured now.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bench.common import check_shares, command, environment, result_arguments, save
from bench.gemm import Case, graphs_us, make_case, make_weights, operation, shapes
from loaders.synthetic import SIZES
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.device import BF16, E4M3, F32
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels import gemm_bf16_sm90, gemm_fp8_sm90
from qwen_raw.kernels.cublaslt import CublasLt, load_library, version, version_text
from qwen_raw.kernels.lt_products import TABLE, LtProducts, always, table
from qwen_raw.kernels.products import Products, Sm90Products

KEY = ("dtype", "op", "N", "K", "tokens")


def launch(products: Products, case: Case) -> Callable[[int], None]:
    """The i-th launch of a whole operation."""
    dev, x, out = case.dev, case.x, case.out

    def run(i: int) -> None:
        w = case.weights[i % len(case.weights)]
        if case.op == "qkv":
            q, k, v, bias, rope, span = out
            products.qkv(dev, q, k, v, x, w, bias, rope, span)
        elif case.op == "swiglu":
            products.swiglu(dev, out[0], x, w.rows(0, case.N // 2), w.rows(case.N // 2, case.N // 2))
        elif case.op == "add":
            products.add(dev, out[0], x, w)
        else:
            products.store(dev, out[0], x, w)

    return run


def measure(case: Case, own: Sm90Products, lt: CublasLt) -> dict[str, Any]:
    """Microseconds of both; cuBLASLt's are None where it has no algorithm."""
    dev, T = case.dev, case.T
    theirs = LtProducts(own, lt, always, dev.empty((T * case.N,), BF16))
    row: dict[str, Any] = {"op": case.op, "N": case.N, "K": case.K, "tokens": T}
    expected = max(2e-6 * T * case.N * case.K / (900 if own.gemm.fp8 else 550), 5.0)
    try:
        launch(theirs, case)(0)
    except QwenRawError as error:
        (us,) = graphs_us(dev, [launch(own, case)], expected)
        return row | {"own_us": us, "cublaslt_us": None, "because": str(error)}
    us, us_lt = graphs_us(dev, [launch(own, case), launch(theirs, case)], expected)
    return row | {"own_us": us, "cublaslt_us": us_lt}


def line(row: dict[str, Any]) -> str:
    """A row as people read it."""
    theirs = row["cublaslt_us"]
    text = "no algorithm" if theirs is None else f"{theirs:8.1f} µs  {theirs / row['own_us']:5.2f}"
    return (
        f"{row['dtype']:4} {row['op']:6} {row['tokens']:5} × {row['N']:5} × {row['K']:5} "
        f"own {row['own_us']:8.1f} µs   cuBLASLt {text}"
    )


def write_table(env: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """These rows in the table, and what it had of other shapes."""
    new = {tuple(row[k] for k in KEY) for row in rows}
    kept = [row for row in table()["rows"] if tuple(row[k] for k in KEY) not in new] if TABLE.exists() else []
    times = [{k: row[k] for k in (*KEY, "own_us", "cublaslt_us")} for row in rows]
    lines = [json.dumps(row) for row in sorted([*kept, *times], key=lambda row: [str(row[k]).zfill(8) for k in KEY])]
    known = {k: env[k] for k in ("gpu", "driver", "commit", "cublaslt")}
    TABLE.write_text('{"environment": ' + json.dumps(known) + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]}\n")


def main() -> int:
    parser = Parser("python -m bench.gemm_choice", description="prefill's products by our kernels and by cuBLASLt")
    parser.add_argument("--model", nargs="+", default=["7b", "72b"], choices=list(SIZES))
    parser.add_argument("--tp", nargs="+", type=positive, default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--tokens", nargs="+", type=positive, default=[16, 64, 128, 512, 2048])
    parser.add_argument("--table", action="store_true", help=f"write {TABLE.name} too")
    result_arguments(parser, "gemm_choice.json")
    a = parser.parse_args()
    check_shares(a.model, a.tp, fp8="fp8" in a.dtype)
    dev = CudaDevice(0)
    lt = CublasLt.create(dev, load_library())
    env = environment(dev, a.commit) | {"cublaslt": version_text(version(lt.lib))}
    print(f"# {dev.name}, {dev.driver}; cuBLASLt {env['cublaslt']}")
    rows: list[dict[str, Any]] = []
    for dtype in a.dtype:
        fp8 = dtype == "fp8"
        gemm = (gemm_fp8_sm90 if fp8 else gemm_bf16_sm90).create(dev)
        room = (dev.empty((16,), E4M3), dev.empty((1,), F32)) if fp8 else (None, None)  # inputs are made beforehand
        own = Sm90Products(gemm, *room)
        for size in a.model:
            for tp in a.tp:
                for stage, (N, K) in shapes(SIZES[size], tp).items():
                    op, weights = operation(stage, tp), make_weights(dev, N, K, fp8)
                    for T in a.tokens:
                        case = make_case(dev, gemm, SIZES[size], tp, op, T, weights)
                        rows.append({"model": size, "tp": tp, "dtype": dtype} | measure(case, own, lt))
                        print(line(rows[-1]), flush=True)
        save("gemm_choice", env, rows, a.output)
        if a.table:
            write_table(env, rows)
    ahead = [row for row in rows if row["cublaslt_us"] is not None and row["cublaslt_us"] < row["own_us"]]
    print(f"# cuBLASLt is ahead at {len(ahead)} of {len(rows)}")
    dev.close()
    return 0


if __name__ == "__main__":
    command(main)
