"""The protocols that torture runs: each case drives the real launchers in one simulated world and checks every bit.

A case makes several calls back to back without a host wait, each with a fresh payload and another size, then replays a
captured graph with an odd number of calls. Outputs are poisoned and lie between guard bands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders.dtypes import bf16_to_f32, f32_to_bf16
from qwen_raw.device import BF16, F32, Buffer
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.allreduce_flag import FlagWorkspace, allreduce_flag
from qwen_raw.kernels.allreduce_lamport import LamportWorkspace, allreduce_lamport
from qwen_raw.kernels.allreduce_twoshot import TwoShotWorkspace, allreduce_twoshot
from qwen_raw.kernels.attn_decode import MIN_SPLIT, Workspace, attn_decode
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.signal import SignalEnds, signal_put, signal_take
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

Array = np.ndarray[Any, Any]
CAPACITY = 4  # packs
SIZES = (2, 4, 1, 3, 2)  # packs of the calls; a short one follows a long one
HANDOVERS = 7
GUARD = 0xEE
# Words that a careless protocol would take for its sentinel, and ones that are nearly it.
TRAPS = (0x80000000, 0x80010000, 0x00008000, 0x80008000, 0x80000001, 0x8000007F, 0x00000000)


class Mismatch(QwenRawError):
    """A value that came out wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """`run(world, rng)` raises Mismatch or SimError if the protocol failed under the world's schedule."""

    name: str
    run: Callable[[SimWorld, np.random.Generator], None]
    least_ranks: int
    what: str


def payload(rng: np.random.Generator, packs: int) -> Array:
    """bf16 [8·packs]: numbers between -4 and 4, a sixth of the words traps."""
    values = f32_to_bf16(rng.uniform(-4, 4, 8 * packs).astype(np.float32))
    words = values.view(np.uint32)
    chosen = rng.random(words.size) < 1 / 6
    words[chosen] = rng.choice(np.array(TRAPS, np.uint32), int(chosen.sum()))
    return values


def rank_order_sum(parts: Sequence[Array]) -> Array:
    """fp32 sums in rank order, from +0, as every all-reduce adds."""
    total = np.zeros(parts[0].size, np.float32)
    for part in parts:
        total += bf16_to_f32(part)
    return total


class Guarded:
    """A poisoned buffer with a guard band on either side."""

    def __init__(self, device: SimDevice, n: int) -> None:
        self.whole = device.empty((n + 16,), BF16)
        self.whole.fill(GUARD)
        self.buffer: Buffer = self.whole.view((n,), 8)

    def check(self, want: Array, what: str) -> None:
        """The guard bands are as they were, and the middle is `want`, bit by bit (-0 and +0 count as equal)."""
        got = self.whole.download()
        if (got[:8] != 0xEEEE).any() or (got[-8:] != 0xEEEE).any():
            raise Mismatch(f"{what}: a guard band was overwritten")
        bad = np.flatnonzero(bf16_to_f32(got[8:-8]) != bf16_to_f32(want))
        if bad.size:
            i = int(bad[0])
            raise Mismatch(f"{what}: element {i} is {got[8 + i]:#06x}, expected {want[i]:#06x} ({bad.size} wrong)")


def _allreduce(workspace: Any, reduce: Callable[..., None]) -> Callable[[SimWorld, np.random.Generator], None]:
    def run(world: SimWorld, rng: np.random.Generator) -> None:
        devices = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
        ends = workspace.create(devices, CAPACITY, limit_ns=0)
        calls = []
        with world.together():
            for packs in SIZES:
                inputs = [payload(rng, packs) for _ in devices]
                outs = [Guarded(device, 8 * packs) for device in devices]
                for device, end, bits, out in zip(devices, ends, inputs, outs, strict=True):
                    reduce(end, out.buffer, device.array(bits), block=8, grid=1)
                calls.append((f32_to_bf16(rank_order_sum(inputs)), outs))
        world.run()
        for number, (want, outs) in enumerate(calls):
            for rank, out in enumerate(outs):
                out.check(want, f"rank {rank}, call {number}")
        _replays(world, rng, devices, ends, reduce)

    return run


def _replays(world: SimWorld, rng: np.random.Generator, devices: list[SimDevice], ends: Any, reduce: Any) -> None:
    inputs = [device.zeros((16,), BF16) for device in devices]
    outs = [Guarded(device, 16) for device in devices]
    graphs = []
    for device, end, inp, out in zip(devices, ends, inputs, outs, strict=True):
        with device.capture() as capture:
            for _ in range(3):
                reduce(end, out.buffer, inp, block=8, grid=1)
        graphs.append(capture.graph)
    for replay in range(2):
        values = [payload(rng, 2) for _ in devices]
        for inp, bits in zip(inputs, values, strict=True):
            inp.upload(bits)
        with world.together():
            for graph in graphs:
                graph.launch()
        world.run()
        for rank, out in enumerate(outs):
            out.check(f32_to_bf16(rank_order_sum(values)), f"rank {rank}, replay {replay}")


