"""One case for each entry point of cuda_src/*.cu, through its launcher, with inputs that NumPy's generator makes.

Grids are given where the default depends on the number of multiprocessors, so that both machines split the work alike.

Tolerances. The GPU build contracts a·b + c (--fmad=true), its rsqrtf, expf and ex2 are approximate, and its tensor
cores cut where the simulator rounds; the simulator contracts nothing. Kernels without any of these agree in every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from conformance.machines import Array, Machine, Output
from kernel_reference import bf16_input, f16_input, make_linear, silu

from loaders.dtypes import bf16_to_f32, f16_to_f32
from qwen_raw.device import BF16, E4M3, F16, F32, Buffer
from qwen_raw.kernels.bandwidth import read_all
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.gemm_bf16 import GEMM as GEMM_BF16
from qwen_raw.kernels.gemm_fp8 import GEMM as GEMM_FP8
from qwen_raw.kernels.gemv_bf16 import GEMV as GEMV_BF16
from qwen_raw.kernels.gemv_fp8 import GEMV as GEMV_FP8
from qwen_raw.kernels.kv_fold import kv_fold, kv_norms
from qwen_raw.kernels.last_row import last_row
from qwen_raw.kernels.norm import rmsnorm, rmsnorm_bf16, rmsnorm_split
from qwen_raw.kernels.quantize import quantize_rows
from qwen_raw.kernels.sample import Sampler, sample
from qwen_raw.kernels.synthetic import synthetic_bf16, synthetic_e4m3

Outputs = dict[str, Output]
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """`run` uses `entry`, among other kernels perhaps, and returns what came out. `ranks`: how many it takes."""

    entry: str
    run: Callable[[Machine, np.random.Generator], Outputs]
    ranks: int = 1

    def on(self, machine: Machine, rng: np.random.Generator) -> Outputs:
        """Runs it on as many of the machine's ranks as it takes."""
        return self.run(machine.of(self.ranks), rng)


