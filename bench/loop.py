"""A loop on the device against queued graphs: µs an iteration of small kernels, decode steps and speculative passes.

    python -m bench.loop [--model random:7b:fp8] [--draft random:0.5b] [--guesses 7] [--iterations 32] [--repeats 5]

The same launches, captured once as a graph that is queued so many times, and once as the body of a WHILE node that runs
them as often by itself (qwen_raw/driver/loop.py), with the kernel that says whether to go on. Event time, back to back:
the host is far ahead in both. `step` and `pass` are of runners as they are; a loop is first shown to make the same ids.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.common import command, environment, open_gpus, result_arguments, save, time_in_turns
from bench.decode import check_models, open_runner, split_spec
from loaders.resolve import open_model
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.device import I32, U32, Buffer, Graph
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.generation.speculation import DEFAULT_GUESSES, Speculation
from qwen_raw.kernels.draft import draft_row
from qwen_raw.kernels.loop import END, ROOM, LoopEnd, loop_again, loop_begin
from qwen_raw.kernels.peers import PollLimit
from qwen_raw.kernels.sample import SLOTS
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.speculative import SpeculativeRunner

SETTLE_S = 0.5
END_S = 5.0  # a loop that has not ended by then never will


def drain(work: Iterator[None]) -> None:
    """Queue all of it."""
    for _ in work:
        pass


class Loops:
    """Loops of one device."""

    def __init__(self, dev: CudaDevice) -> None:
        self.dev = dev
        (self.ends,) = LoopEnd.create_ranks([dev], [PollLimit.create(dev, 0)])
        self.limit = dev.zeros((1,), U32)
        self.ends.asked.words[ROOM] = 1 << 30
        self.end(1 << 30)

    def end(self, step: int) -> None:
        """Loops go on while fewer ids than this have been chosen."""
        self.limit.upload(np.array([step], np.uint32))

    def capture(self, body: Callable[[], Iterator[None]], state: Buffer, most: int) -> Graph:
        def begin(handle: np.ndarray[Any, Any]) -> None:
            loop_begin(self.dev, self.ends, handle, state, self.limit)

        def again(handle: np.ndarray[Any, Any]) -> None:
            drain(body())
            loop_again(self.dev, self.ends, handle, state, self.limit, 1, most=most, pdl=True)

        return self.dev.capture_loop(begin, again)

    def watch(self) -> None:
        """Wait, but not for ever: a loop that does not end would hold the GPU."""
        until = time.perf_counter() + END_S
        while not self.dev.idle():
            if time.perf_counter() > until:
                print("bench: a loop did not end", flush=True)
                os._exit(1)

    def passes(self) -> int:
        return int(self.ends.state.download()[1])


def conditions(dev: CudaDevice) -> None:
    """A loop stops for each of its reasons, and after as many passes."""
    loops = Loops(dev)
    state, ids, rows = dev.zeros((4,), I32), dev.zeros((1,), I32), dev.zeros((1, 4), I32)
    draft_row(dev, ids, rows, 0, state)
    dev.synchronize()

    def one() -> Iterator[None]:
        draft_row(dev, ids, rows, 0, state)
        yield

    graph = loops.capture(one, state, 16)
    for what, end, stop, passes in (("limit", 0, 0, 0), ("end", 9, 2, 1), ("passes", 9, 0, 16), ("again", 9, 0, 16)):
        loops.end(end)
        loops.ends.asked.words[END] = stop
        dev.synchronize()
        graph.launch()
        loops.watch()
        if loops.passes() != passes:
            raise QwenRawError(f"loop, {what}: {loops.passes()} passes, {passes} would be right")
    long = loops.capture(one, state, 1 << 20)
    long.launch()
    time.sleep(0.02)
    loops.ends.asked.words[END] = 5
    loops.watch()
    done = loops.passes()
    if not 0 < done < 1 << 20:
        raise QwenRawError(f"loop: {done} passes until it was told to stop")
    print(f"a loop ends by its limit, by its passes, and by the host's word: after {done} passes in 20 ms", flush=True)


def small(dev: CudaDevice, iterations: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Launches of one thread: what an iteration costs by itself."""
    loops = Loops(dev)
    state, ids, rows = dev.zeros((4,), I32), dev.zeros((1,), I32), dev.zeros((1, 4), I32)

    def body(n: int) -> Iterator[None]:
        for _ in range(n):
            draft_row(dev, ids, rows, 0, state)
            yield

    for n in (1, 8, 64):
        with dev.capture() as capture:
            drain(body(n))
        loop = loops.capture(partial(body, n), state, iterations)
        yield compare(dev, f"{n} launches", capture.graph, loop, loops, iterations, repeats, lambda: None)


