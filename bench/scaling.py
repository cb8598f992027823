"""How decode scales with GPUs: measured where there are GPUs, predicted beyond, beside Amdahl's bound and vLLM.

    python -m bench.scaling [--model random:72b:fp8 …] [--tp 1 2 4 8] [--tokens 32] [--reduce-us X]

The model of a step's time is T(tp) = W / (B·tp) + s + 2·L·l: the weights W at an effective bandwidth B a GPU, what does
not shrink (s: attention's latency, the ends of kernels, the choice of the id), and a latency l for each of the 2·L sums
over ranks.

B and s come from one GPU: it takes the part of one rank of `tp`, whose step without the sums is measured at every
degree at which that part fits. l comes from the steps that `bench.decode --tp N` measured on N GPUs, with and without
the sums (bench/results/decode_tpN.json); without such a file it is `--reduce-us`, and the table says "assumed".

Amdahl's bound is the speed-up if the sums cost nothing: only s stays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import RESULTS, amount, command, environment, open_gpus, quoted, result_arguments, save, time_in_turns
from bench.decode import check_models, split_spec
from loaders.resolve import open_model
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.device import BF16, Buffer, Device
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels.gemm_sm90 import Tokens
from qwen_raw.kernels.gemv import Gemv
from qwen_raw.kernels.gemv_each import GemvEach
from qwen_raw.kernels.gemv_exchange import Next
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.products import RowProducts
from qwen_raw.kernels.sample import Sampler
from qwen_raw.model.assembly import check_memory
from qwen_raw.model.decode import level
from qwen_raw.model.loading import CheckpointLike
from qwen_raw.model.rank import Rank
from qwen_raw.model.residual import Alone, Residual
from qwen_raw.model.shard import Shard
from qwen_raw.model.state import DecodeBuffers, KVCache, PrefillBuffers, device_rope_table
from qwen_raw.model.weights import load_weights

DEFAULT = ["random:7b:bf16", "random:7b:fp8", "random:72b:fp8", "random:72b:bf16"]
DEGREES = (1, 2, 4, 8)
ASSUMED_US = 1.65  # 16 KB between two H200s, chained as dependent launches: what a prototype of path "lamport" took
# tok/s of vLLM 0.25.1 at batch 1 on the same GPUs (H200), random weights, by (model, dtype) and degree; that at 8 GPUs
# is a figure that others published.
VLLM: dict[tuple[str, str], dict[int, float]] = {
    ("random:7b", "bf16"): {1: 213},
    ("random:7b", "fp8"): {1: 285},
    ("random:72b", "fp8"): {1: 46.6, 2: 73.3},
    ("random:72b", "bf16"): {2: 47.1, 8: 92},
}


@dataclass(frozen=True, slots=True)
class Point:
    """One degree, µs a step."""

    tp: int
    us_without_reduce: float
    us: float | None = None  # with the sums over ranks, where that many GPUs were measured


@dataclass(frozen=True, slots=True)
class Fit:
    """T(tp) = weight_us / tp + serial_us + reduces·reduce_us, µs; the last term at several ranks only."""

    weight_us: float
    serial_us: float
    reduce_us: float
    reduces: int
    reduce_from: str = "measured"  # or "assumed"

    def us(self, tp: int) -> float:
        """A step's time."""
        return self.without_sums(tp) + (self.reduces * self.reduce_us if tp > 1 else 0.0)

    def without_sums(self, tp: int) -> float:
        """The same if the sums over ranks cost nothing."""
        return self.weight_us / tp + self.serial_us


def fit(points: Sequence[Point], layers: int, assumed_us: float) -> Fit:
    """Least squares in relative error. Raises QwenRawError for a single degree: it does not say what stays."""
    if len({p.tp for p in points}) < 2:
        raise QwenRawError("one degree alone says nothing of what does not shrink: measure another too")
    times = np.array([p.us_without_reduce for p in points])
    shape = np.array([[1 / p.tp, 1.0] for p in points])
    weight, serial = np.linalg.lstsq(shape / times[:, None], np.ones(len(times)), rcond=None)[0]
    sums = [(p.us - p.us_without_reduce) / (2 * layers) for p in points if p.us is not None and p.tp > 1]
    if sums:
        return Fit(float(weight), float(serial), float(np.mean(sums)), 2 * layers)
    return Fit(float(weight), float(serial), assumed_us, 2 * layers, "assumed")


