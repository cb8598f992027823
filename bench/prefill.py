"""Time to the first token: from the call with the prompt's ids to the first id on the host. Tokenisation is excluded.

    python -m bench.prefill [--model SPEC[:DTYPE] …] [--prompt N …] [--repeats 7]
                            [--tp N] [--devices N,N,…] [--comm PATH] [--gemm own]

The call is the engine's own `generate`: the ids' upload, prefill of all chunks, the LM head on the last row, the choice
of an id, and a few decode steps queued behind it; the clock stops when the first id is read from the ring. Random ids,
random weights. Median and spread ((max - min) / median) of the repeats; `first` is the first call of that length, which
captures the bucket's graph where no earlier one has, and `MiB` is what the GPUs' free memory lost to it.

`rows`: what a prompt is padded to, "2048·4+16" for chunks. `TFLOP/s`: 2·T multiplications of the layers' linears,
padding not counted as work. `syncs`: host waits of one call. vLLM is version 0.25.1 on the same kind of GPU, its TTFT
at batch 1; it was measured elsewhere and is quoted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np

from bench.common import command, environment, open_gpus, quoted, ranks_of, result_arguments, save
from bench.decode import COMMS, check_models, open_runner, split_spec
from qwen_raw.cli.arguments import Parser, ordinals, positive
from qwen_raw.driver.device import CudaDevice
from qwen_raw.model.gemm_choice import GEMM
from qwen_raw.model.runner import DeviceRunner

DEFAULT = ["random:7b:bf16", "random:7b:fp8"]
PROMPTS = [5, 128, 129, 512, 2048, 8192]
TOKENS = 8  # asked for, so that steps are queued behind prefill as in a real generation
COLUMNS = (
    "model", "dtype", "tp", "prompt", "rows", "TTFT ms", "", "tok/s", "TFLOP/s", "syncs", "vLLM (quoted)", "first",
    "MiB",
)  # fmt: skip
# ms, by (model, dtype, ranks) and prompt.
VLLM = {
    ("random:7b", "bf16", 1): {128: 32.5, 512: 31.3, 2048: 48.9},
    ("random:7b", "fp8", 1): {128: 23.0, 512: 21.0, 2048: 34.0},
    ("random:72b", "fp8", 1): {128: 34.2, 512: 62.5, 2048: 227.0},
    ("random:72b", "bf16", 2): {128: 65.8, 512: 74.5, 2048: 257.0},
    ("random:72b", "fp8", 2): {128: 68.9, 512: 81.5, 2048: 148.0},
}


def first_token_ms(runner: DeviceRunner, ids: list[int]) -> tuple[float, int]:
    """(ms until the first id is here, host waits until then); nothing is left queued afterwards."""
    waits, begin = runner.host_syncs, time.perf_counter()
    stream = runner.generate(ids, max_tokens=TOKENS, temperature=0.0, seed=0)
    next(iter(stream))
    ms, waits = (time.perf_counter() - begin) * 1e3, runner.host_syncs - waits
    for dev in runner.devices:
        dev.synchronize()
    return ms, waits


def padded(runner: DeviceRunner, tokens: int) -> str:
    """The chunks' rows: "192", "2048·4", "2048·4+16"."""
    runs = [(n, len(list(same))) for n, same in groupby(chunk.rows for chunk in runner.prompt.chunks(range(tokens)))]
    return "+".join(f"{n}·{count}" if count > 1 else str(n) for n, count in runs)


def measure(
    devices: Sequence[CudaDevice], spec: str, comm: str, prompts: list[int], repeats: int, gemm: str = "auto"
) -> list[dict[str, Any]]:
    """One row a prompt length."""
    model, dtype = split_spec(spec)
    runner = open_runner(devices, spec, max(prompts) + TOKENS, comm, gemm=gemm)
    rng, rows = np.random.default_rng(1), []
    for tokens in prompts:
        if tokens + TOKENS > runner.max_model_len:
            continue
        ids = rng.integers(0, runner.text_vocab, tokens).tolist()
        before = sum(runner.peak_bytes)
        first, _ = first_token_ms(runner, ids)
        samples, waits = zip(*(first_token_ms(runner, ids) for _ in range(repeats)), strict=True)
        ms = median(samples)
        row: dict[str, Any] = {
            "model": model, "dtype": dtype, "tp": len(devices), "gemm": gemm,
            "devices": [dev.ordinal for dev in devices],
            "prompt": tokens, "rows": padded(runner, tokens), "repeats": repeats, "ttft_ms": ms,
            "spread": (max(samples) - min(samples)) / ms, "tok_s": tokens / ms * 1e3,
            "tflop_s": 2e-9 * tokens * runner.config.linear_params() / ms, "host_syncs": max(waits),
            "first_ms": first, "graph_bytes": sum(runner.peak_bytes) - before,
        }  # fmt: skip
        row |= quoted("vLLM 0.25.1", ttft_ms=VLLM.get((model, dtype, len(devices)), {}).get(tokens))
        rows.append(row)
        print(line(row), flush=True)
    runner.close()
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as people read it."""
    vllm = f"{row['quoted']['ttft_ms']:.1f}" if "quoted" in row else ""
    return (
        f"{row['model']:18} {row['dtype']:5} {row['tp']:2} {row['prompt']:6} {row['rows']:>14} {row['ttft_ms']:8.2f} "
        f"±{100 * row['spread']:4.1f}% {row['tok_s']:9.0f} {row['tflop_s']:8.1f} {row['host_syncs']:5} {vllm:>13} "
        f"{row['first_ms']:7.1f} {row['graph_bytes'] / 2**20:6.1f}"
    )


def main() -> int:
    parser = Parser("python -m bench.prefill", description="time to first token at batch 1")
    parser.add_argument(
        "--model", action="append", metavar="SPEC[:DTYPE]", help=f"repeatable; default {' '.join(DEFAULT)}"
    )
    parser.add_argument(
        "--prompt", type=positive, action="append", help=f"tokens; repeatable; default {' '.join(map(str, PROMPTS))}"
    )
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--tp", type=positive, help="ranks; default 1, or one for each of --devices")
    parser.add_argument("--devices", type=ordinals, metavar="N,N,…", help="the ranks' GPUs; default 0,1,…")
    parser.add_argument("--comm", default="auto", choices=COMMS, help="path of the sums over ranks")
    parser.add_argument("--gemm", default="auto", choices=GEMM, help="what multiplies")
    result_arguments(parser, "prefill.json, or prefill_tpN.json")
    a = parser.parse_args()
    prompts, ranks = a.prompt or PROMPTS, ranks_of(a.tp, a.devices)
    check_models(a.model or DEFAULT, len(ranks), [n + TOKENS for n in a.prompt or ()])
    with open_gpus(a.tp, a.devices) as devices:
        print(f"# {devices[0].name}, {devices[0].driver}; call with ids → first id on the host, no tokenisation")
        heads = "{:18} {:5} {:>2} {:>6} {:>14} {:>8} {:6} {:>9} {:>8} {:>5} {:>13} {:>7} {:>6}"
        print(heads.format(*COLUMNS))
        rows = []
        for spec in a.model or DEFAULT:
            rows += measure(devices, spec, a.comm, prompts, a.repeats, a.gemm)
        variant = f"tp{len(devices)}" if len(devices) > 1 else ""
        path = save("prefill", environment(devices[0], a.commit), rows, a.output, variant)
        print(f"# written: {path.name}")
    return 0


if __name__ == "__main__":
    command(main)
