"""What breaks sums over ranks elsewhere: sizes in any order, replays, late ranks, inputs that change, memory around."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from comm.guarded import Guarded
from comm.ranks import Ranks

from loaders.dtypes import bf16_to_f32, f32_to_bf16
from qwen_raw.comm.reduce import create_reducers
from qwen_raw.device import BF16, F32

LIMIT_NS = 2_000_000_000
SIZES = (8, 16, 24, 896, 1536, 3584, 5120, 8192)
ON_DEVICE = ("lamport", "flag", "twoshot")


def integers(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    """bf16 bits of whole numbers so small that sums of a hundred thousand of them are exact in fp32."""
    return f32_to_bf16(rng.integers(-8, 9, n).astype(np.float32))


def total(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.sum([bf16_to_f32(part) for part in parts], axis=0, dtype=np.float32)


def pause(ranks: Ranks, rng: np.random.Generator) -> None:
    """On a GPU, let a rank start up to 2 ms after the one before; the simulator's schedule does so by itself."""
    if ranks.devices[0].kind == "cuda":
        time.sleep(float(rng.uniform(0, 2e-3)))


@pytest.mark.parametrize("path", ON_DEVICE)
def test_interleaved_sizes_in_replayed_graphs(ranks: Ranks, rng: np.random.Generator, path: str) -> None:
    """An odd number of calls a graph, each with a payload and a size of its own, three times with new payloads.

    On a GPU a hundred thousand calls. Every rank starts late in its turn. Whole numbers: the residual is exact.
    """
    cuda = ranks.devices[0].kind == "cuda"
    calls, replays = (1001, 34) if cuda else (5, 2)
    reducers = create_reducers(ranks.devices, path=path, elements=max(SIZES), limit_ns=LIMIT_NS)
    sizes = rng.choice(SIZES[:4] if not cuda else SIZES, calls).tolist()
    starts = np.concatenate([[0], np.cumsum(sizes)])
    partials = [dev.zeros((int(starts[-1]),), BF16) for dev in ranks.devices]
    h = [dev.zeros((int(starts[-1]),), F32) for dev in ranks.devices]
    graphs = []
    for dev, reducer, out, inp in zip(ranks.devices, reducers, h, partials, strict=True):
        with dev.capture() as capture:
            for at, n in zip(starts.tolist(), sizes, strict=False):
                reducer.add(out.view((n,), at), inp.view((n,), at))
        graphs.append(capture.graph)
    want = np.zeros(int(starts[-1]), np.float32)
    for _ in range(3):
        parts = [integers(rng, want.size) for _ in ranks.devices]
        for buffer, part in zip(partials, parts, strict=True):
            buffer.upload(part)
        ranks.finish()
        with ranks.together():
            for replay in range(replays):
                for rank in rng.permutation(len(graphs)).tolist():
                    graphs[rank].launch()
                    if replay == 0:
                        pause(ranks, rng)
        ranks.finish()
        want += replays * total(parts)
        for rank, out in enumerate(h):
            np.testing.assert_array_equal(out.download(), want, err_msg=f"rank {rank}")
    assert [reducer.fault() for reducer in reducers] == [None] * len(reducers)


@pytest.mark.parametrize("path", ON_DEVICE)
def test_payloads_that_a_poll_could_take_for_nothing(ranks: Ranks, path: str) -> None:
    """Words that are the sentinel or nearly it, with every bf16 from 0x8000 to 0x807F in either half; NaN, infinities.

    Each rank sends them in its turn, the others zeros. Flag and twoshot have no sentinel; they too must not lose them.
    """
    special = np.concatenate([np.arange(0x8000, 0x8080), [0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x0000, 0x3F80]])
    low, high = np.meshgrid(special.astype(np.uint16), np.array([0x8000, 0x0000, 0x8001, 0x3F80], np.uint16))
    bits = np.stack([low.ravel(), high.ravel(), high.ravel(), low.ravel()], 1).ravel()
    reducers = create_reducers(ranks.devices, path=path, elements=bits.size, limit_ns=LIMIT_NS)
    calls = []
    for sender in range(len(ranks.devices)):
        sent = [bits if rank == sender else np.zeros_like(bits) for rank in range(len(ranks.devices))]
        calls.append([(dev.zeros(bits.shape, F32), dev.array(s)) for dev, s in zip(ranks.devices, sent, strict=True)])
    ranks.finish()
    with ranks.together():
        for call in calls:
            for reducer, (h, partial) in zip(reducers, call, strict=True):
                reducer.add(h, partial)
    ranks.finish()
    for call in calls:
        for h, _ in call:
            np.testing.assert_array_equal(h.download(), bf16_to_f32(bits))  # -0 equals +0
    assert [reducer.fault() for reducer in reducers] == [None] * len(reducers)


@pytest.mark.parametrize("path", (*ON_DEVICE, "host"))
def test_an_input_may_be_overwritten_right_after_the_call(ranks: Ranks, rng: np.random.Generator, path: str) -> None:
    """In stream order: a peer that is still reading, or has not begun, must not see what comes next."""
    reducers = create_reducers(ranks.devices, path=path, elements=896, limit_ns=LIMIT_NS)
    rounds = [[integers(rng, 896) for _ in ranks.devices] for _ in range(4)]
    sources = [[dev.array(part) for dev, part in zip(ranks.devices, parts, strict=True)] for parts in rounds]
    h = [dev.zeros((896,), F32) for dev in ranks.devices]
    ranks.finish()
    with nullcontext() if path == "host" else ranks.together():
        for row in sources:
            for rank, source in enumerate(row):
                reducers[rank].add(h[rank], source)
            for source in row:
                source.fill(0xFF)  # NaN
            pause(ranks, rng)
    ranks.finish()
    want = np.sum([total(parts) for parts in rounds], axis=0, dtype=np.float32)
    for out in h:
        np.testing.assert_array_equal(out.download(), want)


@pytest.mark.parametrize("path", (*ON_DEVICE, "host"))
def test_nothing_is_written_around_a_buffer(ranks: Ranks, rng: np.random.Generator, path: str) -> None:
    """Of all buffers that peers write, too: the longest message, then a short one, then the longest again."""
    guarded = [Guarded(dev) for dev in ranks.devices]
    reducers = create_reducers(guarded, path=path, elements=904, limit_ns=LIMIT_NS)
    calls = []
    for n in (904, 8, 904):
        parts = [integers(rng, n) for _ in guarded]
        partials = [dev.array(part) for dev, part in zip(guarded, parts, strict=True)]
        calls.append((parts, [dev.zeros((n,), F32) for dev in guarded], partials))
    ranks.finish()
    with nullcontext() if path == "host" else ranks.together():
        for _, h, partials in calls:
            for rank, reducer in enumerate(reducers):
                reducer.add(h[rank], partials[rank])
    ranks.finish()
    for parts, h, _ in calls:
        for out in h:
            np.testing.assert_array_equal(out.download(), total(parts))
    for dev in guarded:
        dev.check()
