"""`python -m model.lost_rank 0,0 COMM HOW`: a model on GPUs loses its last rank; what a request is told.

HOW: "stalls", its steps are never launched; "traps", a kernel of it fails; "misses the prompt", its prompts are never
launched. A process of its own, because either way a
GPU's context is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from model.ranks import TIED, biased_checkpoint

from qwen_raw.device import BF16, Graph
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.allreduce_lamport import LamportWorkspace, allreduce_lamport
from qwen_raw.model.runner import DeviceRunner, Step

WAYS = ("stalls", "traps")
MISSES = "misses the prompt"


def trap(devices: Sequence[Any]) -> tuple[Graph, object]:
    """A graph of the last device whose kernel traps: it waits for ranks that never come. And what must outlive it."""
    ends = LamportWorkspace.create(devices, 4, limit_ns=1_000_000)
    out, inp = (devices[-1].zeros((32,), BF16) for _ in range(2))
    devices[-1].synchronize()
    with devices[-1].capture() as capture:
        allreduce_lamport(ends[-1], out, inp)
    return capture.graph, (ends, out, inp)


def without_the_last(step: Step, how: str, devices: Sequence[Any]) -> tuple[Step, object]:
    """The step as it is when the last rank stalls, or its kernel traps; and what must outlive it."""
    if how == "stalls":
        return replace(step, graphs=step.graphs[:-1]), None
    graph, kept = trap(devices)
    return replace(step, graphs=(*step.graphs[:-1], graph)), kept


def miss_prompts(runner: DeviceRunner) -> None:
    """The last rank's graphs of prompts are launched no more."""
    runner.prompt.graphs = {key: graphs[:-1] for key, graphs in runner.prompt.graphs.items()}


def main(ordinals: list[int], comm: str, how: str) -> int:
    from qwen_raw.driver.device import CudaDevice

    devices = [CudaDevice(n) for n in ordinals]
    model = biased_checkpoint(TIED)
    runner = DeviceRunner(
        devices, model, dtype="bf16", max_model_len=96, text_vocab=TIED.V, limit_ns=300_000_000, comm=comm
    )
    options = {"max_tokens": 4, "temperature": 0.0, "seed": 0}
    assert len(list(runner.generate([3, 4], **options))) == 4  # type: ignore[arg-type]
    step = runner._step
    assert step is not None
    if how == MISSES:
        miss_prompts(runner)
    else:
        runner._step, _kept = without_the_last(step, how, devices)
    try:
        list(runner.generate([3, 4], **options))  # type: ignore[arg-type]
    except QwenRawError as error:
        print(error)
    runner._step = step
    try:
        runner.close()
    except QwenRawError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main([int(n) for n in sys.argv[1].split(",")], sys.argv[2], sys.argv[3]))