@dataclass(frozen=True, slots=True)
class Unsummed:
    """A `Residual` for a rank without its peers: it makes its shares, and nobody sums them."""

    device: Device
    share: Buffer  # bf16 [D]
    rows = None
    path = ""
    adds = False
    capturable = True

    def of_step(self, skip: frozenset[str]) -> Residual:
        """See Residual."""
        return self

    def product(self, gemv: Gemv, h: Buffer, x: Buffer, w: Linear, *, number: int, following: Next, pdl: bool) -> None:
        """As under tensor parallelism."""
        gemv.store(self.device, self.share, x, w, pdl=pdl)

    def products(self, gemm: RowProducts, h: Buffer, x: Tokens, w: Linear, spare: Buffer) -> None:
        """As under tensor parallelism."""
        gemm.store(self.device, spare, x, w)

    def each(
        self, products: GemvEach, h: Buffer, x: Buffer, w: Linear, spare: Buffer, *, number: int, pdl: bool
    ) -> None:
        """As under tensor parallelism."""
        products.store(self.device, spare, x, w, pdl=pdl)

    def reduce(self, h: Buffer, *, pdl: bool = False, spare: Buffer | None = None) -> None:
        """Left out."""

    def fault(self) -> str | None:
        """There is nobody to wait for."""
        return None


def lone_rank(device: Device, checkpoint: CheckpointLike, tp: int, *, fp8: bool, length: int) -> Rank:
    """Rank 0 of `tp`, alone: it chooses among its own rows of the LM head. Raises QwenRawError if it does not fit."""
    shard = Shard(checkpoint.config, 0, tp)
    check_memory([device], [shard], fp8=fp8, max_len=length)
    residual = Alone(device) if tp == 1 else Unsummed(device, device.empty((shard.whole.D,), BF16))
    sampler = Sampler.create(device, shard.local.V)
    sampler.set_params(0.0, 0, shard.local.V)
    return Rank(
        device,
        shard,
        load_weights(device, checkpoint, shard, fp8=fp8),
        KVCache.create(device, shard.local, length),
        device_rope_table(device, shard.local, length),
        DecodeBuffers.create(device, shard.local, length, sampler),
        PrefillBuffers.create(device, shard.local, length, fp8=fp8, pdl=True),
        residual,
    )


def step_without_sums_us(device: CudaDevice, spec: str, tp: int, tokens: int, repeats: int) -> float:
    """Median µs of a lone rank's step."""
    model, dtype = split_spec(spec)
    rank = lone_rank(device, open_model(model, dtype), tp, fp8=dtype == "fp8", length=tokens + 64)
    sampler = rank.decode.sampler
    sampler.set_position(0, 0)
    level([rank.step()])
    graph = rank.capture()

    def replay() -> None:
        sampler.set_position(0, 0)
        for _ in range(tokens):
            graph.launch()

    (timing,) = time_in_turns(device, [replay], repeats=repeats)
    graph.close()
    return timing.median * 1e3 / tokens


