"""Decode speed at batch 1: tg128, replays of the captured step back to back, and the same seen from the host.

    python -m bench.decode [--model SPEC[:DTYPE] …] [--context N …] [--tokens 128] [--repeats 5]

`tok/s` is event time of the replays alone; `host` is (n - 1) / (t_last - t_first) over ids read through the engine's
own ring. GB/s counts the weights once a token (LM head included) plus the KV cache at that length; `of read` is
its share of the read ceiling measured in the same run. A context is set by moving the position: the keys are whatever
the cache holds, which decode reads at the same cost.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from bench.common import RESULTS, command, environment, read_ceiling, save, time_ms
from loaders.resolve import open_model
from qwen_raw.cli.arguments import Parser, natural, positive
from qwen_raw.driver.device import CudaDevice
from qwen_raw.model.runner import DeviceRunner

DEFAULT = ["tiny-shakespeare:bf16", "random:0.5b:bf16", "random:7b:bf16", "random:7b:fp8"]


def split_spec(spec: str) -> tuple[str, Literal["bf16", "fp8"]]:
    """ "random:7b:fp8" → ("random:7b", "fp8")."""
    model, _, dtype = spec.rpartition(":")
    if dtype == "fp8":
        return model, "fp8"
    return (model if dtype == "bf16" else spec), "bf16"


def measure(
    dev: CudaDevice, spec: str, contexts: list[int], tokens: int, repeats: int, ceiling: float
) -> list[dict[str, Any]]:
    """One row a context."""
    model, dtype = split_spec(spec)
    begin = time.perf_counter()
    checkpoint = open_model(model, dtype)
    max_len = min(max(contexts) + 2 * tokens + 64, checkpoint.config.max_position)
    runner = DeviceRunner(
        dev, checkpoint, dtype=dtype, max_model_len=max_len, text_vocab=checkpoint.config.V, owns_device=False
    )
    load_s = time.perf_counter() - begin
    rows = []
    for context in contexts:
        if context + tokens > max_len:
            continue
        timing = time_ms(dev, lambda n=context: runner.replay(n, tokens), repeats=repeats)  # type: ignore[misc]
        rate = tokens / (timing.median * 1e-3)
        kv = runner.config.kv_bytes_per_token() * (context + tokens / 2)
        moved = (runner.bytes_per_token + kv) * rate
        row = {
            "model": model, "dtype": dtype, "context": context, "tokens": tokens, "repeats": repeats,
            "tok_s": rate, "spread": timing.spread, "gb_s": moved / 1e9, "of_read": moved / ceiling,
            "read_gb_s": ceiling / 1e9, "load_s": load_s,
        }  # fmt: skip
        if context == 0:
            row["host_tok_s"] = host_rate(runner, tokens)
        rows.append(row)
        host = f"{row['host_tok_s']:9.1f}" if "host_tok_s" in row else " " * 9
        print(
            f"{model:18} {dtype:5} {context:7} {rate:9.1f} ±{100 * timing.spread:4.1f}% {host} {moved / 1e9:8.0f} "
            f"{moved / ceiling:7.3f} {load_s:7.1f}",
            flush=True,
        )
    runner.close()
    return rows


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
    parser.add_argument("--device", type=natural, default=0)
    parser.add_argument("--commit", help="recorded in the JSON where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of decode.json")
    a = parser.parse_args()
    dev = CudaDevice(a.device)
    ceiling = read_ceiling(dev)
    print(f"# {dev.name}, {dev.driver}; reads reach {ceiling / 1e12:.2f} TB/s")
    print(
        f"{'model':18} {'dtype':5} {'context':>7} {'tok/s':>9} {'':6} {'host':>9} {'GB/s':>8} "
        f"{'of read':>7} {'load s':>7}"
    )
    rows = []
    for spec in a.model or DEFAULT:
        rows += measure(dev, spec, a.context or [0], a.tokens, a.repeats, ceiling)
    print(f"# written: {save('decode', environment(dev, a.commit), rows, a.output).name}")
    dev.close()
    return 0


if __name__ == "__main__":
    command(main)
