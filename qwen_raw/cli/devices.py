"""`qwen-raw devices`: what a model can run on here, and if not on a GPU, why not."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from qwen_raw.cli.arguments import Parser
from qwen_raw.errors import QwenRawError
from qwen_raw.observe.machine import Gpu, cpu_cores, cpu_name, gpus


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to `qwen-raw`."""
    parser = commands.add_parser("devices", help="list what a model can run on", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the devices, one a line. A machine without a GPU is no failure."""
    problem, found = None, list[Gpu]()
    try:
        found = gpus()
    except QwenRawError as error:
        problem = str(error)
    if args.json:
        cpu = {"name": cpu_name(), "cores": cpu_cores()}
        print(json.dumps({"gpus": [asdict(gpu) for gpu in found], "no_gpu_because": problem, "cpu": cpu}))
        return 0
    for gpu in found:
        arch = f"sm_{gpu.capability[0]}{gpu.capability[1]}"
        note = "" if gpu.capability >= (8, 0) else " · too old: the kernels need sm_80"
        print(
            f"cuda {gpu.ordinal}  {gpu.name} · {arch} · {gpu.sm_count} SMs · {gpu.memory / 2**30:.0f} GiB · "
            f"CUDA {gpu.driver}{note}"
        )
    if problem is not None:
        print(f"cuda    none: {problem}")
    print(f"cpu     {cpu_name()} · {cpu_cores()} cores · NumPy reference")
    return 0
