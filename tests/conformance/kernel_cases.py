"""One case for each entry point of cuda_src/*.cu, through its launcher, with inputs that NumPy's generator makes.

Grids are given where the default depends on the number of multiprocessors, so that both machines add in the same order.

Tolerances. The GPU build contracts a·b + c (--fmad=true) and has approximate rsqrtf, expf, ex2, and tensor cores that
cut where the simulator rounds; the simulator contracts nothing. Where a kernel has none of these, every bit must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from conformance.machines import LIMIT_NS, Array, Machine, Output

from loaders.dtypes import bf16_to_f32, f16_to_f32, f32_to_bf16, quantize_rows_e4m3
from qwen_raw.device import BF16, E4M3, F16, F32, U32, Buffer
from qwen_raw.kernels import allreduce_flag, allreduce_lamport, allreduce_twoshot, signal
from qwen_raw.kernels.attn_decode import MIN_SPLIT, Workspace, attn_decode
from qwen_raw.kernels.attn_prefill import attn_prefill
from qwen_raw.kernels.bandwidth import read_all
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.norm import rmsnorm, rmsnorm_split
from qwen_raw.kernels.quantize import quantize_rows
from qwen_raw.kernels.sample import Sampler, sample
from qwen_raw.kernels.synthetic import synthetic_bf16, synthetic_e4m3

Outputs = dict[str, Output]
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """`run` uses `entry`, among other kernels perhaps, and returns what came out."""

    entry: str
    run: Callable[[Machine, np.random.Generator], Outputs]


def bf16(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    return f32_to_bf16((rng.standard_normal(shape) * scale).astype(np.float32))


def rotary(rng: np.random.Generator, max_len: int, HD: int) -> Array:
    angle = rng.uniform(0, 6, (max_len, HD // 2))
    return np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)


def linear(dev: Any, rng: np.random.Generator, N: int, K: int, fp8: bool) -> Linear:
    w = (rng.standard_normal((N, K)) / np.sqrt(K)).astype(np.float32)
    if not fp8:
        return Linear(dev.array(f32_to_bf16(w)))
    q, scale = quantize_rows_e4m3(w)
    return Linear(dev.array(q), dev.array(scale))


def exact(values: Array) -> Output:
    return Output(values)


def single(buffer: Buffer, rel: float) -> Output:
    """fp32 results: within `rel` of the largest."""
    values = buffer.download()
    return Output(values, rel * float(np.abs(values).max()))


def rounded(buffer: Buffer, *, f16: bool = False, share: float = 0.02, slack: float = 2e-6) -> Output:
    """16-bit results: one unit in the last place where the sum behind lay near a tie, which `share` of them may do.

    `slack`: what the sums themselves may differ by, as a part of the largest result.
    """
    bits = buffer.download()
    values = f16_to_f32(bits) if f16 else bf16_to_f32(bits)
    magnitude = np.abs(values.astype(np.float64))
    ulp = 2.0**-10 if f16 else 2.0**-7
    return Output(values, ulp * magnitude + slack * float(magnitude.max()), share)


# ---- products ----------------------------------------------------------------------------------------------
# GEMV: the same fmaf chains on both machines; only RMSNorm's rsqrtf, SwiGLU's expf, and contractions of the last
# scaling, bias and rotation differ: a few fp32 ulp of a result. GEMM: five mma steps that cut at 2^-23 of the largest
# addend.


# Row lengths K that take each variant of C packs a thread: one tail longer than the variant before covers.
NORMED = {"bf16": {1: 136, 2: 4232}, "fp8": {1: 272, 2: 4368}}
ADD = {"bf16": NORMED["bf16"] | {4: 8328, 8: 20616}, "fp8": NORMED["fp8"] | {4: 16656}}


def gemv_cases(gemv: Any) -> list[Case]:
    """Every variant of a weight type's kernels."""
    suffix = "fp8" if gemv.fp8 else "bf16"
    ops: dict[str, Callable[..., Outputs]] = {"add": gemv_add, "swiglu": gemv_swiglu, "qkv": gemv_qkv}
    if not gemv.fp8:
        ops["logits"] = gemv_logits

    def case(op: str, C: int, K: int) -> Case:
        return Case(f"gemv_{op}_{suffix}_c{C}", lambda machine, rng: ops[op](machine.dev, rng, gemv, K))

    return [case(op, C, K) for op in ops for C, K in (ADD if op == "add" else NORMED)[suffix].items()]


