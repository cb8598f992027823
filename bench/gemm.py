"""Prefill's matrix products alone: every shape of the given models, every variant, cuBLASLt beside.

    python -m bench.gemm [--model 7b …] [--tp 1 …] [--dtype bf16 fp8] [--tokens 128 …] [--stage qkv …]
                         [--chosen-only] [--no-peers]

A product runs in a graph over enough copies of its weights to leave the L2 behind (at least 256 MiB), in two ways: as
an operation, with what a rank needs behind it ("us": QKV with bias, RoPE and cache, gate and up with SwiGLU, O and down
added to an fp32 residual stream, or stored as bf16 where ranks sum them), and bare into bf16 ("bare_us"). cuBLASLt
computes the bare product into bf16, by the algorithm that its heuristics put first, so "bare_ratio" is like for like;
"ratio" is the operation against the same time. TFLOP/s counts 2·T·N·K, GB/s the weights. All run in turns, so that
none has the cooler GPU, and the file is written after each weight type. "chosen" is what the launchers take by
themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.common import check_shares, command, environment, read_ceiling, result_arguments, save, time_ms
from bench.peers.cublaslt import CublasLt
from loaders.synthetic import SIZES
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.config import ModelConfig
from qwen_raw.device import BF16, E4M3, F32, Buffer
from qwen_raw.driver.device import CudaDevice
from qwen_raw.kernels import gemm_bf16_sm90, gemm_fp8_sm90
from qwen_raw.kernels.cublaslt import WORKSPACE
from qwen_raw.kernels.gemm_sm90 import CUTS, OPERATIONS, VARIANTS, Choice, GemmSm90, Tokens, choose, most_pieces
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.synthetic import synthetic_bf16, synthetic_e4m3

ROTATE_BYTES = 256 << 20
STAGES = ("qkv", "o", "gate_up", "down")
TARGET_MS = 4.0  # of a graph


@dataclass
class Case:
    """One product on its own buffers: `launch(choice)(i)` uses the i-th copy of the weights."""

    dev: CudaDevice
    gemm: GemmSm90
    op: str
    T: int
    N: int
    K: int
    weights: list[Linear]
    x: Tokens
    out: list[Buffer]

    def bare(self) -> Case:
        """The same product into bf16, with nothing behind it."""
        return replace(self, op="store", out=[self.dev.empty((self.T, self.N), BF16)])

    @property
    def own(self) -> Choice:
        """What the launchers take."""
        HD = self.out[0].shape[2] if self.op == "qkv" else 128
        return choose(self.op, self.T, self.N, self.slices, self.dev.sm_count, HD)

    @property
    def slices(self) -> int:
        return -(-self.weights[0].weight.nbytes // self.N // 128)

    def launch(self, choice: Choice | None) -> Callable[[int], None]:
        """The i-th launch with `choice`."""
        dev, gemm, x, out = self.dev, self.gemm, self.x, self.out

        def run(i: int) -> None:
            w = self.weights[i % len(self.weights)]
            if self.op == "qkv":
                q, k, v, bias, rope, span = out
                gemm.qkv(dev, q, k, v, x, w, bias, rope, span, choice)
            elif self.op == "swiglu":
                gemm.swiglu(dev, out[0], x, w.rows(0, self.N // 2), w.rows(self.N // 2, self.N // 2), choice)
            elif self.op == "add":
                gemm.add(dev, out[0], x, w, choice)
            else:
                gemm.store(dev, out[0], x, w, choice)

        return run

    def choices(self) -> list[Choice]:
        """Every variant that suits the number of tokens, every way to cut its tiles."""
        found = []
        for name in OPERATIONS[self.op]:
            v = VARIANTS[name]
            if v.few and (self.T > v.BN or max(16, 4 * self.T) < v.BN):
                continue
            if not v.few and self.T <= 64:
                continue
            if not v.cluster:
                if v.tiles(self.T, self.N) * CUTS[0] <= self.dev.sm_count:
                    found += [Choice(v, n) for n in CUTS]
                continue
            clusters = v.clusters(self.dev.sm_count)
            most = most_pieces(v.tiles(self.T, self.N) % clusters, clusters, self.slices)
            found += [Choice(v, n) for n in sorted({1, most, max(1, most // 2)})]
        return found


def shapes(c: ModelConfig, tp: int) -> dict[str, tuple[int, int]]:
    """(N, K) of each product on one of `tp` ranks."""
    heads, kv = c.H // tp, max(1, c.KV // tp)
    return {
        "qkv": ((heads + 2 * kv) * c.HD, c.D),
        "o": (c.D, heads * c.HD),
        "gate_up": (2 * (c.I // tp), c.D),
        "down": (c.D, c.I // tp),
    }


def operation(stage: str, tp: int) -> str:
    """What a rank does in a stage."""
    return {"qkv": "qkv", "gate_up": "swiglu"}.get(stage, "add" if tp == 1 else "store")


def make_case(dev: CudaDevice, gemm: GemmSm90, c: ModelConfig, tp: int, op: str, T: int, weights: list[Linear]) -> Case:
    """`weights`: made by make_weights."""
    N, K = weights[0].weight.shape
    values = dev.empty((T, K), E4M3 if gemm.fp8 else BF16)
    scale = None
    if gemm.fp8:
        synthetic_e4m3(dev, values, 3, 1)
        scale = dev.array(np.full(T, 1e-2, np.float32))
    else:
        synthetic_bf16(dev, values, 3, 1, 1.0)
    out: list[Buffer] = [dev.zeros((T, N), F32 if op == "add" else BF16)]
    if op == "qkv":
        kv = max(1, c.KV // tp)
        out = [dev.zeros((T, c.H // tp, c.HD), BF16), *(dev.zeros((kv, T, c.HD), BF16) for _ in range(2))]
        out += [dev.zeros((N,), F32), dev.zeros((T, c.HD // 2, 2), F32), dev.array(np.array([0, T], np.int32))]
    if op == "swiglu":
        out = [dev.zeros((T, N // 2), BF16)]
    return Case(dev, gemm, op, T, N, K, weights, Tokens(values, scale), out)


def make_weights(dev: CudaDevice, N: int, K: int, fp8: bool) -> list[Linear]:
    """Random copies, enough to leave the L2 behind."""
    nbytes = N * K * (1 if fp8 else 2)
    copies = []
    for i in range(max(2, -(-ROTATE_BYTES // nbytes))):
        weight = dev.empty((N, K), E4M3 if fp8 else BF16)
        if fp8:
            synthetic_e4m3(dev, weight, i, 1)
            copies.append(Linear(weight, dev.array(np.full(N, 1e-2, np.float32))))
        else:
            synthetic_bf16(dev, weight, i, 1, 0.02)
            copies.append(Linear(weight))
    return copies


def graphs_us(dev: CudaDevice, launches: list[Callable[[int], None]], expected_us: float) -> list[float]:
    """Microseconds a launch of each: medians of five graphs of several milliseconds, in turns."""
    count = max(4, int(TARGET_MS * 1e3 / expected_us))
    graphs = []
    for launch in launches:
        launch(0)
        with dev.capture() as capture:
            for i in range(count):
                launch(i)
        graphs.append(capture.graph)
    rounds = [[time_ms(dev, graph.launch, repeats=1, warmup=0).median for graph in graphs] for _ in range(6)]
    for graph in graphs:
        graph.close()
    return [statistics.median(samples) * 1e3 / count for samples in zip(*rounds[1:], strict=True)]


def measure(case: Case, lt: CublasLt | None, common: dict[str, Any], ceiling: float, *, every: bool) -> dict[str, Any]:
    """One row: the launchers' choices for the operation and the bare product, cuBLASLt, and with `every` all others."""
    dev, flop = case.dev, 2 * case.T * case.N * case.K
    nbytes = case.weights[0].weight.nbytes
    expected = max(flop / (900e6 if case.gemm.fp8 else 550e6), nbytes / 3.5e6)
    bare = case if case.op == "store" else case.bare()
    launches = [case.launch(case.own)] if bare is case else [case.launch(case.own), bare.launch(bare.own)]
    if lt is not None:
        product = lt.product(case.T, case.N, case.K, fp8=case.gemm.fp8, scale=case.x.scale)
        c, stream = dev.empty((case.T, case.N), BF16), int(dev.stream.handle)
        weights = [w.weight for w in case.weights]
        launches.append(lambda i: product.launch(c, case.x.values, weights[i % len(weights)], stream))
    times = graphs_us(dev, launches, expected)
    us, us_bare, us_lt = times[0], times[len(launches) - 1 - (lt is not None)], times[-1] if lt else None
    row = common | {"operation": case.op, "tokens": case.T, "N": case.N, "K": case.K}
    row |= {"chosen": described(case.own) | {"us": us}, "bare_chosen": described(bare.own) | {"us": us_bare}}
    for key, one in (("tried", case), ("bare_tried", bare)) if every else ():
        choices = one.choices()
        them = graphs_us(dev, [one.launch(choice) for choice in choices], expected)
        tried = [described(choice) | {"us": t} for choice, t in zip(choices, them, strict=True)]
        row[key] = sorted(tried, key=lambda t: t["us"])
    row |= {"us": us, "bare_us": us_bare, "tflop_s": flop / us / 1e6, "bare_tflop_s": flop / us_bare / 1e6}
    row |= {"gb_s": nbytes / us / 1e3, "of_read": nbytes / us * 1e6 / ceiling}
    text = f"{us:8.1f} µs {row['tflop_s']:6.0f} TFLOP/s {row['gb_s']:6.0f} GB/s, bare {us_bare:8.1f} µs"
    if us_lt is not None:
        row |= {"cublas_us": us_lt, "cublas_tflop_s": flop / us_lt / 1e6}
        row |= {"ratio": us_lt / us, "bare_ratio": us_lt / us_bare}
        text += f", cuBLAS {us_lt:8.1f} µs {row['cublas_tflop_s']:6.0f}"
        text += f"   ratio {us_lt / us:5.2f}, bare {us_lt / us_bare:5.2f}"
    for key in ("tried", "bare_tried"):
        text += "   " + "  ".join(f"{t['variant']}/{t['pieces']} {t['us']:.1f}" for t in row.get(key, [])[:6])
    print(
        f"{common['model']:4} tp{common['tp']} {common['dtype']} {common['op']:8} {case.T:5} × {case.N:5} × {case.K:5} "
        f"{text}",
        flush=True,
    )
    return row


