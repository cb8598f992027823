"""Where a decode step's time goes: the step's time less its time without one stage.

    python -m bench.stages [--model SPEC[:DTYPE] …] [--context N …] [--blocks-per-sm N …]

A stage costs what the step saves when the stage is left out of the captured graph, in every layer. Stages overlap
at their boundaries, so the figures need not add up to the step; the rest is printed as "other". The share of the read
ceiling counts the stage's weights, or for attention the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.common import command, environment, read_ceiling, result_arguments, save, time_in_turns
from bench.decode import check_models, split_spec
from loaders.resolve import open_model
from qwen_raw.cli.arguments import Parser, natural
from qwen_raw.driver.device import CudaDevice
from qwen_raw.model.decode import STAGES, StepOptions
from qwen_raw.model.runner import DeviceRunner, Step

STEPS = 64


def stage_bytes(runner: DeviceRunner, stage: str, context: int) -> int:
    """Bytes that one step reads for a stage."""
    weights = runner.ranks[0].weights
    layers = weights.layers
    if stage == "head":
        return weights.head.nbytes
    if stage == "attn":
        return runner.config.kv_bytes_per_token() * (context + STEPS // 2)
    if stage == "gate_up":
        return sum(x.gate.nbytes + x.up.nbytes for x in layers)
    if stage in ("qkv", "o", "down"):
        return sum(getattr(x, stage).nbytes for x in layers)
    return 0


def steps_us(dev: CudaDevice, runner: DeviceRunner, options: Sequence[StepOptions], context: int) -> list[float]:
    """Median microseconds of a step with each of `options`, replayed back to back, in turns."""

    def replays(step: Step) -> Callable[[], None]:
        return lambda: runner.replay(context, STEPS, step)

    steps = [runner.capture_step(o) for o in options]
    timings = time_in_turns(dev, [replays(step) for step in steps], repeats=9)
    for step in steps:
        step.close()
    return [timing.median * 1e3 / STEPS for timing in timings]


def measure(
    dev: CudaDevice, runner: DeviceRunner, model: str, context: int, blocks: int | None, ceiling: float
) -> list[dict[str, Any]]:
    """One row for the step and one a stage."""
    stages = [s for s in STAGES if s != "reduce"]  # one GPU
    whole, *without = steps_us(
        dev, runner,
        [StepOptions(skip=frozenset(skip), blocks_per_sm=blocks) for skip in [(), *((s,) for s in stages)]], context,
    )  # fmt: skip
    common = {"model": model, "dtype": runner.dtype, "context": context, "blocks_per_sm": blocks}
    rows: list[dict[str, Any]] = [common | {"stage": "step", "us": whole, "tok_s": 1e6 / whole}]
    print(
        f"{model} {runner.dtype}, context {context}, blocks/SM {blocks or 'default'}: "
        f"{whole:.1f} µs, {1e6 / whole:.1f} tok/s"
    )
    for stage, rest in zip(stages, without, strict=True):
        us = whole - rest
        nbytes, calls = (
            stage_bytes(runner, stage, context),
            1 if stage in ("embed", "head", "sample") else runner.config.L,
        )
        row: dict[str, Any] = {"stage": stage, "us": us, "us_each": us / calls, "bytes": nbytes}
        share = nbytes / (us * 1e-6) / ceiling if nbytes and us > 0 else 0.0
        rows.append(common | row | {"of_read": share})
        print(
            f"    {stage:8} {us:8.1f} µs  {us / calls:7.2f} µs each  {100 * us / whole:5.1f} %  {share:6.3f} of read",
            flush=True,
        )
    other = whole - sum(row["us"] for row in rows[1:])
    rows.append(common | {"stage": "other", "us": other})
    print(f"    {'other':8} {other:8.1f} µs")
    return rows


def main() -> int:
    parser = Parser("python -m bench.stages", description="the stages of a decode step")
    parser.add_argument("--model", action="append", metavar="SPEC[:DTYPE]", help="repeatable; default random:7b:bf16")
    parser.add_argument("--context", nargs="+", type=natural, default=[0])
    parser.add_argument("--blocks-per-sm", nargs="+", type=natural, default=[0], help="0: the launchers' own choice")
    result_arguments(parser, "stages.json")
    a = parser.parse_args()
    check_models(a.model or ["random:7b:bf16"], 1, [max(a.context) + 2 * STEPS])
    dev = CudaDevice(0)
    ceiling = read_ceiling(dev)
    print(f"# {dev.name}, {dev.driver}; reads reach {ceiling / 1e12:.2f} TB/s")
    rows = []
    for spec in a.model or ["random:7b:bf16"]:
        model, dtype = split_spec(spec)
        checkpoint = open_model(model, dtype)
        length = max(a.context) + 2 * STEPS
        runner = DeviceRunner(
            dev, checkpoint, dtype=dtype, max_model_len=length, text_vocab=checkpoint.config.V, owns_device=False
        )
        for context in a.context:
            for blocks in a.blocks_per_sm:
                rows += measure(dev, runner, model, context, blocks or None, ceiling)
        runner.close()
    save("stages", environment(dev, a.commit), rows, a.output)
    dev.close()
    return 0


if __name__ == "__main__":
    command(main)
