"""What bench.pipeline and bench.kv_transfer share: devices, one device's ids to compare with, times to ids."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.common import environment, open_gpus, result_arguments, save
from bench.decode import check_models, split_spec
from loaders.resolve import open_model
from qwen_raw.cli.arguments import Parser, ordinals, positive
from qwen_raw.device import Device
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.simt.device import SimDevice

SMALLEST = "tiny-shakespeare-draft"
SHORTEST = 3  # ids that are timed


def add_arguments(parser: Parser, name: str, models: Sequence[str], prompts: Sequence[int]) -> None:
    """The flags of both."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--devices", type=ordinals, default=[0, 0], help="GPUs, as 0,1; 0,0: two streams of one")
    where.add_argument(
        "--sim", type=positive, metavar="N", help="N simulated devices: ids are compared, nothing is written"
    )
    parser.add_argument(
        "--model", action="append", metavar="SPEC[:DTYPE]", help=f"repeatable; default {' '.join(models)}; {SMALLEST}"
        " on the simulator"
    )  # fmt: skip
    parser.add_argument("--prompt", type=positive, nargs="+", default=list(prompts), help="ids of each prompt")
    parser.add_argument("--tokens", type=positive, default=128, help="ids that follow")
    parser.add_argument("--repeats", type=positive, default=5)
    result_arguments(parser, f"{name}.json, {name}_2gpu.json")


def check(a: Any, models: Sequence[str], counts: Sequence[int], advice: str) -> Sequence[str]:
    """The models to run. UsageError, before a GPU is looked for, for arguments that do not go together."""
    count = a.sim or len(a.devices)
    if count not in counts:
        raise UsageError(f"{count} device{'s' * (count > 1)}: {advice}, as in --devices 0,0")
    if not a.sim and a.tokens < SHORTEST:
        raise UsageError(f"{a.tokens} tokens: at least {SHORTEST} are timed")
    specs = a.model or ((SMALLEST,) if a.sim else models)
    for spec in specs:
        check_models([spec], 1, [min(a.prompt) + 2 * a.tokens])
    return tuple(specs)


@contextmanager
def open_devices(a: Any) -> Iterator[tuple[Sequence[Device], dict[str, Any], str]]:
    """(the devices, what a result depends on, the result file's variant)."""
    if a.sim:
        devices = SimDevice.of_world(a.sim)
        try:
            yield devices, {}, ""
        finally:
            devices[0].close()
        return
    with open_gpus(None, a.devices) as gpus:
        several = len(set(a.devices)) > 1
        yield gpus, environment(gpus[0], a.commit) | {"devices": a.devices}, "2gpu" if several else ""


def open_both(
    kind: type[DeviceRunner], devices: Sequence[Device], spec: str, prompts: Sequence[int], tokens: int
) -> tuple[DeviceRunner, DeviceRunner, list[int]]:
    """The model on the first device alone, and as `kind` on all; which of the prompts' lengths have room in it."""
    model, dtype = split_spec(spec)
    checkpoint = open_model(model, dtype)
    config = checkpoint.config
    fitting = [n for n in prompts if n + 2 * tokens <= config.max_position]
    options: dict[str, Any] = {
        "dtype": dtype, "max_model_len": max(fitting) + 2 * tokens, "text_vocab": config.V, "owns_device": False,
    }  # fmt: skip
    return DeviceRunner(devices[0], checkpoint, **options), kind(devices, checkpoint, **options), fitting


def prompt_of(runner: DeviceRunner, tokens: int) -> list[int]:
    """Random ids, the same in every run."""
    return [int(n) for n in np.random.default_rng(tokens).integers(0, runner.text_vocab, tokens)]


def timed(runner: DeviceRunner, ids: Sequence[int], tokens: int) -> tuple[list[tuple[int, int | None]], list[float]]:
    """(id, hash of its logits) of every step, and the seconds from the request to each."""
    got, seconds, begin = [], [], time.perf_counter()
    for id_ in runner.generate(ids, max_tokens=tokens, temperature=0.0, seed=0):
        seconds.append(time.perf_counter() - begin)
        got.append((id_, runner.logits_hash))
    return got, seconds


def compare(one: DeviceRunner, two: DeviceRunner, prompt: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Ids and hashes of both are equal, or QwenRawError; host's times of both, medians; 0 repeats: none."""
    ids, found = prompt_of(one, prompt), []
    row: dict[str, Any] = {"prompt": prompt, "tokens": tokens}
    for name, runner in (("one_", one), ("", two)):
        runs = [timed(runner, ids, tokens) for _ in range(1 + repeats)]  # the first captures
        found.append(runs[0][0])
        if any(got != runs[0][0] for got, _ in runs):
            raise QwenRawError(f"a prompt of {prompt} ids: the same request gave other ids the next time")
        if repeats:
            seconds = [times for _, times in runs[1:]]
            rates = [(tokens - 2) / (times[-1] - times[1]) for times in seconds]
            row |= {f"{name}ttft_ms": statistics.median(times[0] for times in seconds) * 1e3,
                    f"{name}second_ms": statistics.median(times[1] for times in seconds) * 1e3,
                    f"{name}host_tok_s": statistics.median(rates)}  # fmt: skip
    if found[0] != found[1]:
        at = next(i for i, pair in enumerate(zip(*found, strict=True)) if pair[0] != pair[1])
        raise QwenRawError(f"a prompt of {prompt} ids: id {at} is not one device's, or its logits are not")
    return row | {"ids_equal": len(found[0])}


def run(
    a: Any,
    name: str,
    models: Sequence[str],
    kind: type[DeviceRunner],
    label: dict[str, Any],
    measure: Callable[[list[CudaDevice], DeviceRunner, DeviceRunner, int, Any], dict[str, Any]],
    line: Callable[[dict[str, Any]], str],
) -> None:
    """A row for each model and prompt: ids compared and, on GPUs, what `measure` finds; printed, and on GPUs saved."""
    rows: list[dict[str, Any]] = []
    with open_devices(a) as (devices, env, variant):
        gpus = [dev for dev in devices if isinstance(dev, CudaDevice)]  # none where they are simulated
        for spec in models:
            one, two, prompts = open_both(kind, devices, spec, a.prompt, a.tokens)
            model, dtype = split_spec(spec)
            for prompt in prompts:
                row = {"model": model, "dtype": dtype, **label}
                row |= compare(one, two, prompt, a.tokens, a.repeats if gpus else 0)
                if gpus:
                    row |= measure(gpus, one, two, prompt, a)
                rows.append(row)
                print(line(row), flush=True)
                if gpus:
                    save(name, env, rows, a.output, variant)
            one.close()
            two.close()
