"""`python -m model.stalled_rank 0,0 COMM`: a rank of a model on GPUs never gets its steps; what a request is told.

A process of its own, because the poll that runs into its deadline takes its GPU's context with it.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from model.ranks import TIED, biased_checkpoint

from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError
from qwen_raw.model.runner import DeviceRunner


def main(ordinals: list[int], comm: str) -> int:
    devices = [CudaDevice(n) for n in ordinals]
    model = biased_checkpoint(TIED)
    runner = DeviceRunner(
        devices, model, dtype="bf16", max_model_len=96, text_vocab=TIED.V, limit_ns=300_000_000, comm=comm
    )
    options = {"max_tokens": 4, "temperature": 0.0, "seed": 0}
    assert len(list(runner.generate([3, 4], **options))) == 4
    step = runner._step
    assert step is not None
    runner._step = replace(step, graphs=step.graphs[:-1])
    try:
        list(runner.generate([3, 4], **options))
    except QwenRawError as error:
        print(error)
    runner._step = step
    try:
        runner.close()
    except QwenRawError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main([int(n) for n in sys.argv[1].split(",")], sys.argv[2]))
