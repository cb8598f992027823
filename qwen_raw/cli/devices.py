"""`qwen-raw devices`: what a model can run on here, and if not on a GPU, why not."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import asdict

from qwen_raw.cli.arguments import Parser
from qwen_raw.comm.measure import Measured, measure_token
from qwen_raw.comm.topology import Link, links
from qwen_raw.driver.device import MINIMUM_CAPABILITY, CudaDevice
from qwen_raw.driver.probe import Gpu, Machine, probe
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.cublaslt import load_library, version, version_text
from qwen_raw.kernels.peers import MAX_RANKS
from qwen_raw.observe.machine import cpu_cores, cpu_name
from qwen_raw.simt.toolchain import cuda_headers, find_compiler

MESSAGE = 8192  # elements of the sum that is timed: a token of Qwen2.5-72B


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to `qwen-raw`."""
    parser = commands.add_parser("devices", help="list what a model can run on", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the devices, one a line. A machine without a GPU is no failure."""
    machine = probe()
    pairs, sums, untried = _links(machine)
    compiler, problem = _simulator()
    library, missing = _cublaslt()
    if args.json:
        cpu = {"name": cpu_name(), "cores": cpu_cores()}
        report = asdict(machine)
        report["no_gpu_because"] = report.pop("problem")
        report["links"] = [asdict(link.path) | {"problem": link.problem} for link in pairs]
        report["links_not_tried_because"] = untried
        report["sums"] = None if sums is None else asdict(sums) | {"us": dict(sums.us), "fastest": sums.fastest}
        report |= {
            "cublaslt": {"version": library, "problem": missing},
            "cpu": cpu,
            "sim": {"compiler": compiler, "problem": problem},
        }
        print(json.dumps(report))
        return 0
    for gpu in machine.gpus:
        print(_line(machine, gpu))
    for link in pairs:
        print(_link(link))
    if untried is not None:
        print(f"link    not tried: {untried}")
    if sums is not None:
        print(f"sums    {sums.line()}")
    if machine.gpus:
        print(f"gemm    our kernels · {'none: ' + missing if missing else f'cuBLASLt {library}'}")
    if machine.problem is not None:
        print(f"cuda    none: {machine.problem}")
    print(f"cpu     {cpu_name()} · {cpu_cores()} cores · NumPy reference")
    print(f"sim     {'none: ' + problem if problem else f'the kernels simulated on the CPU · {compiler}'}")
    return 0


def _simulator() -> tuple[str | None, str | None]:
    """(the compiler of --device sim, why it cannot be used here)."""
    try:
        compiler = find_compiler()
        cuda_headers()
    except QwenRawError as error:
        return None, str(error)
    return compiler.version, None


def _cublaslt() -> tuple[str | None, str | None]:
    """(its version, why it is not there): it may take the place of our kernels for prompts (--gemm)."""
    try:
        return version_text(version(load_library())), None
    except QwenRawError as error:
        return None, str(error)


def _links(machine: Machine) -> tuple[list[Link], Measured | None, str | None]:
    """Every pair of GPUs, tried; how fast they sum, if all pairs work; and why they were not tried."""
    usable = [gpu.ordinal for gpu in machine.gpus if gpu.capability >= MINIMUM_CAPABILITY][:MAX_RANKS]
    if len(usable) < 2:
        return [], None, None
    pairs: list[Link] = []
    with ExitStack() as stack:
        try:
            devices = [stack.enter_context(CudaDevice(n)) for n in usable]
            pairs = links(devices)
            work = all(link.problem is None for link in pairs)
            return pairs, measure_token(devices, MESSAGE) if work else None, None
        except QwenRawError as error:  # no memory left for a context, say
            return pairs, None, str(error)


def _link(link: Link) -> str:
    path = link.path
    parts = ["no peer access"] if not path.access else []
    if path.access and path.nvlink is not None:
        parts.append(f"NVLink, {path.active_links} links up" if path.nvlink else "no NVLink")
    if path.access:
        parts.append("native atomics" if path.native_atomics else "no native atomics")
        parts.append(f"performance rank {path.performance_rank}")
        parts.append(f"not usable: {link.problem}" if link.problem else "verified")
    return f"link {path.source} → {path.target}  " + " · ".join(parts)


def _line(machine: Machine, gpu: Gpu) -> str:
    memory = f"{gpu.memory / 2**30:.0f} GiB"
    if gpu.free is not None:
        memory += f", {gpu.free / 2**30:.0f} free"
    parts = [gpu.name, f"sm_{gpu.capability[0]}{gpu.capability[1]}", f"{gpu.sm_count} SMs", memory]
    parts.append(f"CUDA {machine.cuda}" + (f", driver {machine.driver}" if machine.driver else ""))
    nvlink = gpu.nvlink_peers or ()
    others = [i for i in gpu.peers if i not in nvlink]
    if nvlink:
        parts.append(f"NVLink to {', '.join(map(str, nvlink))}")
    if others:
        parts.append(f"peer access to {', '.join(map(str, others))}")
    if gpu.capability < (8, 0):
        parts.append("too old: the kernels need sm_80")
    return f"cuda {gpu.ordinal}  " + " · ".join(parts)
