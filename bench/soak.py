"""A long run: many prompts, the same few over and over, and nothing may change: not an id, not a logit, not the speed.

    python -m bench.soak --tp 2
    python -m bench.soak --devices 0,0,0,0,1,1,1,1 --prompts 50 --tokens 128

The first time that a prompt comes, its ids and the hash of its last logits are recorded; each later time they must be
the same, and all ranks must have posted the same. Half of the prompts are greedy, half drawn with a seed. Exit code 1
for a mismatch, or if the last tenth of the prompts was slower than the first by more than `--slower`.
The default model is small and splits into 8: what is tested is the ranks' meeting, not the weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.common import amount, command, environment, open_gpus, ranks_of, result_arguments, save
from bench.decode import COMMS, check_models, split_spec
from loaders.resolve import open_model
from loaders.synthetic import random_checkpoint
from qwen_raw.cli.arguments import Parser, ordinals, positive
from qwen_raw.config import ModelConfig
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import UsageError
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.placement import degree

SMALL = ModelConfig(
    D=1024, H=16, KV=8, HD=64, I=2816, V=32000, L=8, rms_eps=1e-6, rope_theta=1e6, max_position=4096, tied=False,
    name="small",
)  # fmt: skip
LONGEST = 200  # ids of a prompt


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how it is continued."""

    ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out, and how fast from the first id to the last."""

    ids: tuple[int, ...]
    logits_hash: int | None
    tok_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run. The rates are medians of the tenths' prompts."""

    model: str
    dtype: str
    tp: int
    devices: list[int]
    comm: str  # asked for
    path: str  # that the sums took
    prompts: int  # that were run
    distinct: int
    tokens: int  # after each
    seconds: float
    first_tok_s: float
    last_tok_s: float
    mismatches: int


def requests(count: int, vocab: int) -> list[Request]:
    """`count` distinct ones: 1 to LONGEST ids, every other one greedy."""
    rng = np.random.default_rng(1)
    return [
        Request(tuple(rng.integers(0, vocab, int(rng.integers(1, LONGEST + 1))).tolist()), 0.8 * (i % 2), i)
        for i in range(count)
    ]


def answer(runner: DeviceRunner, request: Request, tokens: int) -> Answer:
    """Run one request to the end."""
    ids, times = [], []
    for token in runner.generate(request.ids, max_tokens=tokens, temperature=request.temperature, seed=request.seed):
        ids.append(token)
        times.append(time.perf_counter())
    return Answer(tuple(ids), runner.logits_hash, (tokens - 1) / (times[-1] - times[0]))


def ranks_agree(runner: DeviceRunner) -> bool:
    """Whether every rank has posted the same ids and hashes to its own ring as rank 0."""
    for device in runner.devices:
        device.synchronize()
    words = [rank.decode.sampler.ring.words for rank in runner.ranks]
    return all(bool((w == words[0]).all()) for w in words)


def soak(
    runner: DeviceRunner, requests: Sequence[Request], prompts: int, tokens: int, limit_s: float
) -> tuple[list[Answer], int]:
    """(all answers, mismatches); ends early after `limit_s` seconds, between two prompts."""
    recorded: dict[Request, Answer] = {}
    answers: list[Answer] = []
    wrong, begin = 0, time.perf_counter()
    answer(runner, requests[0], tokens)  # not counted: the clocks come up
    for number in range(prompts):
        if answers and time.perf_counter() - begin > limit_s:
            break
        request = requests[number % len(requests)]
        got = answer(runner, request, tokens)
        want = recorded.setdefault(request, got)
        if (got.ids, got.logits_hash) != (want.ids, want.logits_hash) or not ranks_agree(runner):
            wrong += 1
            parts = next((i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b), None)
            print(f"prompt {number}: differs from the first time" + (f" at id {parts}" if parts is not None else ""))
        answers.append(got)
    return answers, wrong


def run(devices: Sequence[CudaDevice], spec: str | None, comm: str, a: tuple[int, int, int, float]) -> Result:
    """Load, soak, sum up. `a`: prompts, distinct ones, tokens after each, seconds at most."""
    prompts, distinct, tokens, limit_s = a
    model, dtype = split_spec(spec) if spec else ("small", "bf16")
    checkpoint = open_model(model, dtype) if spec else random_checkpoint(SMALL)
    config = checkpoint.config
    degree(len(devices), None, config, fp8=dtype == "fp8")
    runner = DeviceRunner(
        devices, checkpoint, dtype=dtype, max_model_len=LONGEST + tokens, text_vocab=config.V, owns_device=False,
        comm=comm,
    )  # fmt: skip
    begin = time.perf_counter()
    answers, wrong = soak(runner, requests(distinct, config.V), prompts, tokens, limit_s)
    seconds = time.perf_counter() - begin
    path = runner.ranks[0].residual.path
    runner.close()
    tenth = max(len(answers) // 10, 1)
    first, last = (statistics.median(x.tok_s for x in part) for part in (answers[:tenth], answers[-tenth:]))
    return Result(
        model, dtype, len(devices), [dev.ordinal for dev in devices], comm, path, len(answers), distinct, tokens,
        seconds, first, last, wrong,
    )  # fmt: skip


def main() -> int:
    parser = Parser("python -m bench.soak", description="many prompts: ids, logits and speed must stay what they were")
    parser.add_argument("--model", metavar="SPEC[:DTYPE]", help="default: a small random one that splits into 8")
    parser.add_argument("--tp", type=positive, help="ranks; default 1, or one for each of --devices")
    parser.add_argument("--devices", type=ordinals, metavar="N,N,…", help="the ranks' GPUs; default 0,1,…")
    parser.add_argument("--comm", default="auto", choices=COMMS, help="path of the sums over ranks")
    parser.add_argument("--prompts", type=positive, default=200)
    parser.add_argument("--distinct", type=positive, help="prompts before they repeat; default: a tenth of them")
    parser.add_argument("--tokens", type=positive, default=256)
    parser.add_argument("--limit", type=positive, default=3600, help="seconds after which to stop early")
    parser.add_argument("--slower", type=amount, default=0.02, help="share that the last tenth may be slower by")
    result_arguments(parser, "soak_tpN.json")
    a = parser.parse_args()
    if a.tokens < 2:
        raise UsageError("--tokens 1 has no rate: at least 2")
    if a.model is not None:
        check_models([a.model], len(ranks_of(a.tp, a.devices)), [LONGEST + a.tokens])
    else:
        degree(len(ranks_of(a.tp, a.devices)), None, SMALL, fp8=False)
    with open_gpus(a.tp, a.devices) as devices:
        result = run(devices, a.model, a.comm, (a.prompts, a.distinct or max(a.prompts // 10, 1), a.tokens, a.limit))
        save("soak", environment(devices[0], a.commit), [asdict(result)], a.output, f"tp{result.tp}")
    change = result.last_tok_s / result.first_tok_s - 1
    early = f" of {a.prompts}, stopped by the limit" if result.prompts < a.prompts else ""
    print(
        f"{result.model} tp {result.tp} on {','.join(map(str, result.devices))}: {result.prompts} prompts{early} × "
        f"{result.tokens} tokens in {result.seconds:.1f} s, {result.mismatches} mismatches; "
        f"first tenth {result.first_tok_s:.0f} tok/s, last {result.last_tok_s:.0f} ({100 * change:+.1f} %)"
    )
    return int(result.mismatches > 0 or change < -a.slower)


if __name__ == "__main__":
    command(main)
