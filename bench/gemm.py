"""Prefill's matrix products alone: every shape of the given models, every variant, cuBLASLt beside.

    python -m bench.gemm [--model 7b …] [--tp 1 …] [--dtype bf16 fp8] [--tokens 128 …] [--stage qkv …]
                         [--chosen-only] [--no-peers]

A product runs in a graph over enough copies of its weights to leave the L2 behind (at least 256 MiB), with its own
epilogue: QKV with bias, RoPE and cache, gate and up with SwiGLU, O and down added to an fp32 residual stream. cuBLASLt
computes the bare product into bf16, by the algorithm that its heuristics put first. TFLOP/s counts 2·T·N·K, GB/s the
weights. Both run in turns, so that neither has the cooler GPU, and the file is written after each weight type.
"chosen" is what the launchers take by themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
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
OPS = {"qkv": "qkv", "o": "add", "gate_up": "swiglu", "down": "add"}  # stage → operation
TARGET_MS = 4.0  # of a graph


@dataclass
class Case:
    """One product on its own buffers: `launch(choice)(i)` uses the i-th copy of the weights."""

    dev: CudaDevice
    gemm: GemmSm90
    stage: str
    T: int
    N: int
    K: int
    weights: list[Linear]
    x: Tokens
    out: list[Buffer]

    @property
    def op(self) -> str:
        return OPS[self.stage]

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
                gemm.swiglu(dev, out[0], x, self._half(w, 0), self._half(w, 1), choice)
            else:
                gemm.add(dev, out[0], x, w, choice)

        return run

    def _half(self, w: Linear, part: int) -> Linear:
        n = self.N // 2
        scale = w.scale.view((n,), part * n) if w.scale is not None else None
        return Linear(w.weight.view((n, self.K), part * n * self.K), scale)

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


def make_case(
    dev: CudaDevice, gemm: GemmSm90, c: ModelConfig, tp: int, stage: str, T: int, weights: list[Linear]
) -> Case:
    """`weights`: made by make_weights."""
    N, K = weights[0].weight.shape
    values = dev.empty((T, K), E4M3 if gemm.fp8 else BF16)
    scale = None
    if gemm.fp8:
        synthetic_e4m3(dev, values, 3, 1)
        scale = dev.array(np.full(T, 1e-2, np.float32))
    else:
        synthetic_bf16(dev, values, 3, 1, 1.0)
    out: list[Buffer] = [dev.zeros((T, N), F32)]
    if stage == "qkv":
        kv = max(1, c.KV // tp)
        out = [dev.zeros((T, c.H // tp, c.HD), BF16), *(dev.zeros((kv, T, c.HD), BF16) for _ in range(2))]
        out += [dev.zeros((N,), F32), dev.zeros((T, c.HD // 2, 2), F32), dev.array(np.array([0, T], np.int32))]
    if stage == "gate_up":
        out = [dev.zeros((T, N // 2), BF16)]
    return Case(dev, gemm, stage, T, N, K, weights, Tokens(values, scale), out)


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
    """One row: the launchers' choice, cuBLASLt, and with `every` all other choices."""
    dev, flop = case.dev, 2 * case.T * case.N * case.K
    nbytes = case.weights[0].weight.nbytes
    expected = max(flop / (900e6 if case.gemm.fp8 else 550e6), nbytes / 3.5e6)
    HD = case.out[0].shape[2] if case.op == "qkv" else 128
    own = choose(case.op, case.T, case.N, case.slices, dev.sm_count, HD)
    launches = [case.launch(own)]
    if lt is not None:
        product = lt.product(case.T, case.N, case.K, fp8=case.gemm.fp8, scale=case.x.scale)
        c, stream = dev.empty((case.T, case.N), BF16), int(dev.stream.handle)
        weights = [w.weight for w in case.weights]
        launches.append(lambda i: product.launch(c, case.x.values, weights[i % len(weights)], stream))
    us, *theirs = graphs_us(dev, launches, expected)
    chosen: dict[str, Any] = {"variant": own.variant.name, "pieces": own.pieces, "us": us}
    tried = [chosen]
    for choice in case.choices() if every else []:
        (other,) = graphs_us(dev, [case.launch(choice)], expected)
        tried.append({"variant": choice.variant.name, "pieces": choice.pieces, "us": other})
    tried.sort(key=lambda t: t["us"])
    row = common | {"op": case.stage, "tokens": case.T, "N": case.N, "K": case.K, "chosen": chosen, "tried": tried}
    row |= {"us": us, "tflop_s": flop / us / 1e6, "gb_s": nbytes / us / 1e3, "of_read": nbytes / us * 1e6 / ceiling}
    text = f"{us:8.1f} µs {row['tflop_s']:6.0f} TFLOP/s {row['gb_s']:6.0f} GB/s"
    for us_lt in theirs:
        row |= {"cublas_us": us_lt, "cublas_tflop_s": flop / us_lt / 1e6, "ratio": us_lt / us}
        text += f"   cuBLAS {us_lt:8.1f} µs {row['cublas_tflop_s']:6.0f}   ratio {us_lt / us:5.2f}"
    others = "  ".join(f"{t['variant']}/{t['pieces']} {t['us']:.1f}" for t in tried[:6])
    print(
        f"{common['model']:4} tp{common['tp']} {common['dtype']} {case.stage:8} {case.T:5} × {case.N:5} × {case.K:5} "
        f"{text}   {others}",
        flush=True,
    )
    return row


def main() -> int:
    parser = Parser("python -m bench.gemm", description="prefill's matrix products")
    parser.add_argument("--model", nargs="+", default=["7b"], choices=list(SIZES))
    parser.add_argument("--tp", nargs="+", type=positive, default=[1])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--tokens", nargs="+", type=positive, default=[16, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--stage", nargs="+", default=list(OPS), choices=list(OPS), help="products of a layer")
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
                common = {"model": size, "tp": tp, "dtype": dtype}
                for stage, (N, K) in shapes(SIZES[size], tp).items():
                    if stage not in a.stage:
                        continue
                    weights = make_weights(dev, N, K, gemm.fp8)
                    for T in a.tokens:
                        case = make_case(dev, gemm, SIZES[size], tp, stage, T, weights)
                        rows.append(measure(case, lt, common, ceiling, every=not a.chosen_only))
        save("gemm", env, rows, a.output, variant)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        ahead = sum(r >= 1 for r in ratios)
        print(
            f"# of cuBLASLt: geometric mean {statistics.geometric_mean(ratios):.3f}, ahead at {ahead} of {len(ratios)}"
        )
    dev.close()
    return 0


if __name__ == "__main__":
    command(main)
