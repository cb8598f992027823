"""Where a prompt's time goes: its time less its time without one stage, and each stage alone, layer after layer.

    python -m bench.prefill_stages [--model SPEC[:DTYPE] …] [--prompt N …] [--repeats 5]
                                   [--tp N] [--devices N,N,…] [--comm PATH] [--gemm own]

`prompt` is one chunk through all layers as one graph; the LM head on the last row is another. `left out` is what the
graph saves without the stage, in every layer; `alone` is a graph of nothing but the stage. The first sees what
overlaps at the boundaries, and that a stage draws power from the others; the second is what a stage costs where nothing
is beside it. `sum` adds each column up. All graphs are timed in turns, after a while of work (bench.common). `of read`:
bytes of a stage that is bound by memory, over its time alone and the read ceiling; for products, TFLOP/s alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.common import command, environment, open_gpus, ranks_of, read_ceiling, result_arguments, save, time_in_turns
from bench.decode import COMMS, check_models, open_runner, split_spec
from qwen_raw.cli.arguments import Parser, ordinals, positive
from qwen_raw.device import Graph
from qwen_raw.driver.device import CudaDevice
from qwen_raw.kernels.last_row import last_row
from qwen_raw.model.decode import lm_head
from qwen_raw.model.gemm_choice import GEMM
from qwen_raw.model.prefill import STAGES, quantised_heads, sums_by_rows
from qwen_raw.model.rank import Rank
from qwen_raw.model.runner import DeviceRunner

DEFAULT = ["random:7b:bf16", "random:7b:fp8"]
TWICE = ("norm", "reduce")  # in a layer; a norm that is not part of a sum
ALL = frozenset(STAGES)


def quantised_by_passes(rank: Rank, rows: int) -> list[int]:
    """The widths of a layer's inputs that are quantised by a pass of their own."""
    c, w, b = rank.shard.local, rank.weights.layers[0], rank.prefill
    if b.products.room(b.n).scale is None:
        return []
    heads = quantised_heads(rank.device, c, w, rank.cache.k[0], rank.cache.wide, b, rows, rank.residual)
    return [c.I] if heads is not None else [c.H * c.HD, c.I]


def stages(runner: DeviceRunner, rows: int) -> list[str]:
    """Those that have work to do."""
    rank, none = runner.ranks[0], set()
    if len(runner.ranks) == 1:
        none.add("reduce")
    if not quantised_by_passes(rank, rows):
        none.add("quantise")
    return [stage for stage in STAGES if stage not in none]


def chunk_graph(rank: Rank, rows: int, skip: frozenset[str], layers: int | None = None) -> Graph:
    """A chunk without some stages."""
    with rank.device.capture() as capture:
        for _ in rank.prefill_chunk(rows, skip=skip, layers=layers):
            pass
    return capture.graph


def head_graph(rank: Rank, rows: int) -> Graph:
    """The LM head on the last token."""
    with rank.device.capture() as capture:
        last_row(rank.device, rank.decode.h, rank.prefill.h.view((rows, rank.shard.whole.D)), rank.prefill.span)
        lm_head(rank.device, rank.shard.local, rank.weights, rank.decode.h, rank.decode.logits)
    return capture.graph


def calls(rank: Rank, stage: str, rows: int) -> int:
    """Of a stage, in a chunk. Where sums norm their rows, the first norm alone is left."""
    if stage == "quantise":
        return rank.shard.whole.L * len(quantised_by_passes(rank, rows))
    if stage not in STAGES or (stage == "norm" and sums_by_rows(rank.residual, rank.prefill.products)):
        return 1
    return rank.shard.whole.L * (2 if stage in TWICE else 1)


def work(rank: Rank, stage: str, rows: int) -> dict[str, float]:
    """What all layers of a rank do in a stage: multiplications and additions, or bytes."""
    c, layer = rank.shard.local, rank.weights.layers[0]
    linears = {"qkv": [layer.qkv], "o": [layer.o], "gate_up": [layer.gate, layer.up], "down": [layer.down]}
    if stage in linears:
        return {"flop": 2.0 * rows * c.L * sum(w.N * w.K for w in linears[stage])}
    item = 2 if rank.prefill.products.room(rank.prefill.n).scale is None else 1
    if stage == "norm":
        return {"bytes": float(calls(rank, stage, rows) * rows * c.D * (4 + item))}
    if stage == "quantise":
        return {"bytes": c.L * rows * sum(quantised_by_passes(rank, rows)) * 3.0}
    return {}


def measure(
    devices: Sequence[CudaDevice],
    spec: str,
    comm: str,
    prompts: Sequence[int],
    repeats: int,
    ceiling: float,
    gemm: str = "auto",
) -> list[dict[str, Any]]:
    """One row for each prompt and each of its stages."""
    model, dtype = split_spec(spec)
    runner = open_runner(devices, spec, max(prompts) + 1, comm, gemm=gemm)
    rows = []
    for tokens in prompts:
        if tokens > runner.prompt.buckets[-1] or tokens > runner.max_model_len:
            continue
        common = {"model": model, "dtype": dtype, "tp": len(devices), "comm": comm, "gemm": gemm, "prompt": tokens}
        times = measure_prompt(devices, runner, tokens, repeats)
        rows += [common | row for row in table(runner, tokens, times, ceiling)]
    runner.close()
    return rows


