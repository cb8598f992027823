"""How decode scales with GPUs: measured where there are GPUs, predicted beyond, beside Amdahl's bound and vLLM.

    python -m bench.scaling [--model random:72b:fp8 …] [--tp 1 2] [--tokens 32] [--comm PATH]

The model of a step's time is T(tp) = W / (B·tp) + s + 2·L·l: the weights W at an effective bandwidth B a GPU, what does
not shrink (s: attention's latency, the ends of kernels, the choice of the id), and a latency l for each of the 2·L sums
over ranks. Each degree gives two equations, the step and the step without its sums; B, s and l are their least
squares. Where a model does not fit one GPU, s is that of another dtype of the same size.

Amdahl's bound is the speed-up if the sums cost nothing: only s stays. A degree that is too large for the machine, or
for the model, is left out of the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import RESULTS, command, environment, open_gpus, save
from bench.decode import open_runner, split_spec, step_us
from loaders.resolve import open_model
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.driver.device import CudaDevice
from qwen_raw.driver.probe import probe
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.model.decode import StepOptions
from qwen_raw.model.shard import Shard
from qwen_raw.model.weights import weight_bytes

DEFAULT = ["random:7b:bf16", "random:7b:fp8", "random:72b:fp8", "random:72b:bf16"]
DEGREES = (1, 2, 4, 8)
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
    """One measured degree."""

    tp: int
    us: float
    us_without_reduce: float


@dataclass(frozen=True, slots=True)
class Fit:
    """T(tp) = weight_us / tp + serial_us + reduces·reduce_us, µs; the last term at several ranks only."""

    weight_us: float
    serial_us: float
    reduce_us: float
    reduces: int
    serial_from: str | None = None  # the dtype that serial_us was taken from

    def us(self, tp: int) -> float:
        """A step's time."""
        return self.without_sums(tp) + (self.reduces * self.reduce_us if tp > 1 else 0.0)

    def without_sums(self, tp: int) -> float:
        """The same if the sums over ranks cost nothing."""
        return self.weight_us / tp + self.serial_us


def fit(points: Sequence[Point], layers: int, serial: tuple[str, float] | None = None) -> Fit:
    """Least squares over all points, in relative error. `serial`: (dtype, µs) of s, where one degree alone is known."""
    rows, times = [], []
    for p in points:
        for us, reduces in ((p.us_without_reduce, 0), (p.us, 2 * layers if p.tp > 1 else 0)):
            rows.append([1 / p.tp, 1.0, reduces])
            times.append(us)
    a, t = np.array(rows), np.array(times)
    if len({p.tp for p in points}) == 1:
        if serial is None:
            raise QwenRawError("one degree alone says nothing of what does not shrink: measure another too")
        t, a = t - serial[1], a[:, [0, 2]]
    used = a.any(axis=0)
    solution = np.zeros(a.shape[1])
    solution[used] = np.linalg.lstsq(a[:, used] / t[:, None], np.ones(len(t)), rcond=None)[0]
    if a.shape[1] == 2:
        assert serial is not None
        return Fit(float(solution[0]), serial[1], float(solution[1]), 2 * layers, serial[0])
    return Fit(float(solution[0]), float(solution[1]), float(solution[2]), 2 * layers)


def measure(spec: str, tp: int, tokens: int, repeats: int, comm: str) -> Point | None:
    """One degree, on GPUs 0, 1, …; None where the model does not fit."""
    with open_gpus(tp, None) as devices:
        if not fits(devices, spec):
            return None
        runner = open_runner(devices, spec, 2 * tokens + 64, comm)
        us, _ = step_us(devices, runner, 0, tokens, repeats, None)
        alone = us
        if tp > 1:
            step = runner.capture_step(StepOptions(skip=frozenset({"reduce"})))
            alone, _ = step_us(devices, runner, 0, tokens, repeats, step)
            step.close()
        runner.close()
        return Point(tp, us, alone)


def fits(devices: Sequence[CudaDevice], spec: str) -> bool:
    """Whether a rank's weights leave a GPU some room."""
    model, dtype = split_spec(spec)
    shard = Shard(open_model(model, dtype).config, 0, len(devices))
    return weight_bytes(shard, dtype == "fp8") < 0.97 * devices[0].memory_info()[0]


def report(spec: str, found: Fit, points: Sequence[Point], legal: Sequence[int]) -> list[dict[str, Any]]:
    """Print the table of one model; its rows."""
    model, dtype = split_spec(spec)
    measured, vllm = {p.tp: p for p in points}, VLLM.get((model, dtype), {})
    taken = f" (as {found.serial_from})" if found.serial_from else ""
    print(
        f"\n{model} {dtype}: T(tp) = {found.weight_us:.0f} µs / tp + {found.serial_us:.0f} µs{taken} + "
        f"{found.reduces} × {found.reduce_us:.3f} µs"
    )
    print(f"{'tp':>4} {'tok/s':>8} {'measured':>9} {'speed-up':>9} {'Amdahl':>8} {'linear':>7} {'vLLM':>7}")
    rows, base = [], found.us(1)
    for tp in legal:
        rate, here = 1e6 / found.us(tp), measured.get(tp)
        row: dict[str, Any] = {
            "model": model, "dtype": dtype, "tp": tp, "tok_s": rate, "measured_tok_s": 1e6 / here.us if here else None,
            "speed_up": base / found.us(tp), "amdahl": base / found.without_sums(tp), "vllm_tok_s": vllm.get(tp),
            **asdict(found),
        }  # fmt: skip
        rows.append(row)
        print(
            f"{tp:4} {rate:8.1f} {f'{1e6 / here.us:.1f}' if here else '':>9} {row['speed_up']:9.2f} "
            f"{row['amdahl']:8.2f} {tp:7} {vllm.get(tp, ''):>7}"
        )
    return rows


def main() -> int:
    parser = Parser("python -m bench.scaling", description="tok/s against GPUs: measured, fitted, predicted")
    parser.add_argument("--model", action="append", metavar="SPEC[:DTYPE]", help=f"default {' '.join(DEFAULT)}")
    parser.add_argument("--tp", nargs="+", type=positive, default=DEGREES, help="degrees to measure if they fit")
    parser.add_argument("--tokens", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--comm", default="auto", help="path of the sums over ranks: auto, lamport, flag, twoshot")
    parser.add_argument("--commit")
    parser.add_argument("--output", type=Path, default=RESULTS)
    a = parser.parse_args()
    machine = probe()
    if not machine.gpus:
        raise UsageError(str(machine.problem))
    rows: list[dict[str, Any]] = []
    serial: dict[str, tuple[str, float]] = {}  # by size
    for spec in a.model or DEFAULT:
        model, dtype = split_spec(spec)
        config = open_model(model, dtype).config
        legal = config.legal_tp(16 if dtype == "fp8" else 8)
        degrees = [tp for tp in a.tp if tp in legal and tp <= len(machine.gpus)]
        points = [p for tp in degrees if (p := measure(spec, tp, a.tokens, a.repeats, a.comm)) is not None]
        if not points:
            print(f"\n{model} {dtype}: no degree of {a.tp} can be measured here")
            continue
        found = fit(points, config.L, serial.get(model))
        if found.serial_from is None:
            serial[model] = (dtype, found.serial_us)
        rows += report(spec, found, points, [tp for tp in DEGREES if tp in legal])
    with open_gpus(1, None) as devices:
        save("scaling", environment(devices[0], a.commit), rows, a.output)
    return 0


if __name__ == "__main__":
    command(main)
