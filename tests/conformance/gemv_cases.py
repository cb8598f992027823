"""Cases of decode's matrix-vector products (tolerances: kernel_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from conformance.kernel_cases import EPS, Case, Outputs, exact, fp32, rotary, rounded
from conformance.machines import Machine, Output
from kernel_reference import bf16_input, make_linear

from loaders.dtypes import bf16_to_f32
from qwen_raw.device import BF16, F32
from qwen_raw.kernels.gemv_bf16 import GEMV as GEMV_BF16
from qwen_raw.kernels.gemv_fp8 import GEMV as GEMV_FP8
from qwen_raw.kernels.sample import Sampler

# Row lengths K that take each variant of C packs a thread: one tail longer than the variant before covers.
NORMED = {"bf16": {1: 136, 2: 4232}, "fp8": {1: 272, 2: 4368}}
ADD = {"bf16": NORMED["bf16"] | {4: 8328, 8: 20616}, "fp8": NORMED["fp8"] | {4: 20496}}


def gemv_cases(gemv: Any) -> list[Case]:
    """Every variant of a weight type's kernels."""
    suffix = "fp8" if gemv.fp8 else "bf16"
    ops: dict[str, Callable[..., Outputs]] = {
        "add": gemv_add,
        "store": gemv_store,
        "swiglu": partial(run_normed, op="swiglu"),
        "qkv": partial(run_normed, op="qkv"),
    }
    if not gemv.fp8:
        ops["logits"] = partial(run_normed, op="logits")

    def case(op: str, C: int, K: int) -> Case:
        return Case(f"gemv_{op}_{suffix}_c{C}", lambda machine, rng: ops[op](machine.dev, rng, gemv, K))

    def choice(C: int, K: int) -> Case:
        return Case(f"gemv_choose_{suffix}_c{C}", lambda machine, rng: gemv_choose(machine, rng, gemv, K))

    choices = [] if gemv.fp8 else [choice(C, K) for C, K in NORMED[suffix].items()]
    return choices + [
        case(op, C, K) for op in ops for C, K in (ADD if op in ("add", "store") else NORMED)[suffix].items()
    ]


def gemv_add(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    """bf16: every bit. fp8: h + sum·scale is contracted, which saves the product's rounding: an ulp of h or of it."""
    old = fp32(rng, 37)
    h = dev.array(old)
    gemv.add(dev, h, dev.array(bf16_input(rng, K)[0]), make_linear(dev, rng, 37, K, gemv.fp8)[0], grid=3)
    new = h.download()
    return {"h": Output(new, 2.0**-22 * (np.abs(old) + np.abs(new)).astype(np.float64) if gemv.fp8 else 0.0)}


def gemv_store(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    """The sums agree in every bit, and so do their products with a scale, and the rounding."""
    y, x = dev.zeros((37,), BF16), dev.array(bf16_input(rng, K)[0])
    gemv.store(dev, y, x, make_linear(dev, rng, 37, K, gemv.fp8)[0], grid=3)
    return {"y": exact(y.download())}


@dataclass(frozen=True)
class Normed:
    """A product that begins with RMSNorm: `launch(h)`, and after a wait `collect()`."""

    launch: Callable[[Any], None]
    collect: Callable[[], Outputs]


def run_normed(dev: Any, rng: np.random.Generator, gemv: Any, K: int, op: str) -> Outputs:
    """The product of a residual stream in memory."""
    product = NORMED_OPS[op](dev, rng, gemv, K)
    product.launch(dev.array(3 * fp32(rng, K)))
    return product.collect()


def gemv_swiglu(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Normed:
    """rsqrtf in both factors and expf: tens of fp32 ulp of the result, then bf16."""
    g, (gate, up) = dev.array(bf16_input(rng, K)[0]), (make_linear(dev, rng, 67, K, gemv.fp8)[0] for _ in range(2))
    act = dev.zeros((67,), BF16)
    return Normed(
        lambda h: gemv.swiglu(dev, act, h, g, gate, up, EPS, grid=3), lambda: {"act": rounded(act.download())}
    )


def gemv_logits(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Normed:
    """The sums agree in every bit; rsqrtf is right to 2 ulp on a GPU and 1.5 here, the product adds one: 2^-21."""
    g, w = dev.array(bf16_input(rng, K)[0]), make_linear(dev, rng, 131, K, False)[0]
    out = dev.zeros((131,), F32)

    def collect() -> Outputs:
        logits = out.download()
        return {"logits": Output(logits, 2.0**-21 * np.abs(logits.astype(np.float64)))}

    return Normed(lambda h: gemv.logits(dev, out, h, g, w, EPS, grid=3), collect)


def gemv_qkv(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Normed:
    """rsqrtf, and the bias is contracted with the scaling: ulps of the largest, which the rotation may cancel to."""
    H, KV, HD, max_len, pos = 2, 1, 64, 8, 5
    g, (w, _) = dev.array(bf16_input(rng, K)[0]), make_linear(dev, rng, (H + 2 * KV) * HD, K, gemv.fp8)
    bias, rope = dev.array(fp32(rng, w.N)), dev.array(rotary(rng, max_len, HD))
    q, k, v = dev.zeros((H, HD), BF16), dev.zeros((KV, max_len, HD), BF16), dev.zeros((KV, max_len, HD), BF16)
    at = dev.array(np.array([pos], np.int32))

    def collect() -> Outputs:
        got = {"q": q.download(), "k": k.download(), "v": v.download()}
        slack = 2.0**-19 * float(np.abs(bf16_to_f32(got["q"])).max())
        rows = {name: rounded(bits if name == "q" else bits[:, pos], slack) for name, bits in got.items()}
        return rows | {f"rest of {name}": exact(np.delete(got[name], pos, 1)) for name in "kv"}

    return Normed(lambda h: gemv.qkv(dev, q, k, v, h, g, w, bias, rope, at, EPS, grid=3), collect)


NORMED_OPS = {"swiglu": gemv_swiglu, "qkv": gemv_qkv, "logits": gemv_logits}


def gemv_choose(machine: Machine, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    """As gemv_logits; the ids, positions and step numbers that were posted agree (the hash is of the logits' bits)."""
    dev, V = machine.dev, 131
    s, ids, h, g = Sampler.create(dev, V), [], dev.array(3 * fp32(rng, K)), dev.array(bf16_input(rng, K)[0])
    w, out = make_linear(dev, rng, V, K, False)[0], dev.zeros((V,), F32)
    s.set_position(1, 10)
    for temperature in (0.0, 0.8):
        s.set_params(temperature, 5, 120)
        gemv.choose(dev, out, h, g, w, EPS, s, grid=3)
        ids.append(s.state.download())
    logits = out.download()
    machine.finish()
    return {"logits": Output(logits, 2.0**-21 * np.abs(logits.astype(np.float64))), "states": exact(np.array(ids))}


def product_cases() -> list[Case]:
    """Every such kernel's case."""
    return [case for gemv in (GEMV_BF16, GEMV_FP8) for case in gemv_cases(gemv)]
