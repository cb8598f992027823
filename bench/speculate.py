"""Speculation: what a pass costs in steps, what follows for each acceptance, and what the built-in pair really does.

    python -m bench.speculate [--model random:7b:fp8] [--draft random:0.5b] [--guesses 4 …] [--context 512]

Random models agree on nothing, so a pass is timed (it costs the same whatever is accepted) and the ids that it gives
at an acceptance a are reckoned: 1 + a + … + a^K, if every guess is right with probability a. `tok/s` is the quotient.
What comes first is measured: tiny-shakespeare with its draft model and with n-grams, 20 prompts, against plain decode.
"""

from __future__ import annotations

import time
from typing import Any

from bench.common import command, environment, result_arguments, save, time_ms
from bench.decode import split_spec
from loaders.resolve import open_model, open_tokenizer
from qwen_raw.cli.arguments import Parser, natural, positive
from qwen_raw.driver.device import CudaDevice
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculative import SpeculativeRunner

ACCEPTANCES = (0.0, 0.5, 0.8, 1.0)
TEXTS = ("ROMEO:", "First Citizen:\nBefore we", "KING RICHARD III:\n", "JULIET:\nO, ", "The king")
PASSES, STEPS = 16, 32


def ids_a_pass(acceptance: float, guesses: int) -> float:
    """Expected, its own id included."""
    return sum(acceptance**i for i in range(guesses + 1))


def cost(dev: CudaDevice, spec: str, way: dict[str, Any], guesses: int, context: int, repeats: int) -> dict[str, Any]:
    """µs of a step and of a pass, of a model with random weights."""
    name, dtype = split_spec(spec)
    model = open_model(name, dtype)
    length = context + STEPS + 64
    text_vocab = min(model.config.V, way["draft"].config.V if "draft" in way else model.config.V)  # padding differs
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": length, "text_vocab": text_vocab}
    runner = SpeculativeRunner(dev, model, guesses=guesses, owns_device=False, **options, **way)
    step = time_ms(dev, lambda: runner.replay(context, STEPS), repeats=repeats).median * 1e3 / STEPS
    passed = time_ms(dev, lambda: runner.replay_passes(context, PASSES), repeats=repeats).median * 1e3 / PASSES
    runner.close()
    return {"model": name, "dtype": dtype, "guesses": guesses, "context": context, "step_us": step, "pass_us": passed}


def table(dev: CudaDevice, a: Any) -> list[dict[str, Any]]:
    """Costs, one row a number of guesses and way to guess."""
    heads = " ".join(f"{f'at {x:g}':>16}" for x in ACCEPTANCES)
    print(f"{'model':16} {'guesses by':12} {'K':>2} {'step µs':>9} {'pass µs':>9} {'cost':>6} {heads}")
    rows = []
    for guesses in a.guesses:
        for by, way in (("n-grams", {"ngram": 3}), (a.draft, {"draft": open_model(a.draft)})):
            row = cost(dev, a.model, way, guesses, a.context, a.repeats) | {"by": by}
            rates = {x: ids_a_pass(x, guesses) / row["pass_us"] * 1e6 for x in ACCEPTANCES}
            row |= {"tok_s": {str(x): rate for x, rate in rates.items()}, "plain_tok_s": 1e6 / row["step_us"]}
            shown = [f"{rate:.1f} ({rate * row['step_us'] / 1e6:.2f}x)" for rate in rates.values()]
            told = " ".join(f"{text:>16}" for text in shown)
            ratio = row["pass_us"] / row["step_us"]
            print(f"{a.model:16} {by:12} {guesses:2} {row['step_us']:9.1f} {row['pass_us']:9.1f} {ratio:6.2f} {told}")
            rows.append(row)
    return rows


def rate(runner: DeviceRunner, prompts: list[list[int]], tokens: int) -> float:
    """Ids after the first a second, over all prompts."""
    seconds = 0.0
    for ids in prompts:
        times = [time.perf_counter() for _ in runner.generate(ids, max_tokens=tokens, temperature=0.0, seed=0)]
        seconds += times[-1] - times[0]
    return len(prompts) * (tokens - 1) / seconds


def built_in(dev: CudaDevice, tokens: int) -> list[dict[str, Any]]:
    """The pair that is there: real acceptance, real speed, with guessing forced and governed."""
    model = open_model("tiny-shakespeare")
    tokenizer = open_tokenizer(model)
    prompts = [tokenizer.encode(text) for text in TEXTS] * 4
    options: dict[str, Any] = {
        "dtype": "bf16", "max_model_len": 600, "text_vocab": model.config.V, "owns_device": False,
    }  # fmt: skip
    plain = DeviceRunner(dev, model, **options)
    rate(plain, prompts[:2], tokens)
    base = rate(plain, prompts, tokens)
    plain.close()
    rows = []
    for by, way in (("n-grams", {"ngram": 3}), ("draft", {"draft": open_model("tiny-shakespeare-draft")})):
        for governed in (False, True):
            runner = SpeculativeRunner(dev, model, guesses=4, governed=governed, **way, **options)
            rate(runner, prompts[:2], tokens)
            before = runner.speculated
            got = rate(runner, prompts, tokens)
            counts = runner.speculated.since(before)
            how = "governed" if governed else "always"
            print(f"tiny-shakespeare {by:8} {how:9} {got:9.0f} tok/s, plain {base:9.0f}; {counts.line()}")
            rows.append({"model": "tiny-shakespeare", "by": by, "governed": governed, "tok_s": got, "plain_tok_s": base,
                         "pass_costs_steps": runner.cost} | counts.as_dict())  # fmt: skip
            runner.close()
    return rows


def main() -> int:
    parser = Parser("python -m bench.speculate", description="what speculative passes cost and give")
    parser.add_argument("--model", default="random:7b:fp8", metavar="SPEC[:DTYPE]")
    parser.add_argument("--draft", default="random:0.5b", metavar="SPEC")
    parser.add_argument("--guesses", type=positive, nargs="+", default=[4])
    parser.add_argument("--context", type=natural, default=512)
    parser.add_argument("--tokens", type=positive, default=128, help="of each prompt of the built-in model")
    parser.add_argument("--repeats", type=positive, default=5)
    result_arguments(parser, "speculate.json")
    a = parser.parse_args()
    with CudaDevice(0) as dev:
        env = environment(dev, a.commit)
        rows = built_in(dev, a.tokens)
        save("speculate", env, rows, a.output)  # what a run that is cut short has measured
        save("speculate", env, rows + table(dev, a), a.output)
    return 0


if __name__ == "__main__":
    command(main)
