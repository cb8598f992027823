"""Cases of gemv_each_bf16.cu and gemv_each_fp8.cu: every variant, with tolerances of one token's (kernel_cases.py).

A row's bits do not depend on how blocks share the rows of W and of the pass. All the same few blocks do, on a GPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
from conformance.kernel_cases import ADD, EPS, NORMED, Case, Outputs, exact, fp8_error, fp32, rotary, rounded
from conformance.machines import LIMIT_NS, MOST_RANKS, Array, Machine, Output
from kernel_reference import bf16_input, make_linear, rmsnorm, silu

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16, F32, Buffer
from qwen_raw.kernels.gemv_each import GemvEach
from qwen_raw.kernels.gemv_each_bf16 import GEMV_EACH as EACH_BF16
from qwen_raw.kernels.gemv_each_fp8 import GEMV_EACH as EACH_FP8
from qwen_raw.kernels.gemv_exchange import Exchange

M, N = 5, 29  # neither is a multiple of what an engine multiplies together
EXCHANGED = 13
Run = Callable[[Any, np.random.Generator, GemvEach, int], Outputs]


class Narrow:
    """A device as if it had one multiprocessor: launchers give each block several rows of W."""

    sm_count = 1

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def each_cases(each: GemvEach) -> list[Case]:
    """Every variant of a weight type's kernels for one rank."""
    plain: dict[str, Run] = {"add": add, "store": store}
    normed: dict[str, Run] = {"swiglu": swiglu, "qkv": qkv} | ({} if each.gemv.fp8 else {"logits": logits})

    def case(op: str, run: Run, variant: str, K: int) -> Case:
        return Case(
            f"gemv_each_{op}_{each.name}_{variant}", lambda machine, rng: run(Narrow(machine.dev), rng, each, K)
        )

    return [
        case(op, run, variant, K)
        for ops, lengths in ((plain, ADD), (normed, NORMED))
        for op, run in ops.items()
        for variant, K in lengths[each.name].items()
    ]


def add(dev: Any, rng: np.random.Generator, each: GemvEach, K: int) -> Outputs:
    old, (x, X), (w, W) = fp32(rng, M, N), bf16_input(rng, M, K), make_linear(dev, rng, N, K, each.gemv.fp8)
    h = dev.array(old)
    each.add(dev, h, dev.array(x), w)
    return {"h": Output(h.download(), fp8_error(W, X) + 2.0**-22 * np.abs(old) if each.gemv.fp8 else 0.0)}


def store(dev: Any, rng: np.random.Generator, each: GemvEach, K: int) -> Outputs:
    y, (x, X), (w, W) = dev.zeros((M, N), BF16), bf16_input(rng, M, K), make_linear(dev, rng, N, K, each.gemv.fp8)
    each.store(dev, y, dev.array(x), w)
    return {"y": rounded(y.download(), fp8_error(W, X)) if each.gemv.fp8 else exact(y.download())}


def normed_input(dev: Any, rng: np.random.Generator, K: int) -> tuple[Buffer, Buffer, Array]:
    """(h, g on the device; RMSNorm's result float64)."""
    h, (g, values) = 3 * fp32(rng, M, K), bf16_input(rng, K)
    return dev.array(h), dev.array(g), rmsnorm(h, values, EPS)


def swiglu(dev: Any, rng: np.random.Generator, each: GemvEach, K: int) -> Outputs:
    """rsqrtf and expf: tens of fp32 ulp of the result. fp8: what tensor cores may be off by, in either factor."""
    h, g, n = normed_input(dev, rng, K)
    (gate, G), (up, U) = (make_linear(dev, rng, N, K, each.gemv.fp8) for _ in range(2))
    act = dev.zeros((M, N), BF16)
    each.swiglu(dev, act, h, g, gate, up, EPS)
    # silu' is at most 1.1.
    slack = 1.1 * fp8_error(G, n) * np.abs(n @ U.T) + np.abs(silu(n @ G.T)) * fp8_error(U, n)
    return {"act": rounded(act.download(), slack if each.gemv.fp8 else 0.0)}


