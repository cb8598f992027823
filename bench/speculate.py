"""Speculation: tok/s with the acceptance forced, against the same run's plain decode; and what the built-in pair does.

    python -m bench.speculate [--model random:72b:fp8] [--draft random:0.5b] [--guesses 7] [--tokens 128] [--repeats 1]
                              [--acceptance 0 0.5 0.8 1] [--tp N] [--devices N,N,…] [--draft-device N]
                              [--spec-loop queued device] [--verify auto exact rows] [--identical 100]

Random models agree on nothing, so whether a guess stands is decided by a hash of its position, as often as asked for
(accept_forced_f32): guesses are made and verified as ever, and cost what they cost. What the host says is on: fewer
guesses, or none, where they do not pay. `tok/s` is (n - 1) / (t_last - t_first) over ids as the host reads them, of all
requests; `plain` is the same of a runner without speculation. `costs` are passes in steps, by their guesses, as the
runner measured them. `pass_us` and `seen_us`: a pass with the most guesses, replayed back to back, and as a generation
had it in which every pass is one: the difference is what there is between two passes. `loop`: whether passes are queued
by the host or repeat themselves on the device; of one runner, in turns.

What follows is tiny-shakespeare with its draft model and with n-grams, 20 prompts: real acceptance, real speed. Last,
of --identical greedy prompts, how many have all ids of plain decode, and how many the hash of the last logits. All that
for each of --verify. Results are written as they come.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, product
from typing import Any

import numpy as np

from bench.common import command, environment, open_gpus, ranks_of, result_arguments, save, time_ms
from bench.decode import check_models, split_spec
from loaders.resolve import open_model, open_tokenizer
from qwen_raw.cli.arguments import Parser, ordinal, ordinals, positive
from qwen_raw.driver.device import CudaDevice
from qwen_raw.generation.speculation import DEFAULT_GUESSES, LOOPS, VERIFY, Speculation
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculative import SpeculativeRunner
from qwen_raw.placement import degree

LONGEST_TEXT = 64  # ids of TEXTS, and some to spare
ACCEPTANCES = [0.0, 0.5, 0.8, 1.0]
TEXTS = ("ROMEO:", "First Citizen:\nBefore we", "KING RICHARD III:\n", "JULIET:\nO, ", "The king")
PASSES = 8  # replayed at a time


def share(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return float(text)


def rate(runner: DeviceRunner, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Ids after the first a second, over all prompts."""
    seconds = 0.0
    for ids in prompts:
        times = [time.perf_counter() for _ in runner.generate(ids, max_tokens=tokens, temperature=0.0, seed=0)]
        seconds += times[-1] - times[0]
    return len(prompts) * (tokens - 1) / seconds


def looping(loops: Sequence[str]) -> str:
    """What a runner is made with that is to run in these ways."""
    return "device" if "device" in loops else "queued"


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    ids = np.random.default_rng(1).integers(0, vocab, (count, length))
    return [[int(token) for token in row] for row in ids]


def forced(
    devices: Sequence[CudaDevice], a: Any, own: CudaDevice | None = None, verify: str = VERIFY[0]
) -> Iterator[dict[str, Any]]:
    """One row an acceptance. `own`: the draft model's device, here and below; None: rank 0's. `verify`: of VERIFY."""
    name, dtype = split_spec(a.model)
    model, draft = open_model(name, dtype), open_model(a.draft)
    degree(len(devices), None, model.config, fp8=dtype == "fp8")
    length = max(a.context + a.tokens, 64)
    options: dict[str, Any] = {
        "dtype": dtype, "max_model_len": length, "text_vocab": model.config.V, "owns_device": False,
    }  # fmt: skip
    prompts = random_prompts(a.repeats, a.context, model.config.V)
    plain = DeviceRunner(devices, model, **options)
    rate(plain, prompts[:1], 16)
    base = rate(plain, prompts, a.tokens)
    plain.close()
    how: dict[str, Any] = {
        "guesses": a.guesses, "draft": draft, "draft_device": own, "loop": looping(a.spec_loop), "verify": verify,
    }  # fmt: skip
    runner = SpeculativeRunner(devices, model, forced=True, **how, **options)
    costs = {str(k): cost for k, cost in (runner.costs or {}).items()}
    rate(runner, prompts[:1], 16)
    replayed = time_ms(devices, lambda: runner.replay_passes(a.context, PASSES, a.guesses), repeats=3)
    pass_us = replayed.median * 1e3 / PASSES
    told = ", ".join(f"{k}: {cost:.2f}" for k, cost in costs.items())
    where = "" if own is None else f" on GPU {own.ordinal}, a stream of its own"
    told_how = f"verified by {runner.verify}"
    print(f"{name} {dtype} tp {len(devices)}, draft {a.draft}{where}, {told_how}: plain {base:.1f} tok/s", flush=True)
    print(f"  a pass of so many guesses costs in steps {told}; {pass_us:.0f} µs for {a.guesses} guesses", flush=True)
    for acceptance, loop in product(a.acceptance, a.spec_loop):
        runner.loop(loop == "device")
        runner.force(acceptance)
        before = runner.speculated
        got = rate(runner, prompts, a.tokens)
        counts = runner.speculated.since(before)
        row = {"model": name, "dtype": dtype, "draft": a.draft, "tp": len(devices), "guesses": a.guesses,
               "draft_device": None if own is None else own.ordinal,
               "context": a.context, "tokens": a.tokens, "requests": a.repeats, "forced": acceptance,
               "tok_s": got, "plain_tok_s": base, "ratio": got / base, "costs": costs, "pass_us": pass_us,
               "counts": counts.as_dict(), "loop": LOOPS[bool(counts.loops)]}  # fmt: skip
        if acceptance == 1 and not counts.steps:
            row["seen_us"] = a.repeats * (a.tokens - 1) / got * 1e6 / counts.passes
        told = f"{got:8.1f} tok/s, {got / base:5.2f} times plain"
        print(f"  forced {acceptance:4.2f} {loop}: {told}; {counts.line()}", flush=True)
        yield row
    runner.close()