def measure_prompt(
    devices: Sequence[CudaDevice], runner: DeviceRunner, tokens: int, repeats: int
) -> dict[tuple[str, str], float]:
    """Median ms by (stage, "left out" or "alone"); the prompt, the embedding and the head are only "alone"."""
    rows = runner.prompt.bucket(tokens)
    ranks, found = runner.ranks, stages(runner, rows)
    ids = np.random.default_rng(1).integers(0, runner.text_vocab, tokens).tolist()
    for rank in ranks:
        rank.prefill.put(ids, 0)
    none: frozenset[str] = frozenset()
    graphs: dict[tuple[str, str], list[Graph]] = {
        ("prompt", "alone"): [chunk_graph(rank, rows, none) for rank in ranks],
        ("embed", "alone"): [chunk_graph(rank, rows, none, 0) for rank in ranks],
        ("head", "alone"): [head_graph(rank, rows) for rank in ranks],
    }
    for stage in found:
        graphs[stage, "left out"] = [chunk_graph(rank, rows, frozenset({stage})) for rank in ranks]
        graphs[stage, "alone"] = [chunk_graph(rank, rows, ALL - {stage}) for rank in ranks]

    def launches(of: list[Graph]) -> Callable[[], None]:
        def launch() -> None:
            for graph in of:
                graph.launch()

        return launch

    timings = time_in_turns(devices, [launches(of) for of in graphs.values()], repeats=repeats)
    times = {key: timing.median for key, timing in zip(graphs, timings, strict=True)}
    for of in graphs.values():
        for graph in of:
            graph.close()
    whole, embed = times["prompt", "alone"], times["embed", "alone"]
    for stage in found:
        times[stage, "left out"] = whole - times[stage, "left out"]
        times[stage, "alone"] -= embed  # which all chunks begin with
    return times


def table(
    runner: DeviceRunner, tokens: int, times: dict[tuple[str, str], float], ceiling: float
) -> list[dict[str, Any]]:
    """The rows, printed as they are made."""
    whole, rows, bucket = times["prompt", "alone"], [], runner.prompt.bucket(tokens)
    print(f"{tokens} tokens: {whole:.2f} ms")
    sums = {"left out": 0.0, "alone": 0.0}
    for stage in ("prompt", "embed", *stages(runner, bucket), "head"):
        alone, each = times[stage, "alone"], times[stage, "alone"] * 1e3 / calls(runner.ranks[0], stage, bucket)
        row: dict[str, Any] = {"stage": stage, "alone_ms": alone, "alone_us_each": each}
        text = f"{alone:9.2f} ms alone {row['alone_us_each']:9.2f} µs each"
        if stage in STAGES:
            row["left_out_ms"] = times[stage, "left out"]
            text = f"{row['left_out_ms']:9.2f} ms left out {text}"
            sums["left out"] += row["left_out_ms"]
            done = work(runner.ranks[0], stage, tokens)
            if "flop" in done:
                row["tflop_s"] = done["flop"] / alone / 1e9
                text += f" {row['tflop_s']:6.0f} TFLOP/s"
            elif "bytes" in done:
                row["of_read"] = done["bytes"] / (alone * 1e-3) / ceiling
                text += f" {row['of_read']:6.3f} of read"
        if stage not in ("prompt", "head"):
            sums["alone"] += alone
        rows.append(row)
        print(f"    {stage:9} {text}", flush=True)
    rows.append({"stage": "sum", "alone_ms": sums["alone"], "left_out_ms": sums["left out"]})
    print(f"    {'sum':9} {sums['left out']:9.2f} ms left out {sums['alone']:9.2f} ms alone, of {whole:.2f}")
    return rows


def main() -> int:
    parser = Parser("python -m bench.prefill_stages", description="the stages of a prompt")
    parser.add_argument(
        "--model", action="append", metavar="SPEC[:DTYPE]", help=f"repeatable; default {' '.join(DEFAULT)}"
    )
    parser.add_argument("--prompt", type=positive, nargs="+", default=[512, 2048], help="tokens; default 512 2048")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--tp", type=positive, help="ranks; default 1, or one for each of --devices")
    parser.add_argument("--devices", type=ordinals, metavar="N,N,…", help="the ranks' GPUs; default 0,1,…")
    comms = [path for path in COMMS if path != "host"]
    parser.add_argument("--comm", default="auto", choices=comms, help="path of the sums over ranks")
    parser.add_argument("--gemm", default="auto", choices=GEMM, help="what multiplies")
    result_arguments(parser, "prefill_stages.json, or prefill_stages_tpN.json")
    a = parser.parse_args()
    check_models(a.model or DEFAULT, len(ranks_of(a.tp, a.devices)), [n + 1 for n in a.prompt])
    with open_gpus(a.tp, a.devices) as devices:
        ceiling = read_ceiling(devices[0])
        print(f"# {devices[0].name}, {devices[0].driver}; reads reach {ceiling / 1e12:.2f} TB/s")
        rows = []
        for spec in a.model or DEFAULT:
            print(f"# {spec}, {len(devices)} ranks")
            rows += measure(devices, spec, a.comm, a.prompt, a.repeats, ceiling, a.gemm)
        variant = f"tp{len(devices)}" if len(devices) > 1 else ""
        path = save("prefill_stages", environment(devices[0], a.commit), rows, a.output, variant)
        print(f"# written: {path.name}")
    return 0


if __name__ == "__main__":
    command(main)