def gemv_add(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    h = dev.array(rng.standard_normal(37).astype(np.float32))
    gemv.add(dev, h, dev.array(bf16(rng, K)), linear(dev, rng, 37, K, gemv.fp8), grid=3)
    return {"h": single(h, 1e-6)}


def normed_input(dev: Any, rng: np.random.Generator, K: int) -> tuple[Buffer, Buffer]:
    return dev.array((rng.standard_normal(K) * 3).astype(np.float32)), dev.array(bf16(rng, K))


def gemv_swiglu(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    h, g = normed_input(dev, rng, K)
    gate, up = linear(dev, rng, 67, K, gemv.fp8), linear(dev, rng, 67, K, gemv.fp8)
    act = dev.zeros((67,), BF16)
    gemv.swiglu(dev, act, h, g, gate, up, EPS, grid=3)
    return {"act": rounded(act)}


def gemv_logits(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    h, g = normed_input(dev, rng, K)
    out = dev.zeros((131,), F32)
    gemv.logits(dev, out, h, g, linear(dev, rng, 131, K, False), EPS, grid=3)
    return {"logits": single(out, 2e-6)}


def gemv_qkv(dev: Any, rng: np.random.Generator, gemv: Any, K: int) -> Outputs:
    H, KV, HD, max_len = 2, 1, 64, 8
    h, g = normed_input(dev, rng, K)
    w = linear(dev, rng, (H + 2 * KV) * HD, K, gemv.fp8)
    bias, rope = dev.array(rng.standard_normal(w.N).astype(np.float32)), dev.array(rotary(rng, max_len, HD))
    q, k, v = dev.zeros((H, HD), BF16), dev.zeros((KV, max_len, HD), BF16), dev.zeros((KV, max_len, HD), BF16)
    gemv.qkv(dev, q, k, v, h, g, w, bias, rope, dev.array(np.array([5], np.int32)), EPS, grid=3)
    return {"q": rounded(q), "k": rounded(k), "v": rounded(v)}


def gemm_cases(gemm: Any) -> list[Case]:
    suffix, T, K = "fp8" if gemm.fp8 else "bf16", 67, 80

    def add(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev = machine.dev
        h = dev.array(rng.standard_normal((T, 130)).astype(np.float32))
        gemm.add(dev, h, dev.array(bf16(rng, T, K)), linear(dev, rng, 130, K, gemm.fp8))
        return {"h": single(h, 1e-5)}

    def f32(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev = machine.dev
        c = dev.zeros((T, 130), F32)
        gemm.f32(dev, c, dev.array(bf16(rng, T, K)), linear(dev, rng, 130, K, False))
        return {"c": single(c, 1e-5)}

    def swiglu(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev = machine.dev
        a = dev.array(rng.standard_normal((T, K)).astype(np.float16).view(np.uint16))
        act = dev.zeros((T, 66), BF16)
        gemm.swiglu(dev, act, a, linear(dev, rng, 66, K, gemm.fp8), linear(dev, rng, 66, K, gemm.fp8))
        return {"act": rounded(act, slack=1e-5)}

    def qkv(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, H, KV, HD, pos0, max_len = machine.dev, 2, 1, 64, 3, T + 5
        w = linear(dev, rng, (H + 2 * KV) * HD, K, gemm.fp8)
        a = dev.array(rng.standard_normal((T, K)).astype(np.float16).view(np.uint16))
        bias, rope = dev.array(rng.standard_normal(w.N).astype(np.float32)), dev.array(rotary(rng, max_len, HD))
        q, k, v = dev.zeros((T, H, HD), BF16), dev.zeros((KV, max_len, HD), BF16), dev.zeros((KV, max_len, HD), BF16)
        gemm.qkv(dev, q, k, v, a, w, bias, rope, pos0)
        return {name: rounded(buffer, slack=1e-5) for name, buffer in (("q", q), ("k", k), ("v", v))}

    runs = {"add": add, "swiglu": swiglu, "qkv": qkv} | ({} if gemm.fp8 else {"f32": f32})
    return [Case(f"gemm_{op}_{suffix}", run) for op, run in runs.items()]


# ---- attention ---------------------------------------------------------------------------------------------
def attended(out: Buffer) -> Output:
    """An attention's result.

    A score that differs in its last bits can round to another bf16 probability, which moves a row by 2^-9 of that key's
    share: so many results may differ, each by no more than one bf16 unit and 2^-9 of the largest.
    """
    return rounded(out, share=0.3, slack=2.0**-9)


def decode(HD: int) -> Case:
    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, H, KV, max_len = machine.dev, 7, 1, 3 * MIN_SPLIT
        q, k, v = (dev.array(bf16(rng, *s)) for s in ((H, HD), (KV, max_len, HD), (KV, max_len, HD)))
        ws = Workspace.create(dev, H, KV, HD, max_len, 3)
        results = {}
        for n in (1, 100, max_len - 3):  # keys; the workspace's counters go on
            out = dev.zeros((H, HD), BF16)
            attn_decode(dev, out, q, k, v, dev.array(np.array([n - 1], np.int32)), ws)
            results[f"{n} keys"] = attended(out)
        return results | {"counters": exact(ws.counters.download())}

    return Case(f"attn_decode_bf16_hd{HD}", run)


def prefill(HD: int) -> Case:
    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, T, pos0, H, KV, max_len = machine.dev, 67, 30, 4, 2, 104
        q, k, v = (dev.array(bf16(rng, *s)) for s in ((T, H, HD), (KV, max_len, HD), (KV, max_len, HD)))
        out = dev.zeros((T, H, HD), BF16)
        attn_prefill(dev, out, q, k, v, pos0)
        return {"out": attended(out)}

    return Case(f"attn_prefill_bf16_hd{HD}", run)


# ---- small kernels -----------------------------------------------------------------------------------------


def run_embed(machine: Machine, rng: np.random.Generator) -> Outputs:
    dev = machine.dev
    h, ids = dev.zeros((7, 328), F32), rng.integers(0, 50, 7).astype(np.int32)
    embed(dev, h, dev.array(bf16(rng, 50, 328)), dev.array(ids))
    return {"h": exact(h.download())}


def run_quantize(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Only maxima and IEEE divisions: every bit."""
    dev, w = machine.dev, bf16(rng, 9, 272)
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
    dev = machine.dev
    h, g = dev.array(rng.standard_normal((5, 2048)).astype(np.float32)), dev.array(bf16(rng, 2048))
    out = dev.zeros((5, 2048), F16)
    rmsnorm(dev, out, h, g, EPS)
    return {"out": rounded(out, f16=True)}


def run_rmsnorm_split(machine: Machine, rng: np.random.Generator) -> Outputs:
    """The halves may split a value differently; their sum is right to sixteen bits or more."""
    dev = machine.dev
    h, g = dev.array(rng.standard_normal((3, 136)).astype(np.float32)), dev.array(bf16(rng, 136))
    parts = [dev.zeros((3, 136), BF16) for _ in range(2)]
    rmsnorm_split(dev, *parts, h, g, EPS)
    hi, lo = (bf16_to_f32(part.download()).astype(np.float64) for part in parts)
    return {"hi + lo": Output(hi + lo, 2.0**-15 * np.abs(hi))}


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
    """The sink is written if the words that a thread reads xor to one value: one pack can be made to."""
    dev, sinks = machine.dev, []
    for hit in (0, 1):
        data = rng.integers(0, 1 << 31, 4, dtype=np.uint32)
        data[3] = data[0] ^ data[1] ^ data[2] ^ np.uint32(0x5EED5EED + 1 - hit)
        sink = dev.array(np.array([7], np.uint32))
        read_all(dev, dev.array(data), sink)
        sinks.append(sink.download())
    large, sink = dev.array(rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)), dev.zeros((1,), U32)
    read_all(dev, large, sink)
    return {"sinks": exact(np.array([*sinks, sink.download()]))}


# ---- between ranks: two streams of one GPU, two ranks of a simulated world. fp32 sums in rank order: every b


def allreduce(name: str, workspace: Any, reduce: Callable[..., None], add: bool) -> Case:
    entry = f"allreduce_{name}_{'add_' if add else ''}bf16"

    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        ends = workspace.create(machine.ranks, 40, limit_ns=LIMIT_NS)
        calls = []
        for packs in (40, 1, 17, 3):
            base = rng.standard_normal(8 * packs).astype(np.float32)
            calls.append(
                [
                    (rank.array(base) if add else rank.zeros((8 * packs,), BF16), rank.array(bf16(rng, 8 * packs)))
                    for rank in machine.ranks
                ]
            )
        # Each rank's calls are queued back to back; both ranks' blocks fit the GPU many times over.
        with machine.together((f"allreduce_{name}", entry)):
            for call in calls:
                for end, (out, inp) in zip(ends, call, strict=True):
                    reduce(end, out, inp, add=add, block=32, grid=2)
        assert [end.limit.fault() for end in ends] == [None, None]
        return {
            f"call {i}, rank {r}": exact(out.download())
            for i, call in enumerate(calls)
            for r, (out, _) in enumerate(call)
        }

    return Case(entry, run)


def run_signal(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Both ends on one stream, three hand-overs ahead at most: the slots come round twice."""
    dev, results = machine.dev, {}
    ends = signal.SignalEnds.create(dev, dev, 80, limit_ns=LIMIT_NS)
    for round_ in range(3):
        payloads = [rng.integers(0, 1 << 32, 20, dtype=np.uint32) for _ in range(signal.SLOTS)]
        payloads[0][:4] = 0x80000000  # the sentinel is data here
        sent, taken = [dev.array(p) for p in payloads], [dev.zeros((20,), U32) for _ in payloads]
        for buffer in sent:
            signal.signal_put(ends, buffer, threads=64)
        for buffer in taken:
            signal.signal_take(ends, buffer, threads=64)
        for i, buffer in enumerate(taken):
            got = buffer.download()
            np.testing.assert_array_equal(got, payloads[i])
            results[f"round {round_}, slot {i}"] = exact(got)
    for name, buffer in (("slots", ends.slots), ("credit", ends.credit), ("put", ends.put_number)):
        results[name] = exact(buffer.download())
    return results


def all_cases() -> list[Case]:
    """Every kernel's case."""
    from qwen_raw.kernels.gemm_bf16 import GEMM as GEMM_BF16
    from qwen_raw.kernels.gemm_fp8 import GEMM as GEMM_FP8
    from qwen_raw.kernels.gemv_bf16 import GEMV as GEMV_BF16
    from qwen_raw.kernels.gemv_fp8 import GEMV as GEMV_FP8

    reduces = (
        ("lamport", allreduce_lamport.LamportWorkspace, allreduce_lamport.allreduce_lamport),
        ("flag", allreduce_flag.FlagWorkspace, allreduce_flag.allreduce_flag),
        ("twoshot", allreduce_twoshot.TwoShotWorkspace, allreduce_twoshot.allreduce_twoshot),
    )
    return [
        *(case for gemv in (GEMV_BF16, GEMV_FP8) for case in gemv_cases(gemv)),
        *(case for gemm in (GEMM_BF16, GEMM_FP8) for case in gemm_cases(gemm)),
        *(make(HD) for make in (decode, prefill) for HD in (64, 128)),
        *(allreduce(*reduce, add) for reduce in reduces for add in (False, True)),
        Case("signal_put", run_signal),
        Case("signal_take", run_signal),
        Case("embed_bf16", run_embed),
        Case("quantize_rows_bf16", run_quantize),
        Case("synthetic_bf16", run_synthetic_bf16),
        Case("synthetic_e4m3", run_synthetic_e4m3),
        Case("rmsnorm_f32", run_rmsnorm),
        Case("rmsnorm_split_f32", run_rmsnorm_split),
        Case("sample_f32", run_sample),
        Case("read_v4", run_bandwidth),
    ]