def measured(folder: Path, model: str, dtype: str) -> dict[int, dict[str, Any]]:
    """Rows of bench.decode on several GPUs, at context 0, by degree: of several paths of the sums the fastest."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("decode_tp*.json")):
        for row in json.loads(path.read_text())["rows"]:
            shared = len(set(row["devices"])) < row["tp"]
            if (row["model"], row["dtype"], row["context"]) != (model, dtype, 0) or row["tp"] == 1 or shared:
                continue
            if row["tp"] not in found or row["tok_s"] > found[row["tp"]]["tok_s"]:
                found[row["tp"]] = row
    return found


def points_of(
    device: CudaDevice, spec: str, degrees: Sequence[int], rows: dict[int, dict[str, Any]], tokens: int, repeats: int
) -> list[Point]:
    """A point for each degree that fits."""
    points = []
    for tp in degrees:
        try:
            us = step_without_sums_us(device, spec, tp, tokens, repeats)
        except QwenRawError as error:
            print(f"# {spec}, one rank of {tp}: {error}")
            continue
        cost = (rows[tp]["reduce_us"] * 2 * rows[tp]["layers"]) if tp in rows else None
        points.append(Point(tp, us, None if cost is None else us + cost))
    return points


def legal_of(spec: str) -> list[int]:
    """The degrees that the model splits into."""
    model, dtype = split_spec(spec)
    legal = open_model(model, dtype).config.legal_tp(16 if dtype == "fp8" else 8)
    return [tp for tp in DEGREES if tp in legal]


def report(
    spec: str, found: Fit, points: Sequence[Point], rows: dict[int, dict[str, Any]], legal: Sequence[int]
) -> list[dict[str, Any]]:
    """Print the table of one model; its rows."""
    model, dtype = split_spec(spec)
    alone, vllm = {p.tp: 1e6 / p.us_without_reduce for p in points}, VLLM.get((model, dtype), {})
    print(
        f"\n{model} {dtype}: T(tp) = {found.weight_us:.0f} µs / tp + {found.serial_us:.0f} µs + "
        f"{found.reduces} × {found.reduce_us:.2f} µs ({found.reduce_from})"
    )
    print(f"{'tp':>4} {'tok/s':>8} {'speed-up':>9} {'Amdahl':>7} {'no sums':>8} {'measured':>9} {'vLLM (quoted)':>13}")
    table, base = [], found.us(1)
    for tp in legal:
        here = rows[tp]["tok_s"] if tp in rows else None
        row: dict[str, Any] = {
            "model": model, "dtype": dtype, "tp": tp, "tok_s": 1e6 / found.us(tp), "speed_up": base / found.us(tp),
            "amdahl": base / found.without_sums(tp), "lone_rank_tok_s": alone.get(tp), "measured_tok_s": here,
            **asdict(found),
        }  # fmt: skip
        row |= quoted("vLLM 0.25.1" if tp < 8 else "vLLM, by others", tok_s=vllm.get(tp))
        table.append(row)
        cells = [f"{x:.1f}" if x is not None else "" for x in (alone.get(tp), here, vllm.get(tp))]
        print(
            f"{tp:4} {row['tok_s']:8.1f} {row['speed_up']:9.2f} {row['amdahl']:7.2f} {cells[0]:>8} {cells[1]:>9} "
            f"{cells[2]:>13}",
            flush=True,
        )
    return table


def main() -> int:
    parser = Parser("python -m bench.scaling", description="tok/s against GPUs: measured, fitted, predicted")
    parser.add_argument("--model", action="append", metavar="SPEC[:DTYPE]", help=f"default {' '.join(DEFAULT)}")
    parser.add_argument("--tp", nargs="+", type=positive, default=DEGREES, help="degrees of the lone rank")
    parser.add_argument("--tokens", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--reduce-us", type=amount, default=ASSUMED_US, help="of a sum, where none was measured")
    result_arguments(parser, "scaling.json")
    a = parser.parse_args()
    specs = a.model or DEFAULT
    check_models(specs)
    for spec in specs:
        if len(degrees := set(a.tp) & set(legal_of(spec))) < 2:
            raise UsageError(f"{spec} splits into {sorted(degrees)} of --tp: one degree alone does not say what stays")
    table: list[dict[str, Any]] = []
    with open_gpus(1, None) as devices:
        for spec in specs:
            model, dtype = split_spec(spec)
            config = open_model(model, dtype).config
            legal = legal_of(spec)
            rows = measured(a.output, model, dtype) or measured(RESULTS, model, dtype)
            points = points_of(devices[0], spec, [tp for tp in a.tp if tp in legal], rows, a.tokens, a.repeats)
            table += report(spec, fit(points, config.L, a.reduce_us), points, rows, legal)
        save("scaling", environment(devices[0], a.commit), table, a.output)
    return 0


if __name__ == "__main__":
    command(main)