def qkv(dev: Any, rng: np.random.Generator, each: GemvEach, K: int) -> Outputs:
    """rsqrtf, and the bias is contracted with the scaling; a rotation adds the errors of two sums on tensor cores."""
    H, KV, HD, max_len, pos = 2, 1, 8, M + 5, 3
    h, g, n = normed_input(dev, rng, K)
    w, W = make_linear(dev, rng, (H + 2 * KV) * HD, K, each.gemv.fp8)
    bias, rope = dev.array(fp32(rng, w.N)), dev.array(rotary(rng, max_len, HD))
    q, k, v = dev.zeros((M, H, HD), BF16), dev.zeros((KV, max_len, HD), BF16), dev.zeros((KV, max_len, HD), BF16)
    each.qkv(dev, q, k, v, h, g, w, bias, rope, dev.array(np.array([pos], np.int32)), EPS)
    got = {"q": q.download(), "k": k.download(), "v": v.download()}
    slack = 2.0**-19 * float(np.abs(bf16_to_f32(got["q"])).max())
    slack += 2 * float(fp8_error(W, n).max()) if each.gemv.fp8 else 0.0
    inside = slice(pos, pos + M)
    rows = {name: rounded(bits if name == "q" else bits[:, inside], slack) for name, bits in got.items()}
    return rows | {f"rest of {name}": exact(np.delete(got[name], inside, 1)) for name in "kv"}


def logits(dev: Any, rng: np.random.Generator, each: GemvEach, K: int) -> Outputs:
    h, g, _ = normed_input(dev, rng, K)
    out = dev.zeros((M, 67), F32)
    each.logits(dev, out, h, g, make_linear(dev, rng, 67, K, False)[0], EPS)
    values = out.download()
    return {"logits": Output(values, 2.0**-21 * np.abs(values.astype(np.float64)))}


def exchange(each: GemvEach, variant: str, K: int) -> Case:
    """Three sums in a row into h, as rank_cases.gemv_exchange: bf16 in every bit, fp8 as far off as all its terms."""
    entry = f"gemv_each_exchange_{each.name}_{variant}"

    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        base, fp8 = fp32(rng, M, EXCHANGED), each.gemv.fp8
        ends = [
            replace(end, dev=cast(Any, Narrow(end.dev)))
            for end in Exchange.create(machine.ranks, base.size, limit_ns=LIMIT_NS)
        ]
        # h is rounded three times, each time from a sum that may be off.
        h, allowed, work = [rank.array(base) for rank in machine.ranks], 2.0**-21 * np.abs(base), []
        for end, own, rank in zip(ends, h, machine.ranks, strict=True):
            x, X = bf16_input(rng, M, K)
            weights, values = zip(*(make_linear(rank, rng, EXCHANGED, K, fp8) for _ in range(3)), strict=True)
            allowed = allowed + sum(fp8_error(W, X) for W in values)
            work.append((end, own, rank.array(x), weights))
        with machine.together((f"gemv_each_{each.name}", entry)):
            for number in range(3):
                for end, own, x, weights in work:
                    each.exchange(end, number, own, x, weights[number])
        assert [end.limit.fault() for end in ends] == [None] * len(ends)
        return {f"rank {r}": Output(own.download(), allowed if fp8 else 0.0) for r, own in enumerate(h)}

    return Case(entry, run, MOST_RANKS if variant == "c1" else 2)


def exchange_cases() -> list[Case]:
    """Those that take several ranks."""
    return [exchange(each, v, ADD[each.name][v]) for each in (EACH_BF16, EACH_FP8) for v in each.threads["exchange"]]


EACH = [case for each in (EACH_BF16, EACH_FP8) for case in each_cases(each)]
