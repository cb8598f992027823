"""Prefill on one device, decode on another (qwen_raw/model/transfer.py), beside one device that does both.

    python -m bench.kv_transfer [--devices 0,1 | --sim 2] [--model SPEC[:DTYPE] …] [--prompt 128 512 …] [--tokens 128]

Ids and hashes of the logits are compared, and must be equal. `hand-over` is event time of both sides, queued together
on idle devices: from the first put to the last take, the slower device's; GB/s counts keys and values once. The first
id comes from the device that prefills, the second from the other: host's times from the request, beside one device's.
"""

from __future__ import annotations

import statistics
from typing import Any

from bench.allreduce import Ranks
from bench.common import command
from bench.decode import steps_us
from bench.hand_over import add_arguments, check, run
from qwen_raw.cli.arguments import Parser
from qwen_raw.driver.device import CudaDevice
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.transfer import TransferRunner

MODELS = ("tiny-shakespeare:bf16", "random:7b:bf16")


def hand_over(gpus: list[CudaDevice], runner: TransferRunner, tokens: int, repeats: int) -> dict[str, Any]:
    """µs, bytes and GB/s of the keys and values of a prompt of so many ids."""
    rows = runner.rows(tokens)
    ranks, graphs = Ranks(gpus), runner.hand_over.capture(rows)
    for graph in graphs:
        graph.launch()
    ranks.wait()
    us = [ms * 1e3 for ms in ranks.time(graphs, 2 + repeats)][2:]
    for graph in graphs:
        graph.close()
    middle, nbytes = statistics.median(us), runner.hand_over.nbytes(rows)
    return {"rows": rows, "hand_over_us": middle, "hand_over_us_worst": max(us), "bytes": nbytes,
            "gb_s": nbytes / middle / 1e3}  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row as people read it."""
    text = f"{row['model']:24} {row['dtype']:5} prompt {row['prompt']:5}: {row['ids_equal']} ids equal"
    if "hand_over_us" not in row:
        return text
    return (
        f"{text}; {row['bytes'] / 1e6:.1f} MB handed over in {row['hand_over_us']:.0f} µs ({row['gb_s']:.0f} GB/s); "
        f"{row['tok_s']:.1f} tok/s, one {row['one_tok_s']:.1f}; first id {row['ttft_ms']:.2f} ms, one "
        f"{row['one_ttft_ms']:.2f}; second {row['second_ms']:.2f}, one {row['one_second_ms']:.2f}"
    )


def measure(gpus: list[CudaDevice], one: DeviceRunner, apart: DeviceRunner, prompt: int, a: Any) -> dict[str, Any]:
    """Decode on the second, beside the first alone; and the hand-over of the prompt."""
    assert isinstance(apart, TransferRunner)
    (step,) = steps_us(gpus[1:], apart, prompt, a.tokens, a.repeats, [None])
    (alone,) = steps_us(gpus[:1], one, prompt, a.tokens, a.repeats, [None])
    row = {"tok_s": 1e6 / step.median, "spread": step.spread, "one_tok_s": 1e6 / alone.median}
    return row | hand_over(gpus, apart, prompt, a.repeats)


def main() -> int:
    parser = Parser("python -m bench.kv_transfer", description="prefill on one device, decode on another")
    add_arguments(parser, "kv_transfer", MODELS, [128, 512, 2048])
    a = parser.parse_args()
    models = check(a, MODELS, [2], "one computes prompts, the other decodes")
    run(a, "kv_transfer", models, TransferRunner, {}, measure, line)
    return 0


if __name__ == "__main__":
    command(main)