def built_in(
    devices: Sequence[CudaDevice],
    guesses: int,
    tokens: int,
    own: CudaDevice | None = None,
    loops: Sequence[str] = LOOPS[:1],
    verify: str = VERIFY[0],
) -> Iterator[dict[str, Any]]:
    """The pair that is there: always the most guesses, and as many as pay."""
    model = open_model("tiny-shakespeare")
    tokenizer = open_tokenizer(model)
    prompts = [tokenizer.encode(text) for text in TEXTS] * 4
    options: dict[str, Any] = {
        "dtype": "bf16", "max_model_len": tokens + LONGEST_TEXT, "text_vocab": tokenizer.vocab_size,
        "owns_device": False,
    }  # fmt: skip
    plain = DeviceRunner(devices, model, **options)
    rate(plain, prompts[:2], tokens)
    base = rate(plain, prompts, tokens)
    plain.close()
    drafting = {"draft": open_model("tiny-shakespeare-draft"), "draft_device": own}
    ways: dict[str, dict[str, Any]] = {"n-grams": {"ngram": 3}, "draft": drafting}
    for by, governed in product(ways, (False, True)):
        runner = SpeculativeRunner(
            devices,
            model,
            guesses=guesses,
            governed=governed,
            loop=looping(loops),
            verify=verify,
            **ways[by],
            **options,
        )
        for loop in loops:
            runner.loop(loop == "device")
            rate(runner, prompts[:2], tokens)
            replayed = time_ms(devices, lambda r=runner: r.replay_passes(64, PASSES, guesses), repeats=5)  # type: ignore[misc]
            before = runner.speculated
            got = rate(runner, prompts, tokens)
            counts = runner.speculated.since(before)
            how = "as pays" if governed else "always"
            print(
                f"tiny-shakespeare {by:8} {how:8} {loop:6} {got:9.0f} tok/s, plain {base:9.0f}; {counts.line()}",
                flush=True,
            )
            row = {"model": "tiny-shakespeare", "tp": len(devices), "by": by, "governed": governed,
                   "draft_device": None if own is None or by != "draft" else own.ordinal,
                   "loop": LOOPS[bool(counts.loops)], "guesses": guesses,
                   "tok_s": got, "plain_tok_s": base, "ratio": got / base,
                   "costs": {str(k): cost for k, cost in (runner.costs or {}).items()},
                   "pass_us": replayed.median * 1e3 / PASSES, "counts": counts.as_dict()}  # fmt: skip
            if not governed:
                row["seen_us"] = len(prompts) * (tokens - 1) / got * 1e6 / counts.passes
            yield row
        runner.close()


def some_prompts(count: int) -> list[list[int]]:
    """TEXTS, and random pieces of their ids."""
    tokenizer, rng = open_tokenizer(open_model("tiny-shakespeare")), np.random.default_rng(1)
    texts = [tokenizer.encode(text) for text in TEXTS]
    pool = [token for text in texts for token in text]
    return texts[:count] + [[int(x) for x in rng.choice(pool, 1 + i % 40)] for i in range(count - len(texts))]