def described(choice: Choice) -> dict[str, Any]:
    """A choice as a result names it."""
    return {"variant": choice.variant.name, "pieces": choice.pieces}


def main() -> int:
    parser = Parser("python -m bench.gemm", description="prefill's matrix products")
    parser.add_argument("--model", nargs="+", default=["7b"], choices=list(SIZES))
    parser.add_argument("--tp", nargs="+", type=positive, default=[1])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--tokens", nargs="+", type=positive, default=[16, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--stage", nargs="+", default=STAGES, choices=STAGES, help="products of a layer")
    parser.add_argument("--no-peers", action="store_true", help="without cuBLASLt")
    parser.add_argument("--chosen-only", action="store_true", help="only what the launchers take by themselves")
    result_arguments(parser, "gemm_MODEL_tpN.json")
    a = parser.parse_args()
    check_shares(a.model, a.tp, fp8="fp8" in a.dtype)
    dev = CudaDevice(0)
    ceiling = read_ceiling(dev)
    print(f"# {dev.name}, {dev.driver}; reads reach {ceiling / 1e12:.2f} TB/s")
    lt = None if a.no_peers else CublasLt(dev.empty((WORKSPACE,), E4M3))
    gemms = {"bf16": gemm_bf16_sm90, "fp8": gemm_fp8_sm90}
    rows: list[dict[str, Any]] = []
    variant = "_".join([*a.model, *(f"tp{tp}" for tp in a.tp)])
    env = environment(dev, a.commit) | {"cublaslt": lt.version if lt else None}
    for dtype in a.dtype:
        gemm = gemms[dtype].create(dev)
        for size in a.model:
            for tp in a.tp:
                for stage, (N, K) in shapes(SIZES[size], tp).items():
                    if stage not in a.stage:
                        continue
                    weights = make_weights(dev, N, K, gemm.fp8)
                    common = {"model": size, "tp": tp, "dtype": dtype, "op": stage}
                    for T in a.tokens:
                        case = make_case(dev, gemm, SIZES[size], tp, operation(stage, tp), T, weights)
                        rows.append(measure(case, lt, common, ceiling, every=not a.chosen_only))
        save("gemm", env, rows, a.output, variant)
    for key, what in (("bare_ratio", "bare products"), ("ratio", "operations")):
        ratios = [row[key] for row in rows if key in row]
        if ratios:
            mean, ahead = statistics.geometric_mean(ratios), sum(r >= 1 for r in ratios)
            print(f"# {what} of cuBLASLt: geometric mean {mean:.3f}, ahead at {ahead} of {len(ratios)}")
    dev.close()
    return 0


if __name__ == "__main__":
    command(main)
