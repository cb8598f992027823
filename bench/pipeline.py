"""A model in stages over several devices (qwen_raw/model/pipeline.py), beside the same on one.

    python -m bench.pipeline [--devices 0,1 | --sim 2] [--model SPEC[:DTYPE] …] [--prompt 512] [--tokens 128]

Ids and hashes of the logits are compared, and must be equal. `tok/s` is event time of decode steps back to back, the
slowest device's, `one` that of the first device alone. `hand-over` is a step less the stages' parts of it, each timed
by itself, over the hand-overs in it: a hidden state to every next stage, and the decode state to each but the last.
TTFT is the host's time from the request to the first id.
"""

from __future__ import annotations

from typing import Any

from bench.common import command
from bench.decode import steps_us
from bench.hand_over import add_arguments, check, run
from qwen_raw.cli.arguments import Parser
from qwen_raw.driver.device import CudaDevice
from qwen_raw.kernels.peers import MAX_RANKS
from qwen_raw.model.decode import StepOptions
from qwen_raw.model.pipeline import PipelineRunner
from qwen_raw.model.runner import DeviceRunner, Step

MODELS = ("tiny-shakespeare:bf16", "random:7b:bf16", "random:7b:fp8")


def stages_us(gpus: list[CudaDevice], runner: DeviceRunner, context: int, tokens: int, repeats: int) -> list[float]:
    """Median µs of each stage's part of a step, without hand-overs, replayed by itself."""
    times = []
    for gpu, stage in zip(gpus, runner.ranks, strict=True):
        step = Step.create([stage], StepOptions(skip=frozenset({"reduce"} if stage.chooses else {"reduce", "sample"})))
        times.append(steps_us([gpu], runner, context, tokens, repeats, [step])[0].median)
        step.close()
    return times


def line(row: dict[str, Any]) -> str:
    """A row as people read it."""
    text = f"{row['model']:24} {row['dtype']:5} {row['stages']} stages, prompt {row['prompt']}: "
    text += f"{row['ids_equal']} ids equal"
    if "tok_s" not in row:
        return text
    return (
        f"{text}; {row['tok_s']:.1f} tok/s, one {row['one_tok_s']:.1f}, hand-over {row['hand_over_us']:.2f} µs; "
        f"TTFT {row['ttft_ms']:.2f} ms, one {row['one_ttft_ms']:.2f}"
    )


def measure(gpus: list[CudaDevice], one: DeviceRunner, staged: DeviceRunner, prompt: int, a: Any) -> dict[str, Any]:
    """Decode in stages, beside the first device alone; and what the stages take apart."""
    (alone,) = steps_us(gpus[:1], one, prompt, a.tokens, a.repeats, [None])
    (step,) = steps_us(gpus, staged, prompt, a.tokens, a.repeats, [None])
    apart = stages_us(gpus, staged, prompt, a.tokens, a.repeats)
    return {"tok_s": 1e6 / step.median, "spread": step.spread, "one_tok_s": 1e6 / alone.median, "stages_us": apart,
            "hand_over_us": (step.median - sum(apart)) / (2 * len(gpus) - 2)}  # fmt: skip


def main() -> int:
    parser = Parser("python -m bench.pipeline", description="a model in stages")
    add_arguments(parser, "pipeline", MODELS, [512])
    a = parser.parse_args()
    models = check(a, MODELS, range(2, MAX_RANKS + 1), f"there are 2 to {MAX_RANKS} stages")
    run(a, "pipeline", models, PipelineRunner, {"stages": a.sim or len(a.devices)}, measure, line)
    return 0


if __name__ == "__main__":
    command(main)
