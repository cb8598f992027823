"""What fp8 weights, and an fp8 KV cache, cost in quality: perplexity of a text beside bf16 on the same device.

    python -m bench.perplexity [--model tiny-shakespeare] [--text tests/golden/validation.txt] [--device auto]

The text is cut into windows of --window tokens, each from an empty context. On a GPU twice: all tokens of a window at
once (prefill), and one by one (decode). --reference: the NumPy model too, bf16 weights with fp32 activations; slow.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import qwen_raw
from bench.common import command, environment, result_arguments, save
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import UsageError
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.observe.perplexity import Logits, perplexity

TEXT = Path(__file__).parents[1] / "tests" / "golden" / "validation.txt"


def measure(
    model: str | None, device: str, dtype: str, kv: str, text: str, tokens: int | None, window: int
) -> tuple[list[dict[str, Any]], CudaDevice | None]:
    """One row a path: the model in `dtype`, its cache in `kv`, over the text's first `tokens` tokens; and its GPU."""
    print(f"# {dtype} weights, {kv} KV cache on {device}", file=sys.stderr, flush=True)
    rows = []
    with qwen_raw.load(model, device=device, dtype=dtype, kv_cache_dtype=kv) as engine:
        ids, window = engine.encode(text)[:tokens], min(window, engine.runner.max_model_len)
        paths: dict[str, Logits] = {"prefill": engine.logits}
        if engine.device == "cuda":
            paths["decode"] = engine.runner.decode_logits
        for path, logits in paths.items():
            found = perplexity(logits, ids, window)
            row = {"model": engine.config.name, "device": engine.runner.device_name, "dtype": dtype, "path": path}
            row |= {"kv": kv, "tokens": found.tokens, "window": window, "nll": found.nll, "perplexity": found.value}
            rows.append(row)
        devices = engine.runner.devices if isinstance(engine.runner, DeviceRunner) else ()
        return rows, next((dev for dev in devices if isinstance(dev, CudaDevice)), None)


def two_or_more(text: str) -> int:
    """An argument: tokens, of which the first is predicted by nobody."""
    if positive(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} is less than 2")
    return positive(text)


def main() -> int:
    parser = Parser("python -m bench.perplexity", description="perplexity in bf16 and fp8")
    parser.add_argument("--model", default=None, help="default: the built-in tiny-shakespeare")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=two_or_more, help="only so many of the text's first tokens")
    parser.add_argument("--window", type=positive, default=512)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu", "sim"])
    parser.add_argument("--reference", action="store_true", help="the NumPy model too")
    result_arguments(parser, "perplexity.json")
    a = parser.parse_args()
    try:
        text = a.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {a.text}: {error}") from error
    runs = [(a.device, *types) for types in (("bf16", "bf16"), ("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"))]
    runs += [("cpu", "bf16", "bf16")] if a.reference else []
    found = [measure(a.model, *run, text, a.tokens, a.window) for run in runs]
    rows = [row for of_run, _ in found for row in of_run]
    for row in rows:
        row["change"] = row["perplexity"] / rows[0]["perplexity"] - 1
        print(
            f"{row['model']} {row['dtype']:4} KV {row['kv']:4} {row['path']:7} on {row['device']}: "
            f"perplexity {row['perplexity']:.3f} over {row['tokens']} tokens, {row['change']:+.3%}"
        )
    save("perplexity", environment(found[0][1], a.commit) | {"text": a.text.name}, rows, a.output)
    return 0


if __name__ == "__main__":
    command(main)
