"""Cases of gemv_rows_bf16.cu and gemv_rows_fp8.cu: every variant, S = 2 splits among them.

Tolerances: those of tensor-core sums (`cut`), and of the two parts of a normed input: the GPU contracts the product
with the subtraction of the upper part, so that the lower one may round the other way: 2^-17 of the product, seldom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from conformance.kernel_cases import EPS, Case, Outputs, cut, exact, fp32, rotary, rounded
from conformance.machines import Array, Machine, Output
from kernel_reference import bf16_input, make_linear, rmsnorm, silu

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16, F32
from qwen_raw.kernels.gemv_rows import RowsWorkspace
from qwen_raw.kernels.gemv_rows_bf16 import GEMV_ROWS as ROWS_BF16
from qwen_raw.kernels.gemv_rows_fp8 import GEMV_ROWS as ROWS_FP8

# Tokens of a variant: rows given to it, and a K that takes two splits of it.
NORMED = {4: (3, 4112), 8: (7, 4112), 16: (13, 2064)}
PLAIN = {8: (5, 8208), 16: (11, 4112)}
R = 3  # ranges of rows, the same on both machines


def rows_cases(rows: Any) -> list[Case]:
    """Every variant of a weight type's kernels."""
    suffix = "fp8" if rows.fp8 else "bf16"
    plain: dict[str, Callable[..., Outputs]] = {"add": add, "store": store}
    normed: dict[str, Callable[..., Outputs]] = {"swiglu": swiglu, "qkv": qkv}
    if not rows.fp8:
        normed["logits"] = logits

    def case(op: str, run: Callable[..., Outputs], tokens: int, M: int, K: int) -> Case:
        return Case(
            f"gemv_rows_{op}_{suffix}_m{tokens}",
            lambda machine, rng: run(machine, rng, rows, M, K) | with_prefix(run(machine, rng, rows, M, 80)),
        )

    return [
        case(op, run, tokens, *size)
        for ops, sizes in ((plain, PLAIN), (normed, NORMED))
        for op, run in ops.items()
        for tokens, size in sizes.items()
        if tokens != 4 or not rows.fp8
    ]


def with_prefix(outputs: Outputs) -> Outputs:
    return {f"one split, {name}": output for name, output in outputs.items()}


def workspace(machine: Machine, M: int, N: int) -> RowsWorkspace:
    return RowsWorkspace.create(machine.dev, 4 * M * N)


def add(machine: Machine, rng: np.random.Generator, rows: Any, M: int, K: int) -> Outputs:
    dev, old = machine.dev, fp32(rng, M, 37)
    h, (x, X), (w, W) = dev.array(old), bf16_input(rng, M, K), make_linear(machine.dev, rng, 37, K, rows.fp8)
    rows.add(dev, h, dev.array(x), w, workspace(machine, M, 37), R=R)
    new = h.download()
    return {"h": Output(new, cut(machine, X, W) + 2.0**-22 * (np.abs(old) + np.abs(new)))}


def store(machine: Machine, rng: np.random.Generator, rows: Any, M: int, K: int) -> Outputs:
    dev, y = machine.dev, machine.dev.zeros((M, 37), BF16)
    (x, X), (w, W) = bf16_input(rng, M, K), make_linear(machine.dev, rng, 37, K, rows.fp8)
    rows.store(dev, y, dev.array(x), w, workspace(machine, M, 37), R=R)
    return {"y": rounded(y.download(), cut(machine, X, W))}


def normed_input(machine: Machine, rng: np.random.Generator, M: int, K: int) -> tuple[Any, Any, Array]:
    """(h, g on the device; RMSNorm's result float64)."""
    h, (g, gv) = 3 * fp32(rng, M, K), bf16_input(rng, K)
    return machine.dev.array(h), machine.dev.array(g), rmsnorm(h, gv, EPS)


def spread(machine: Machine, n: Array, W: Array) -> Array:
    """What sums of normed inputs may differ by: tensor cores, lower parts, rsqrtf."""
    return cut(machine, n, W) + 2.0**-17 * (np.abs(n) @ np.abs(W).T) + 2.0**-21 * np.abs(n @ W.T)


def swiglu(machine: Machine, rng: np.random.Generator, rows: Any, M: int, K: int) -> Outputs:
    dev, act = machine.dev, machine.dev.zeros((M, 35), BF16)
    h, g, n = normed_input(machine, rng, M, K)
    (gate, G), (up, U) = (make_linear(dev, rng, 35, K, rows.fp8) for _ in range(2))
    rows.swiglu(dev, act, h, g, gate, up, EPS, workspace(machine, M, 70), R=R)
    # silu' is at most 1.1.
    slack = 1.1 * spread(machine, n, G) * np.abs(n @ U.T) + np.abs(silu(n @ G.T)) * spread(machine, n, U)
    return {"act": rounded(act.download(), slack)}


def qkv(machine: Machine, rng: np.random.Generator, rows: Any, M: int, K: int) -> Outputs:
    dev, H, KV, HD, pos = machine.dev, 2, 1, 8, 3
    max_len = M + 5
    h, g, n = normed_input(machine, rng, M, K)
    w, W = make_linear(dev, rng, (H + 2 * KV) * HD, K, rows.fp8)
    bias, rope = dev.array(fp32(rng, w.N)), dev.array(rotary(rng, max_len, HD))
    q, k, v = dev.zeros((M, H, HD), BF16), dev.zeros((KV, max_len, HD), BF16), dev.zeros((KV, max_len, HD), BF16)
    at = dev.array(np.array([pos], np.int32))
    rows.qkv(dev, q, k, v, h, g, w, bias, rope, at, EPS, workspace(machine, M, w.N), R=R)
    got = {"q": q.download(), "k": k.download(), "v": v.download()}
    # A rotation adds the errors of two sums, and a few roundings of numbers no larger than the largest.
    slack = 2 * float(spread(machine, n, W).max()) + 2.0**-19 * float(np.abs(bf16_to_f32(got["q"])).max())
    inside = slice(pos, pos + M)
    found = {name: rounded(bits if name == "q" else bits[:, inside], slack) for name, bits in got.items()}
    return found | {f"rest of {name}": exact(np.delete(got[name], inside, 1)) for name in "kv"}


def logits(machine: Machine, rng: np.random.Generator, rows: Any, M: int, K: int) -> Outputs:
    dev, out = machine.dev, machine.dev.zeros((M, 67), F32)
    h, g, n = normed_input(machine, rng, M, K)
    w, W = make_linear(dev, rng, 67, K, False)
    rows.logits(dev, out, h, g, w, EPS, workspace(machine, M, 67), R=R)
    return {"logits": Output(out.download(), spread(machine, n, W))}


ROWS = [case for rows in (ROWS_BF16, ROWS_FP8) for case in rows_cases(rows)]