def rotary(rng: np.random.Generator, max_len: int, HD: int) -> Array:
    angle = rng.uniform(0, 6, (max_len, HD // 2))
    return np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)


def fp32(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def exact(values: Array) -> Output:
    return Output(values)


def rounded(bits: Array, slack: Array | float = 0.0, *, f16: bool = False, share: float = 0.02) -> Output:
    """16-bit results: the next number where what was rounded lay near a tie, which `share` of them may do.

    `slack`: what may be added to that: the error of what was rounded, where cancellation makes it count.
    """
    values = f16_to_f32(bits) if f16 else bf16_to_f32(bits)
    ulp = 2.0**-10 if f16 else 2.0**-7
    return Output(values, ulp * np.abs(values.astype(np.float64)) + slack, share)


# ---- GEMV: the same fmaf chains and shuffles on both machines ----------------------------------------------
# Row lengths K that take each variant of C packs a thread: one tail longer than the variant before covers.
NORMED = {"bf16": {"c1": 136, "c2": 4232}, "fp8": {"c1": 272, "c1w": 4368, "c2": 8208}}
ADD = {"bf16": NORMED["bf16"] | {"c4": 8328, "c8": 20616}, "fp8": NORMED["fp8"] | {"c4": 20496}}


def gemv_cases(gemv: Any) -> list[Case]:
    """Every variant of a weight type's kernels."""
    suffix = "fp8" if gemv.fp8 else "bf16"
    ops: dict[str, Callable[..., Outputs]] = {
        "add": gemv_add,
        "store": gemv_store,
        "swiglu": gemv_swiglu,
        "qkv": gemv_qkv,
    }
    if not gemv.fp8:
        ops["logits"] = gemv_logits

    def case(op: str, variant: str, K: int) -> Case:
        return Case(f"gemv_{op}_{suffix}_{variant}", lambda machine, rng: ops[op](machine.dev, rng, gemv, K))

    def choice(variant: str, K: int) -> Case:
        return Case(f"gemv_choose_{suffix}_{variant}", lambda machine, rng: gemv_choose(machine, rng, gemv, K))

    choices = [] if gemv.fp8 else [choice(variant, K) for variant, K in NORMED[suffix].items()]
    return choices + [
        case(op, v, K) for op in ops for v, K in (ADD if op in ("add", "store") else NORMED)[suffix].items()
    ]


def gemv_add(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    """bf16: every bit. fp8: what tensor cores may be off by, and an ulp where a product is contracted with the sum."""
    old, (x, X), (w, W) = fp32(rng, 37), bf16_input(rng, K), make_linear(dev, rng, 37, K, gemv.fp8)
    h = dev.array(old)
    gemv.add(dev, h, dev.array(x), w, grid=3)
    return {"h": Output(h.download(), fp8_error(W, X) + 2.0**-22 * np.abs(old) if gemv.fp8 else 0.0)}


def gemv_store(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    """bf16: the sums agree in every bit, and so does their rounding. fp8: what tensor cores may be off by, rounded."""
    y, (x, X), (w, W) = dev.zeros((37,), BF16), bf16_input(rng, K), make_linear(dev, rng, 37, K, gemv.fp8)
    gemv.store(dev, y, dev.array(x), w, grid=3)
    return {"y": rounded(y.download(), fp8_error(W, X)) if gemv.fp8 else exact(y.download())}


def fp8_error(W: Array, X: Array) -> Array:
    """Of W·x, x [K] or several, on tensor cores along diagonals: a dozen steps a thread at most (gemv_diagonal.cuh)."""
    return 2.0**-22 * 12 * (np.abs(X) @ np.abs(W).T)  # type: ignore[no-any-return]


def normed_input(dev: Any, rng: np.random.Generator, K: int) -> tuple[Buffer, Buffer]:
    return dev.array(3 * fp32(rng, K)), dev.array(bf16_input(rng, K)[0])


def gemv_swiglu(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    """rsqrtf in both factors and expf: tens of fp32 ulp of the result, then bf16."""
    h, g = normed_input(dev, rng, K)
    gate, up = (make_linear(dev, rng, 67, K, gemv.fp8)[0] for _ in range(2))
    act = dev.zeros((67,), BF16)
    gemv.swiglu(dev, act, h, g, gate, up, EPS, grid=3)
    return {"act": rounded(act.download())}


def gemv_logits(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    """The sums agree in every bit; rsqrtf is right to 2 ulp on a GPU and 1.5 here, the product adds one: 2^-21."""
    h, g = normed_input(dev, rng, K)
    out = dev.zeros((131,), F32)
    gemv.logits(dev, out, h, g, make_linear(dev, rng, 131, K, False)[0], EPS, grid=3)
    logits = out.download()
    return {"logits": Output(logits, 2.0**-21 * np.abs(logits.astype(np.float64)))}


def gemv_qkv(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    """rsqrtf, and the bias is contracted with the scaling: ulps of the largest, which the rotation may cancel to."""
    H, KV, HD, max_len, pos = 2, 1, 64, 8, 5
    h, g = normed_input(dev, rng, K)
    w, _ = make_linear(dev, rng, (H + 2 * KV) * HD, K, gemv.fp8)
    bias, rope = dev.array(fp32(rng, w.N)), dev.array(rotary(rng, max_len, HD))
    q, k, v = dev.zeros((H, HD), BF16), dev.zeros((KV, max_len, HD), BF16), dev.zeros((KV, max_len, HD), BF16)
    gemv.qkv(dev, q, k, v, h, g, w, bias, rope, dev.array(np.array([pos], np.int32)), EPS, grid=3)
    got = {"q": q.download(), "k": k.download(), "v": v.download()}
    slack = 2.0**-19 * float(np.abs(bf16_to_f32(got["q"])).max())
    rows = {name: rounded(bits if name == "q" else bits[:, pos], slack) for name, bits in got.items()}
    return rows | {f"rest of {name}": exact(np.delete(got[name], pos, 1)) for name in "kv"}


# ---- GEMM: K / 16 steps of mma, each with the error that mma_cases.py states -------------------------------
def cut(machine: Machine, a: Array, w: Array) -> Array:
    """What sums of products a [T, K]·w [N, K] may differ by, [T, N]."""
    return machine.mma_error * -(-a.shape[1] // 16) * (np.abs(a) @ np.abs(w).T)


def gemm_cases(gemm: Any) -> list[Case]:
    suffix, T, K = "fp8" if gemm.fp8 else "bf16", 67, 80

    def add(machine: Machine, rng: np.random.Generator) -> Outputs:
        """Two roundings more than the sums: a row scale's, contracted on a GPU, and that of h."""
        dev, old = machine.dev, fp32(rng, T, 130)
        h, (a, A), (w, W) = dev.array(old), bf16_input(rng, T, K), make_linear(dev, rng, 130, K, gemm.fp8)
        gemm.add(dev, h, dev.array(a), w)
        new = h.download()
        return {"h": Output(new, cut(machine, A, W) + 2.0**-22 * (np.abs(old) + np.abs(new)))}

    def store(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, y = machine.dev, machine.dev.zeros((T, 130), BF16)
        (a, A), (w, W) = bf16_input(rng, T, K), make_linear(dev, rng, 130, K, gemm.fp8)
        gemm.store(dev, y, dev.array(a), w)
        return {"y": rounded(y.download(), cut(machine, A, W))}

    def f32(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, c = machine.dev, machine.dev.zeros((T, 130), F32)
        (a, A), (w, W) = bf16_input(rng, T, K), make_linear(machine.dev, rng, 130, K, False)
        gemm.f32(dev, c, dev.array(a), w)
        return {"c": Output(c.download(), cut(machine, A, W))}

    def swiglu(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, act = machine.dev, machine.dev.zeros((T, 66), BF16)
        (a, A), (gate, G), (up, U) = f16_input(rng, T, K), *(make_linear(dev, rng, 66, K, gemm.fp8) for _ in range(2))
        gemm.swiglu(dev, act, dev.array(a), gate, up)
        # silu' is at most 1.1.
        slack = 1.1 * cut(machine, A, G) * np.abs(A @ U.T) + np.abs(silu(A @ G.T)) * cut(machine, A, U)
        return {"act": rounded(act.download(), slack)}

    def qkv(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, H, KV, HD, pos0, max_len = machine.dev, 2, 1, 64, 3, T + 5
        (a, A), (w, W) = f16_input(rng, T, K), make_linear(dev, rng, (H + 2 * KV) * HD, K, gemm.fp8)
        bias, rope = fp32(rng, w.N), dev.array(rotary(rng, max_len, HD))
        q, k, v = dev.zeros((T, H, HD), BF16), dev.zeros((KV, max_len, HD), BF16), dev.zeros((KV, max_len, HD), BF16)
        gemm.qkv(dev, q, k, v, dev.array(a), w, dev.array(bias), rope, dev.array(np.array([pos0, T], np.int32)))
        # A rotation adds the errors of two sums, and a few roundings of numbers no larger than the largest.
        slack = 2 * float(cut(machine, A, W).max()) + 2.0**-21 * float(np.abs(A @ W.T).max() + np.abs(bias).max())
        return {name: rounded(buffer.download(), slack) for name, buffer in (("q", q), ("k", k), ("v", v))}

    runs = {"add": add, "store": store, "swiglu": swiglu, "qkv": qkv} | ({} if gemm.fp8 else {"f32": f32})
    return [Case(f"gemm_{op}_{suffix}", run) for op, run in runs.items()]


# ---- small kernels -----------------------------------------------------------------------------------------
def run_embed(machine: Machine, rng: np.random.Generator) -> Outputs:
    dev = machine.dev
    h, ids = dev.zeros((7, 328), F32), rng.integers(0, 50, 7).astype(np.int32)
    embed(dev, h, dev.array(bf16_input(rng, 50, 328)[0]), dev.array(ids))
    return {"h": exact(h.download())}


def run_last_row(machine: Machine, rng: np.random.Generator) -> Outputs:
    dev, out = machine.dev, machine.dev.zeros((1032,), F32)
    last_row(dev, out, dev.array(fp32(rng, 7, 1032)), dev.array(np.array([3, 5], np.int32)))
    return {"out": exact(out.download())}


def run_kv_norms(fp8: bool) -> Callable[[Machine, np.random.Generator], Outputs]:
    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        """Products are contracted on a GPU: an ulp of each of nine terms a thread, all positive."""
        dev, norms = machine.dev, machine.dev.zeros((7,), F32)
        kv_norms(dev, norms, make_linear(dev, rng, 7, 2064, fp8)[0], dev.array(bf16_input(rng, 2064)[0]))
        return {"norms": Output(norms.download(), 2.0**-20 * norms.download().astype(np.float64))}

    return run


def run_kv_fold(machine: Machine, rng: np.random.Generator) -> Outputs:
    w, _ = make_linear(machine.dev, rng, 7, 2064, False)
    kv_fold(machine.dev, w, fp32(rng, 7))
    return {"w": exact(w.weight.download())}


def run_quantize(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Only maxima and IEEE divisions: every bit."""
    dev, (w, _) = machine.dev, bf16_input(rng, 9, 272)
    w[3] = 0
    q, scale = dev.zeros((9, 272), E4M3), dev.zeros((9,), F32)
    quantize_rows(dev, q, scale, dev.array(w))
    return {"q": exact(q.download()), "scale": exact(scale.download())}


def run_synthetic_bf16(machine: Machine, rng: np.random.Generator) -> Outputs:
    out = machine.dev.zeros((33, 40), BF16)
    synthetic_bf16(machine.dev, out, int(rng.integers(1 << 32)), int(rng.integers(1 << 32)), 0.037)
    return {"out": exact(out.download())}


def run_synthetic_e4m3(machine: Machine, rng: np.random.Generator) -> Outputs:
    out = machine.dev.zeros((33, 40), E4M3)
    synthetic_e4m3(machine.dev, out, int(rng.integers(1 << 32)), int(rng.integers(1 << 32)))
    return {"out": exact(out.download())}


def run_rmsnorm(machine: Machine, rng: np.random.Generator) -> Outputs:
    """rsqrtf: a few fp32 ulp, 2^13 of which are one of f16."""
    dev = machine.dev
    h, g = dev.array(fp32(rng, 5, 2048)), dev.array(bf16_input(rng, 2048)[0])
    out = dev.zeros((5, 2048), F16)
    rmsnorm(dev, out, h, g, EPS)
    return {"out": rounded(out.download(), f16=True)}


def run_rmsnorm_bf16(machine: Machine, rng: np.random.Generator) -> Outputs:
    dev = machine.dev
    h, g = dev.array(fp32(rng, 5, 2048)), dev.array(bf16_input(rng, 2048)[0])
    out = dev.zeros((5, 2048), BF16)
    rmsnorm_bf16(dev, out, h, g, EPS)
    return {"out": rounded(out.download())}


def run_rmsnorm_split(machine: Machine, rng: np.random.Generator) -> Outputs:
    """The halves may split a value differently; their sum moves by one unit of the lower half, 2^-16, seldom.

    The GPU contracts the last product with the subtraction of the upper half: that alone is 2^-24 of the value.
    """
    dev = machine.dev
    h, g = dev.array(fp32(rng, 3, 136)), dev.array(bf16_input(rng, 136)[0])
    parts = [dev.zeros((3, 136), BF16) for _ in range(2)]
    rmsnorm_split(dev, *parts, h, g, EPS)
    hi, lo = (bf16_to_f32(part.download()).astype(np.float64) for part in parts)
    return {"hi + lo": Output(hi + lo, (2.0**-16 + 2.0**-20) * np.abs(hi), share=0.2)}


def gemv_choose(machine: Machine, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    """As gemv_logits; the ids, positions and step numbers that were posted agree (the hash is of the logits' bits)."""
    dev, V = machine.dev, 131
    s, (h, g), ids = Sampler.create(dev, V), normed_input(dev, rng, K), []
    w, out = make_linear(dev, rng, V, K, False)[0], dev.zeros((V,), F32)
    s.set_position(1, 10)
    for temperature in (0.0, 0.8):
        s.set_params(temperature, 5, 120)
        gemv.choose(dev, out, h, g, w, EPS, s, grid=3)
        ids.append(s.state.download())
    logits = out.download()
    machine.finish()
    return {"logits": Output(logits, 2.0**-21 * np.abs(logits.astype(np.float64))), "states": exact(np.array(ids))}


def run_sample(machine: Machine, rng: np.random.Generator) -> Outputs:
    """State and ring after five choices: greedy with a tie, damaged, and three drawn at a temperature.

    A draw goes through logf, but the two best of 700 lie further apart than its error unless the numbers conspire.
    """
    dev, V = machine.dev, 700
    s, states = Sampler.create(dev, V, 3), []
    s.set_position(1, 10)
    for step in range(5):
        logits = rng.standard_normal(V).astype(np.float32)
        if step == 0:
            logits[[57, 601]] = 9.0
        if step == 1:
            logits[300] = np.nan
        s.set_params(0.0 if step < 2 else 0.8, int(rng.integers(1 << 63)), 690)
        sample(dev, dev.array(logits), s)
        states.append(s.state.download())
    machine.finish()
    return {"states": exact(np.array(states)), "ring": exact(s.ring.words.copy())}


def run_bandwidth(machine: Machine, rng: np.random.Generator) -> Outputs:
    """The sink is written if the words that some thread reads xor to one value: a single pack can be made to.

    It is put where a thread's first eight packs are, in the last ones, and nowhere.
    """
    dev, sinks = machine.dev, []
    packs = 8 * 512 * 4 * dev.sm_count + 37  # launcher: four blocks of 512 a multiprocessor; eight packs a round
    for at in (5 * packs // 8, packs - 1, None):
        data, sink = np.zeros((packs, 4), np.uint32), dev.array(np.array([7], np.uint32))
        if at is not None:
            data[at, :3] = rng.integers(0, 1 << 32, 3, dtype=np.uint32)
            data[at, 3] = np.bitwise_xor.reduce(data[at, :3]) ^ np.uint32(0x5EED5EED)
        read_all(dev, dev.array(data), sink)
        sinks.append(sink.download())
    assert [int(sink[0]) for sink in sinks] == [0x5EED5EED, 0x5EED5EED, 7]
    return {"sinks": exact(np.array(sinks))}


def all_cases() -> list[Case]:
    """Every kernel's case, but for those in rank_cases.py."""
    from conformance.pass_cases import PASSES  # which needs what is above

    return [
        *(case for gemv in (GEMV_BF16, GEMV_FP8) for case in gemv_cases(gemv)),
        *(case for gemm in (GEMM_BF16, GEMM_FP8) for case in gemm_cases(gemm)),
        Case("embed_bf16", run_embed),
        Case("last_row_f32", run_last_row),
        Case("quantize_rows_bf16", run_quantize),
        Case("kv_norms_bf16", run_kv_norms(False)),
        Case("kv_norms_fp8", run_kv_norms(True)),
        Case("kv_fold_bf16", run_kv_fold),
        Case("synthetic_bf16", run_synthetic_bf16),
        Case("synthetic_e4m3", run_synthetic_e4m3),
        Case("rmsnorm_f32", run_rmsnorm),
        Case("rmsnorm_bf16", run_rmsnorm_bf16),
        Case("rmsnorm_split_f32", run_rmsnorm_split),
        Case("sample_f32", run_sample),
        Case("read_v4", run_bandwidth),
        *PASSES,
    ]