def identical(
    devices: Sequence[CudaDevice],
    count: int,
    guesses: int,
    tokens: int,
    own: CudaDevice | None = None,
    verify: str = VERIFY[0],
) -> Iterator[dict[str, Any]]:
    """The same pair, always the most guesses: of `count` greedy prompts, how many have all ids of plain decode."""
    model = open_model("tiny-shakespeare")
    options: dict[str, Any] = {
        "dtype": "bf16", "max_model_len": tokens + LONGEST_TEXT, "text_vocab": model.config.V, "owns_device": False,
    }  # fmt: skip
    ways: dict[str, dict[str, Any]] = {
        "n-grams": {"ngram": 3}, "draft": {"draft": open_model("tiny-shakespeare-draft"), "draft_device": own},
    }  # fmt: skip
    prompts = some_prompts(count)
    request: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0, "seed": 0}
    for by, how in ways.items():
        plain = DeviceRunner(devices, model, **options)
        runner = SpeculativeRunner(devices, model, guesses=guesses, governed=False, verify=verify, **how, **options)
        ids = hashes = 0
        for prompt in prompts:
            want, got = (list(each.generate(prompt, **request)) for each in (plain, runner))
            ids += got == want
            hashes += runner.logits_hash == plain.logits_hash
        row = {"model": "tiny-shakespeare", "tp": len(devices), "by": by, "verify": runner.verify, "guesses": guesses,
               "draft_device": None if own is None or by != "draft" else own.ordinal, "tokens": tokens,
               "sums": runner.ranks[0].residual.path, "prompts": count, "identical": ids, "equal_hashes": hashes,
               "counts": runner.speculated.as_dict()}  # fmt: skip
        print(
            f"tiny-shakespeare {by:8} verified by {runner.verify}: {ids} of {count} prompts have the ids of plain "
            f"decode, {hashes} its hash",
            flush=True,
        )
        runner.close()
        plain.close()
        yield row


def main() -> int:
    parser = Parser("python -m bench.speculate", description="what speculation gives")
    parser.add_argument("--model", default="random:72b:fp8", metavar="SPEC[:DTYPE]")
    parser.add_argument("--draft", default="random:0.5b", metavar="SPEC")
    parser.add_argument("--guesses", type=positive, default=DEFAULT_GUESSES, help="a pass at the most")
    parser.add_argument("--acceptance", type=share, nargs="+", default=ACCEPTANCES, help="forced, 0 to 1")
    parser.add_argument("--context", type=positive, default=64, help="ids of a prompt")
    parser.add_argument("--tokens", type=positive, default=128, help="of each request")
    parser.add_argument("--built-in-tokens", type=positive, default=64, help="the same of the built-in pair")
    parser.add_argument("--repeats", type=positive, default=1, help="requests an acceptance")
    parser.add_argument("--tp", type=positive, help="ranks; default 1, or one for each of --devices")
    parser.add_argument("--devices", type=ordinals, metavar="N,N,…", help="the ranks' GPUs; default 0,1,…")
    parser.add_argument("--draft-device", type=ordinal, metavar="N", help="the draft model's GPU; default: rank 0's")
    parser.add_argument(
        "--spec-loop", choices=LOOPS, nargs="+", default=[LOOPS[0]], help="how passes follow each other"
    )
    parser.add_argument("--verify", choices=VERIFY, nargs="+", default=[VERIFY[0]], help="how passes are verified")
    parser.add_argument("--identical", type=positive, default=100, help="prompts whose ids are compared")
    result_arguments(parser, "speculate.json, with _tpN for several ranks and _draftN for --draft-device")
    a = parser.parse_args()
    ranks = len(ranks_of(a.tp, a.devices))
    check_models([a.model], ranks, [a.context + a.tokens])
    check_models(["tiny-shakespeare"], ranks, [a.built_in_tokens + LONGEST_TEXT])
    check_models([a.draft])
    Speculation(a.draft, None, a.guesses, a.draft_device, looping(a.spec_loop))  # refuses what cannot be
    with open_gpus(a.tp, a.devices) as devices, ExitStack() as stack:
        own = None if a.draft_device is None else stack.enter_context(CudaDevice(a.draft_device))
        parts = [f"tp{len(devices)}"] if len(devices) > 1 else []
        parts += [] if own is None else [f"draft{own.ordinal}"]
        env, rows = environment(devices[0], a.commit), []
        for verify in a.verify:
            parts_of_it = (
                forced(devices, a, own, verify),
                built_in(devices, a.guesses, a.built_in_tokens, own, a.spec_loop, verify),
                identical(devices, a.identical, a.guesses, a.built_in_tokens, own, verify),
            )
            for row in chain(*parts_of_it):
                rows.append(row)
                save("speculate", env, rows, a.output, "_".join(parts))
    return 0


if __name__ == "__main__":
    command(main)
