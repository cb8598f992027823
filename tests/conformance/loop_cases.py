"""loop.cu's cases: a graph that repeats choices of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from conformance.kernel_cases import Case, Outputs, exact
from conformance.machines import Machine

from qwen_raw.kernels.loop import LoopEnd, loop_again, loop_begin
from qwen_raw.kernels.peers import PollLimit
from qwen_raw.kernels.sample import Sampler, sample


def run_loop(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Choices in loops of up to four a replay, until there are nine ids."""
    dev, V, states = machine.dev, 700, []
    s, limit = Sampler.create(dev, V, 3), dev.array(np.array([9], np.uint32))
    logits = dev.array(rng.standard_normal(V).astype(np.float32))
    s.set_params(0.8, int(rng.integers(1 << 63)), 690)
    s.set_position(1, 10)
    (end,) = LoopEnd.create_ranks([dev], [PollLimit.create(dev, 0)])
    dev.kernel("sample", "sample_f32")
    machine.finish()

    def begin(handle: np.ndarray[Any, Any]) -> None:
        loop_begin(dev, end, handle, s.state, limit)

    def body(handle: np.ndarray[Any, Any]) -> None:
        sample(dev, logits, s)
        loop_again(dev, end, handle, s.state, limit, 2, most=4)

    graph = dev.capture_loop(begin, body)
    for asked in ((0, 99), (2, 99), (0, 8), (0, 99), (0, 99)):  # 4, 1, 2, 2 and no ids
        end.asked.words[:] = asked
        graph.launch()
        states.append(np.concatenate([s.state.download(), end.state.download().view(np.int32)]))
    graph.close()
    told = exact(end.told.words.copy())
    return {"states": exact(np.array(states)), "ring": exact(s.ring.words.copy()), "told": told}


LOOPS = [Case("loop_begin", run_loop), Case("loop_again", run_loop)]
