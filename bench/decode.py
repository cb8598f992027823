"""Decode speed at batch 1: tg128, replays of the captured step back to back, and the same seen from the host.

    python -m bench.decode [--model SPEC[:DTYPE] …] [--context N …] [--tokens 128] [--repeats 5]
                           [--tp N] [--devices N,N,…] [--comm PATH …] [--kv-cache-dtype bf16 fp8]

`tok/s` is event time of the replays alone, of the slowest rank; `host` is (n - 1) / (t_last - t_first) over ids read
through the engine's own ring. GB/s counts the weights once a token (LM head included) plus the KV cache at that length,
of all ranks; `of read` is its share of the read ceiling of their GPUs, measured in the same run on the first. A context
is set by moving the position: the keys are whatever the cache holds, which decode reads at the same cost.

With several ranks, `reduce` is what a sum over ranks adds: the step less the step without them, over 2·L, both timed in
turns. Replays run for a moment before any is timed: the clocks should be those that last. The JSON is written after
every model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal

from bench.common import (
    Timing,
    command,
    environment,
    open_gpus,
    ranks_of,
    read_ceiling,
    result_arguments,
    save,
    time_in_turns,
)
from loaders.resolve import open_model
from qwen_raw.cli.arguments import Parser, natural, ordinals, positive
from qwen_raw.comm.reduce import PATHS
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import UsageError
from qwen_raw.model.decode import StepOptions
from qwen_raw.model.runner import DeviceRunner, Step
from qwen_raw.placement import degree

DEFAULT = ["tiny-shakespeare:bf16", "random:0.5b:bf16", "random:7b:bf16", "random:7b:fp8"]
COMMS = ("auto", "inline", *PATHS)
COLUMNS = ("model", "dtype", "KV", "tp", "context", "tok/s", "", "host", "GB/s", "of read", "reduce µs", "load s")


def split_spec(spec: str) -> tuple[str, Literal["bf16", "fp8"]]:
    """ "random:7b:fp8" → ("random:7b", "fp8"); bf16 where none is named. UsageError for another type."""
    model, _, dtype = spec.rpartition(":")
    if model.startswith("random:") and dtype not in ("bf16", "fp8") and not dtype.isdecimal():
        raise UsageError(f"model {spec!r} ends in {dtype!r}, expected bf16, fp8 or a seed")
    if dtype == "fp8":
        return model, "fp8"
    return (model if dtype == "bf16" else spec), "bf16"


def check_models(specs: Sequence[str], ranks: int = 1, lengths: Sequence[int] = ()) -> None:
    """UsageError, before a GPU is looked for: what is no model, or does not split so; a length that no model has."""
    configs = []
    for spec in specs:
        model, dtype = split_spec(spec)
        configs.append(open_model(model, dtype).config)
        degree(ranks, None, configs[-1], fp8=dtype == "fp8")
    most = max(config.max_position for config in configs)
    for length in lengths:
        if length > most:
            raise UsageError(f"{length} positions are more than the {most} of {' and '.join(specs)}")


def open_runner(
    devices: Sequence[CudaDevice],
    spec: str,
    length: int,
    comm: str = "auto",
    kv: str = "bf16",
    gemm: str = "auto",
) -> DeviceRunner:
    """The model split over the devices, with room for `length` positions."""
    model, dtype = split_spec(spec)
    checkpoint = open_model(model, dtype)
    config = checkpoint.config
    degree(len(devices), None, config, fp8=dtype == "fp8")
    return DeviceRunner(
        devices, checkpoint, dtype=dtype, max_model_len=min(length, config.max_position), text_vocab=config.V,
        owns_device=False, comm=comm, kv=kv, gemm=gemm,
    )  # fmt: skip


def steps_us(
    devices: Sequence[CudaDevice],
    runner: DeviceRunner,
    context: int,
    tokens: int,
    repeats: int,
    steps: Sequence[Step | None],
) -> list[Timing]:
    """Microseconds of each of `steps` (None: the runner's own), `tokens` replays back to back, in turns."""

    def replays(step: Step | None) -> Callable[[], None]:
        return lambda: runner.replay(context, tokens, step)

    timings = time_in_turns(devices, [replays(step) for step in steps], repeats=repeats)
    return [Timing(tuple(ms * 1e3 / tokens for ms in timing.samples)) for timing in timings]


def measure(
    devices: Sequence[CudaDevice],
    spec: str,
    comm: str,
    kv: str,
    contexts: list[int],
    tokens: int,
    repeats: int,
    ceiling: float,
) -> list[dict[str, Any]]:
    """One row a context."""
    model, dtype = split_spec(spec)
    begin = time.perf_counter()
    runner = open_runner(devices, spec, max(contexts) + 2 * tokens + 64, comm, kv)
    load_s = time.perf_counter() - begin
    gpus, rows = len({dev.ordinal for dev in devices}), []
    without = runner.capture_step(StepOptions(skip=frozenset({"reduce"}))) if len(devices) > 1 else None
    for context in contexts:
        if context + tokens > runner.max_model_len:
            continue
        steps = [None] if without is None else [None, without]
        whole, *alone = steps_us(devices, runner, context, tokens, repeats, steps)
        us = whole.median
        moved = (runner.bytes_per_token + runner.kv_bytes_per_token * (context + tokens / 2)) / us * 1e6
        row: dict[str, Any] = {
            "model": model, "dtype": dtype, "kv": kv, "tp": len(devices), "devices": [dev.ordinal for dev in devices],
            "layers": runner.config.L, "context": context, "tokens": tokens, "repeats": repeats,
            "tok_s": 1e6 / us, "spread": whole.spread, "samples_us": list(whole.samples),
            "gb_s": moved / 1e9, "of_read": moved / (ceiling * gpus), "read_gb_s": ceiling / 1e9, "load_s": load_s,
        }  # fmt: skip
        for timing in alone:
            row |= {"comm": comm, "path": runner.ranks[0].residual.path, "us_without_reduce": timing.median}
            row["reduce_us"] = (us - timing.median) / (2 * runner.config.L)
        if context == 0 and tokens > 1:
            row["host_tok_s"] = host_rate(runner, tokens)
        rows.append(row)
        print(line(row), flush=True)
    if without is not None:
        without.close()
    runner.close()
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as people read it."""
    host = f"{row['host_tok_s']:.1f}" if "host_tok_s" in row else ""
    reduce = f"{row['reduce_us']:.3f}" if "reduce_us" in row else ""
    path = f" {row['path']}" if "path" in row else ""
    return (
        f"{row['model']:18} {row['dtype']:5} {row['kv']:5} {row['tp']:2} {row['context']:7} {row['tok_s']:9.1f} "
        f"±{100 * row['spread']:4.1f}% {host:>9} {row['gb_s']:8.0f} {row['of_read']:7.3f} {reduce:>9} "
        f"{row['load_s']:6.1f}{path}"
    )


def host_rate(runner: DeviceRunner, tokens: int) -> float:
    """(n - 1) / (t_last - t_first) of a greedy generation after a one-token prompt."""
    times = [time.perf_counter() for _ in runner.generate([1], max_tokens=tokens, temperature=0.0, seed=0)]
    return (len(times) - 1) / (times[-1] - times[0])


def main() -> int:
    parser = Parser("python -m bench.decode", description="decode tok/s at batch 1")
    parser.add_argument(
        "--model", action="append", metavar="SPEC[:DTYPE]", help=f"repeatable; default {' '.join(DEFAULT)}"
    )
    parser.add_argument("--context", type=natural, action="append", help="repeatable; default 0")
    parser.add_argument("--tokens", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--tp", type=positive, help="ranks; default 1, or one for each of --devices")
    parser.add_argument("--devices", type=ordinals, metavar="N,N,…", help="the ranks' GPUs; default 0,1,…")
    parser.add_argument("--comm", nargs="+", default=["auto"], choices=COMMS, help="paths of the sums over ranks")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["bf16"], choices=["bf16", "fp8"])
    result_arguments(parser, "decode.json, or decode_tpN.json")
    a = parser.parse_args()
    contexts, ranks = a.context or [0], ranks_of(a.tp, a.devices)
    check_models(a.model or DEFAULT, len(ranks), [context + a.tokens for context in contexts])
    with open_gpus(a.tp, a.devices) as devices:
        ceiling = read_ceiling(devices[0])
        print(f"# {devices[0].name}, {devices[0].driver}; reads reach {ceiling / 1e12:.2f} TB/s")
        print("{:18} {:5} {:5} {:>2} {:>7} {:>9} {:6} {:>9} {:>8} {:>7} {:>9} {:>6}".format(*COLUMNS))
        rows: list[dict[str, Any]] = []
        variant, env = f"tp{len(devices)}" if len(devices) > 1 else "", environment(devices[0], a.commit)
        for spec, comm, kv in product(a.model or DEFAULT, a.comm, a.kv_cache_dtype):
            rows += measure(devices, spec, comm, kv, contexts, a.tokens, a.repeats, ceiling)
            path = save("decode", env, rows, a.output, variant)
        print(f"# written: {path.name}")
    return 0


if __name__ == "__main__":
    command(main)
