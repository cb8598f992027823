"""The kernels of a speculative pass, as kernel_cases.py has the others."""

from __future__ import annotations

import numpy as np
from conformance.kernel_cases import Case, Outputs, exact
from conformance.machines import Machine

from qwen_raw.device import I32
from qwen_raw.kernels.accept import PassBuffers, accept, accept_begin, accept_step
from qwen_raw.kernels.draft import draft_catch, draft_ngram, draft_row, draft_rows
from qwen_raw.kernels.sample import Sampler


def run_draft_row(machine: Machine, rng: np.random.Generator) -> Outputs:
    dev = machine.dev
    b = PassBuffers.create(dev, 3, 10, 700)
    for i in (0, 2):
        draft_row(dev, b.ids, b.rows, i, dev.array(rng.integers(0, 700, 4, dtype=np.int32)))
    return {"ids": exact(b.ids.download()), "rows": exact(b.rows.download())}


def run_draft_rows(machine: Machine, rng: np.random.Generator) -> Outputs:
    dev, results = machine.dev, {}
    for M in (1, 16):
        b = PassBuffers.create(dev, M, 20, 700)
        state, guesses = (dev.array(rng.integers(0, 700, n, dtype=np.int32)) for n in (4, 16))
        draft_rows(dev, b.ids, b.rows, state, guesses)
        results |= {f"ids {M}": exact(b.ids.download()), f"rows {M}": exact(b.rows.download())}
    return results


def run_draft_ngram(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Few ids, so that runs repeat; more positions than the block has threads."""
    dev, results = machine.dev, {}
    b = PassBuffers.create(dev, 5, 3000, 700)
    for length in (1, 2, 40, 2500):
        history = rng.integers(0, 4, length, dtype=np.int32)
        b.history.view((length,)).upload(history)
        state = dev.array(np.array([history[-1], length - 1, 0, 0], np.int32))
        draft_ngram(dev, b.ids, b.rows, state, b.history, 3)
        results[f"{length}"] = exact(b.ids.download())
    return results


def run_draft_catch(machine: Machine, rng: np.random.Generator) -> Outputs:
    """The ids of a stretch, in two parts; some are unknown to the draft model."""
    dev = machine.dev
    b, request, results = PassBuffers.create(dev, 3, 400, 700), dev.zeros((4 + 270,), I32), {}
    b.history.view((400,)).upload(rng.integers(0, 700, 400, dtype=np.int32))
    b.filled.upload(np.array([9], np.int32))
    state = dev.array(np.array([1, 391, 5, 0], np.int32))
    for call in range(3):
        draft_catch(dev, state, b.filled, b.history, request, 600)
        results[f"request {call}"] = exact(request.download())
    return results | {"filled": exact(b.filled.download())}


def run_accept_forced(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Half of the guesses stand, whatever they are."""
    dev, M, V, states = machine.dev, 4, 700, []
    b, s = PassBuffers.create(dev, M, 60, V, forced=True), Sampler.create(dev, V, 3)
    draft = dev.zeros((4,), I32)
    s.set_params(0.8, int(rng.integers(1 << 63)), 690)
    s.set_position(1, 10)
    b.limit.upload(np.array([40], np.uint32))
    b.force(0.5)
    accept_begin(dev, b, s, draft)
    for _ in range(6):
        b.ids.upload(rng.integers(0, 690, M, dtype=np.int32))
        accept(dev, b, s, draft, dev.array(rng.standard_normal((M, V)).astype(np.float32)), 500)
        states.append(np.concatenate([x.download().reshape(-1) for x in (s.state, draft, b.rows, b.history)]))
    machine.finish()
    return {"states": exact(np.array(states)), "ring": exact(s.ring.words.copy()), "told": exact(b.told.words.copy())}


def run_accept(machine: Machine, rng: np.random.Generator) -> Outputs:
    """Greedy passes of which every number of guesses is right; then one with a damaged row, and one at the limit."""
    dev, M, V, states = machine.dev, 4, 700, []
    b, s, draft = PassBuffers.create(dev, M, 60, V), Sampler.create(dev, V, 3), dev.zeros((4,), I32)
    s.set_params(0.0, 0, 690)
    s.set_position(1, 10)
    b.limit.upload(np.array([13], np.uint32))
    accept_begin(dev, b, s, draft)
    for right in (0, 1, 2, 3, 3, 3):
        logits = rng.standard_normal((M, V)).astype(np.float32)
        if len(states) == 4:
            logits[1, 300] = np.inf
        choices = logits[:, :690].argmax(1)
        b.ids.upload(np.array([1, *(c + (i >= right) for i, c in enumerate(choices[:-1]))], np.int32))
        accept(dev, b, s, draft, dev.array(logits))
        states.append(np.concatenate([x.download().reshape(-1) for x in (s.state, draft, b.rows, b.history)]))
    accept_step(dev, b, s, draft)
    machine.finish()
    return {"states": exact(np.array(states)), "ring": exact(s.ring.words.copy()), "told": exact(b.told.words.copy())}


PASSES = [
    Case("draft_row", run_draft_row),
    Case("draft_rows", run_draft_rows),
    Case("draft_ngram", run_draft_ngram),
    Case("accept_begin", run_accept),
    Case("draft_catch", run_draft_catch),
    Case("accept_step", run_accept),
    Case("accept_f32", run_accept),
    Case("accept_forced_f32", run_accept_forced),
]