def compare(
    dev: CudaDevice,
    what: str,
    queued: Graph,
    loop: Graph,
    loops: Loops,
    iterations: int,
    repeats: int,
    before: Callable[[], None],
) -> dict[str, Any]:
    def queue() -> None:
        before()
        for _ in range(iterations):
            queued.launch()

    def repeat() -> None:
        before()
        loop.launch()

    repeat()
    loops.watch()
    if loops.passes() != iterations:
        raise QwenRawError(f"loop of {what}: {loops.passes()} passes, {iterations} were asked for")
    times = time_in_turns(dev, [queue, repeat], repeats=repeats, settle_s=SETTLE_S)
    queued_us, loop_us = (timing.median * 1e3 / iterations for timing in times)
    print(f"{what:12} queued {queued_us:9.2f} µs, loop {loop_us:9.2f} µs: {loop_us - queued_us:+.2f}", flush=True)
    return {"what": what, "iterations": iterations, "queued_us": queued_us, "loop_us": loop_us}


def steps(dev: CudaDevice, spec: str, iterations: int, repeats: int) -> dict[str, Any]:
    """Plain decode steps."""
    runner = open_runner([dev], spec, 1024)
    loops, (rank,) = Loops(dev), runner.ranks
    state = rank.decode.sampler.state
    assert runner._step is not None
    loop = loops.capture(rank.step, state, iterations)
    same_ids(runner, loop, loops, iterations)

    def before() -> None:
        rank.decode.sampler.set_position(0, 64)

    row = compare(dev, f"step {spec}", runner._step.graphs[0], loop, loops, iterations, repeats, before)
    loop.close()
    runner.close()
    return row


def same_ids(runner: DeviceRunner, loop: Graph, loops: Loops, iterations: int) -> None:
    """Greedy ids of a prompt, from steps in a loop and from queued ones."""
    prompt = list(range(100, 140))
    plain = list(runner.generate(prompt, max_tokens=iterations + 1, temperature=0.0, seed=0))
    first = list(runner.generate(prompt, max_tokens=1, temperature=0.0, seed=0))
    ring = runner.ranks[0].decode.sampler.ring.words
    number = runner._launched
    loop.launch()
    loops.watch()
    runner._launched += iterations
    found = [int(ring[2 * ((number + i) % SLOTS)]) & 0xFFFFFFFF for i in range(iterations)]
    if [*first, *found] != plain:
        raise QwenRawError(f"a loop made the ids {found[:8]} …, steps {plain[1:9]} …")


def passes(dev: CudaDevice, spec: str, draft: str, guesses: int, iterations: int, repeats: int) -> dict[str, Any]:
    """Speculative passes with a draft model, that post nothing."""
    model, dtype = split_spec(spec)
    checkpoint = open_model(model, dtype)
    runner = SpeculativeRunner(
        [dev], checkpoint, guesses=guesses, draft=open_model(draft), governed=False, forced=True, costs={guesses: 1.0},
        dtype=dtype, max_model_len=1024, text_vocab=checkpoint.config.V, owns_device=False,
    )  # fmt: skip
    loops, (one,) = Loops(dev), runner._passes
    loop = loops.capture(partial(one.queue, guesses), one.rank.decode.sampler.state, iterations)
    graph = runner._graphs[guesses][0]

    def before() -> None:
        runner._place(64)

    row = compare(dev, f"pass {spec}", graph, loop, loops, iterations, repeats, before)
    loop.close()
    runner.close()
    return row | {"draft": draft, "guesses": guesses}


def main() -> int:
    parser = Parser("python -m bench.loop", description="loops on the device against queued graphs")
    parser.add_argument("--model", default="random:7b:fp8", metavar="SPEC[:DTYPE]")
    parser.add_argument("--draft", default="random:0.5b", metavar="SPEC")
    parser.add_argument("--guesses", type=positive, default=DEFAULT_GUESSES, help="a pass")
    parser.add_argument("--iterations", type=positive, default=32, help="of a loop")
    parser.add_argument("--repeats", type=positive, default=5)
    result_arguments(parser, "loop.json")
    a = parser.parse_args()
    check_models([a.model])
    check_models([a.draft])
    Speculation(a.draft, None, a.guesses)  # refuses a wrong number of guesses
    if a.iterations > SLOTS:
        raise UsageError(f"{a.iterations} iterations: the ring holds the ids of {SLOTS}")
    with open_gpus(1, None) as (dev,):
        env = environment(dev, a.commit)
        rows: list[dict[str, Any]] = []
        conditions(dev)
        rows += small(dev, a.iterations, a.repeats)
        save("loop", env, rows, a.output)
        for spec in ("random:0.5b", a.model):
            rows.append(steps(dev, spec, a.iterations, a.repeats))
            save("loop", env, rows, a.output)
        rows.append(passes(dev, a.model, a.draft, a.guesses, a.iterations, a.repeats))
        save("loop", env, rows, a.output)
    return 0


if __name__ == "__main__":
    command(main)