def _signal(world: SimWorld, rng: np.random.Generator) -> None:
    """Every even rank hands over to the next one, as far ahead as the slots allow."""
    devices = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
    pairs = [(rank, rank + 1) for rank in range(0, world.ranks - 1, 2)]
    handed = []
    channels = [SignalEnds.create(devices[a], devices[b], 2 * 16, ranks=(a, b), limit_ns=0) for a, b in pairs]
    with world.together():
        for (source, target), ends in zip(pairs, channels, strict=True):
            for number in range(HANDOVERS):
                bits = payload(rng, 2)
                signal_put(ends, devices[source].array(bits), threads=8)
                out = Guarded(devices[target], 16)
                signal_take(ends, out.buffer, threads=8)
                handed.append((bits, out, f"rank {source} to {target}, hand-over {number}"))
    world.run()
    for bits, out, what in handed:
        out.check(bits, what)


def _attn_decode(world: SimWorld, rng: np.random.Generator) -> None:
    """Every rank its own attention with three splits, twice: the second launch finds the first one's counters."""
    H, KV, HD, n = 2, 1, 64, 2 * MIN_SPLIT + 5
    for rank in range(world.ranks):
        device = SimDevice(world=world, rank=rank)
        q, k, v = (f32_to_bf16(rng.standard_normal(s).astype(np.float32)) for s in ((H, HD), (KV, n, HD), (KV, n, HD)))
        Q, K, V = (bf16_to_f32(x).astype(np.float64) for x in (q, k, v))
        scores = Q @ K[0].T / np.sqrt(HD)
        p = np.exp(scores - scores.max(1, keepdims=True))
        want = (p / p.sum(1, keepdims=True)) @ V[0]
        ws = Workspace.create(device, H, KV, HD, n, 3)
        qd, kd, vd, pos = device.array(q), device.array(k), device.array(v), device.array(np.array([n - 1], np.int32))
        outs = [device.empty((H, HD), BF16) for _ in range(2)]
        with world.together():
            for out in outs:
                attn_decode(device, out, qd, kd, vd, pos, ws, pdl=True)
        world.run()
        for launch, out in enumerate(outs):
            error = np.abs(bf16_to_f32(out.download()) - want).max()
            if not error < 0.02:
                raise Mismatch(f"rank {rank}, launch {launch}: off by {error}")


def _chain(world: SimWorld, rng: np.random.Generator) -> None:
    """Dependent launches: embedding, then products that each read what the one before wrote, without a host wait."""
    K, links = 64, 4
    for rank in range(world.ranks):
        device = SimDevice(world=world, rank=rank)
        table = f32_to_bf16(rng.standard_normal((3, K)).astype(np.float32))
        weights = [f32_to_bf16((rng.standard_normal((K, K)) / 8).astype(np.float32)) for _ in range(links)]
        x = f32_to_bf16(rng.standard_normal(K).astype(np.float32))
        linears = [Linear(device.array(w)) for w in weights]
        h, xd, ids = device.empty((1, K), F32), device.array(x), device.array(np.array([2], np.int32))
        g, logits = device.array(np.full(K, 0x3F80, np.uint16)), device.empty((K,), F32)
        td = device.array(table)
        with world.together():  # a launch alone would end before the next one is queued
            embed(device, h, td, ids, pdl=True)
            for linear in linears[:-1]:
                GEMV.add(device, h.view((K,)), xd, linear, pdl=True, grid=3)
            GEMV.logits(device, logits, h.view((K,)), g, linears[-1], 1e-6, pdl=True, grid=3)
        world.run()
        want = bf16_to_f32(table[2]).astype(np.float64)
        for w in weights[:-1]:
            want = want + bf16_to_f32(w).astype(np.float64) @ bf16_to_f32(x)
        want = bf16_to_f32(weights[-1]).astype(np.float64) @ (want / np.sqrt((want**2).mean() + 1e-6))
        error = np.abs(logits.download() - want).max()
        if not error < 1e-3:
            raise Mismatch(f"rank {rank}: off by {error}")


CASES = {
    case.name: case
    for case in (
        Case("allreduce_lamport", _allreduce(LamportWorkspace, allreduce_lamport), 2, "one-shot push, sentinel"),
        Case("allreduce_flag", _allreduce(FlagWorkspace, allreduce_flag), 2, "flag barrier, peer reads"),
        Case("allreduce_twoshot", _allreduce(TwoShotWorkspace, allreduce_twoshot), 2, "reduce-scatter, all-gather"),
        Case("signal", _signal, 2, "put with signal, three slots"),
        Case("attn_decode", _attn_decode, 1, "last block merges the splits"),
        Case("chain", _chain, 1, "dependent launches of embed and gemv_bf16"),
    )
}
