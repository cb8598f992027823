"""The protocols that torture runs: each case drives the real launchers in one simulated world and checks every bit.

A case makes several calls back to back without a host wait, each with a fresh payload, another size and another grid,
as dependent launches or ordinary ones; half of the time one rank starts only when the others wait for it. Then it
replays a captured graph with an odd number of calls. Outputs are poisoned and lie between guard bands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from loaders.dtypes import f32_to_bf16
from qwen_raw.device import BF16, F32
from qwen_raw.generation.runner import logits_hash
from qwen_raw.generation.sampling import choose
from qwen_raw.kernels.allreduce_flag import FlagWorkspace, allreduce_flag
from qwen_raw.kernels.allreduce_lamport import LamportWorkspace, allreduce_lamport
from qwen_raw.kernels.allreduce_twoshot import TwoShotWorkspace, allreduce_twoshot
from qwen_raw.kernels.attn_decode import MIN_SPLIT, Split, Workspace, attn_decode
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.sample import Sampler, sample
from qwen_raw.kernels.signal import SignalEnds, signal_put, signal_take
from qwen_raw.simt.case_tools import Array, Case, Mismatch, Outputs, payload, rank_order_sum, start
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.peer_cases import allreduce_norm_case, gemv_exchange_case
from qwen_raw.simt.world import SimWorld

SIZES = (2, 9, 1, 3, 2)  # packs of the calls: a short one follows a long one, the longest needs two blocks of 8 threads
REPLAYED = (2, 2, 2)  # packs of the calls in the graph
REPLAYS = 2
HANDOVERS = 7
CHOICES, VOCAB, TEXT = 4, 70, 61  # of sample_ranks; rows from TEXT on are padding
# The block and grid of a call on every rank.
Shapes = Callable[[np.random.Generator, int], list[tuple[int, int]]]


def _any_shapes(rng: np.random.Generator, ranks: int) -> list[tuple[int, int]]:
    return [(int(rng.choice((1, 2, 8))), int(rng.integers(1, 4))) for _ in range(ranks)]


def _same_shapes(rng: np.random.Generator, ranks: int) -> list[tuple[int, int]]:
    """What kernels with a barrier between equal blocks take: one shape for all, a thread for each peer."""
    return [(int(rng.choice((ranks, 8))), int(rng.integers(1, 4)))] * ranks


class _Calls:
    """One rank's calls of `sizes` packs: inputs in one buffer, outputs in another, nothing queued between them."""

    def __init__(self, device: SimDevice, sizes: Sequence[int]) -> None:
        self._ends = np.cumsum(sizes)
        self._sizes = sizes
        self.inputs = device.zeros((8 * int(self._ends[-1]),), BF16)
        self.outputs = Outputs(device, [8 * packs for packs in sizes])

    def queue(self, end: Any, reduce: Callable[..., None], shapes: Sequence[tuple[int, int]], pdl: bool) -> None:
        for number, (packs, (block, grid)) in enumerate(zip(self._sizes, shapes, strict=True)):
            inp = self.inputs.view((8 * packs,), 8 * int(self._ends[number] - packs))
            reduce(end, self.outputs.view(number), inp, block=block, grid=grid, pdl=pdl)


def _wants(rows: Sequence[Array], sizes: Sequence[int]) -> list[Array]:
    """The sum of every call, from all ranks' inputs of all calls."""
    return np.split(f32_to_bf16(rank_order_sum(rows)), 8 * np.cumsum(sizes)[:-1])


def _allreduce(workspace: Any, reduce: Callable[..., None], shapes: Shapes) -> Callable[..., None]:
    def run(world: SimWorld, rng: np.random.Generator) -> None:
        devices = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
        ends = workspace.create(devices, max(SIZES), limit_ns=0)
        pdl = bool(rng.integers(2))
        calls = [_Calls(device, SIZES) for device in devices]
        rows = [payload(rng, sum(SIZES)) for _ in devices]
        for call, row in zip(calls, rows, strict=True):
            call.inputs.upload(row)
        by_call = [shapes(rng, world.ranks) for _ in SIZES]
        start(world, rng, lambda r: calls[r].queue(ends[r], reduce, [shape[r] for shape in by_call], pdl))
        for call in calls:
            call.outputs.check(_wants(rows, SIZES), "call", range(len(SIZES)))

        calls = [_Calls(device, REPLAYED) for device in devices]
        by_call = [shapes(rng, world.ranks) for _ in REPLAYED]
        graphs = []
        for rank, device in enumerate(devices):
            with device.capture() as capture:
                calls[rank].queue(ends[rank], reduce, [shape[rank] for shape in by_call], pdl)
            graphs.append(capture.graph)
        for replay in range(REPLAYS):
            rows = [payload(rng, sum(REPLAYED)) for _ in devices]
            for call, row in zip(calls, rows, strict=True):
                call.inputs.upload(row)
            start(world, rng, lambda rank: graphs[rank].launch())
            launches = range(len(SIZES) + replay * len(REPLAYED), 1000)
            for call in calls:
                call.outputs.check(_wants(rows, REPLAYED), f"replay {replay}, call", launches)

    return run


def _signal(world: SimWorld, rng: np.random.Generator) -> None:
    """Every even rank hands over to the next one, as far ahead as the slots allow; then replays of a graph."""
    devices = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
    producers = range(0, world.ranks - 1, 2)
    ends = [SignalEnds.create(devices[r], devices[r + 1], 2 * 16, ranks=(r, r + 1), limit_ns=0) for r in producers]
    pdl, grid = bool(rng.integers(2)), {"blocks": int(rng.integers(1, 4)), "threads": int(rng.choice((1, 2, 8)))}
    handed = 0
    for count, rounds in ((HANDOVERS, 1), (len(REPLAYED), REPLAYS)):
        sources = [devices[r].zeros((count, 16), BF16) for r in producers]
        outputs = [Outputs(devices[r + 1], [16] * count) for r in producers]
        graphs = []
        for pair, rank in (
            (pair, rank) for pair, producer in enumerate(producers) for rank in (producer, producer + 1)
        ):
            with devices[rank].capture() as capture:
                for number in range(count):
                    if rank % 2 == 0:
                        signal_put(ends[pair], sources[pair].view((16,), 16 * number), pdl=pdl, **grid)
                    else:
                        signal_take(ends[pair], outputs[pair].view(number), pdl=pdl, **grid)
            graphs.append(capture.graph)
        for replay in range(rounds):
            bits = [payload(rng, 2 * count).reshape(count, 16) for _ in producers]
            for source, row in zip(sources, bits, strict=True):
                source.upload(row)
            start(world, rng, lambda rank, graphs=graphs: graphs[rank].launch() if rank < len(graphs) else None)  # type: ignore[misc]
            for out, row in zip(outputs, bits, strict=True):
                out.check(list(row), f"replay {replay} of {count}, hand-over", range(handed, handed + count))
            handed += count


def _sample_ranks(world: SimWorld, rng: np.random.Generator) -> None:
    """Choices in a row, some drawn; each rank holds some rows, one of them perhaps none that has text."""
    devices = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
    ends = [0, *sorted(int(x) for x in rng.integers(1, VOCAB, world.ranks - 1)), VOCAB]
    samplers = Sampler.create_ranks(devices, [range(*pair) for pair in pairwise(ends)], limit_ns=0, blocks=2)
    temperature, seed, pdl = float(rng.choice((0.0, 0.8))), int(rng.integers(1 << 63)), bool(rng.integers(2))
    logits = rng.standard_normal((CHOICES, VOCAB)).astype(np.float32)
    rows = []
    for device, s in zip(devices, samplers, strict=True):
        s.set_params(temperature, seed, TEXT)
        s.set_position(1, 9)
        rows.append([device.array(row[s.rows.start : s.rows.stop]) for row in logits])

    def queue(rank: int) -> None:
        for row in rows[rank]:
            sample(devices[rank], row, samplers[rank], threads=32, pdl=pdl)

    start(world, rng, queue)
    for number, row in enumerate(logits):
        best = choose(row, position=10 + number, temperature=temperature, seed=seed, text_vocab=TEXT)
        want = (logits_hash(row[:TEXT]) << 32 | best, number + 1)
        for rank, s in enumerate(samplers):
            got = tuple(int(word) for word in s.ring.words[2 * number : 2 * number + 2])
            if got != want:
                raise Mismatch(f"rank {rank}, choice {number}: {got[0]:#x}, expected {want[0]:#x}", rank, number)


# One device's work: what it queues, and its launches that have a result.
Work = Callable[[SimDevice, np.random.Generator], Outputs]


def _alone(work: Work, launches: Sequence[int]) -> Callable[..., None]:
    """A case in which ranks do not meet: under any schedule each computes what it computes in order, bit by bit.

    `launches`: which kernel launches the results are from.
    """

    def run(world: SimWorld, rng: np.random.Generator) -> None:
        seeds = [int(seed) for seed in rng.integers(2**31, size=world.ranks)]
        devices = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
        results = []
        with world.together():  # a launch alone would end before the next one is queued
            for device, seed in zip(devices, seeds, strict=True):
                results.append(work(device, np.random.default_rng(seed)))
        world.run()
        race = world.library.variant == "race"
        for seed, outputs in zip(seeds, results, strict=True):
            with SimWorld(library=world.library, race=race, memory=world.memory) as in_order:
                wants = work(SimDevice(world=in_order), np.random.default_rng(seed)).results()
            outputs.check(wants, "result", launches)

    return run


def _attn_decode(device: SimDevice, rng: np.random.Generator) -> Outputs:
    """Attention over up to three splits, three times: each launch finds the workspace as the one before has left it.

    The splits are blocks of one cluster, clusters of one or two blocks, or a cluster and blocks by themselves. The
    newest key is what the launch before has written: another attention's output. Positions descend, so that no older
    key is.
    """
    H, KV, HD, n = 2, 1, 64, 2 * MIN_SPLIT + 5
    positions = np.array([n - 1, n - 4, MIN_SPLIT // 2 - 1], np.int32)
    q, k, v, key_q, keys, values = (
        device.array(f32_to_bf16(rng.standard_normal(shape).astype(np.float32)))
        for shape in ((positions.size, H, HD), (KV, n, HD), (KV, n, HD), (1, HD), (1, n, HD), (1, n, HD))
    )
    split = (Split(0, 3, 7), Split(1, 2, 8), Split(2, 1, 9), Split(1, 1, 7, 1, 5))[rng.integers(4)]
    ws, key_ws = (Workspace.create(device, h, KV, HD, n, split=split) for h in (H, 1))
    outputs, at = Outputs(device, [H * HD] * positions.size), device.array(positions)
    for number, pos in enumerate(positions.tolist()):
        out, here = outputs.view(number).view((H, HD)), at.view((1,), number)
        attn_decode(device, k.view((1, HD), pos * HD), key_q, keys, values, here, key_ws, pdl=True)
        attn_decode(device, out, q.view((H, HD), number * H * HD), k, v, here, ws, pdl=True)
    return outputs


def _chain(device: SimDevice, rng: np.random.Generator) -> Outputs:
    """Embedding, then products that each read what the one before wrote; three times over the same memory."""
    K, links = 64, 4
    table = device.array(f32_to_bf16(rng.standard_normal((3, K)).astype(np.float32)))
    weights = [f32_to_bf16((rng.standard_normal((K, K)) / 8).astype(np.float32)) for _ in range(links)]
    linears = [Linear(device.array(w)) for w in weights]
    x = device.array(f32_to_bf16(rng.standard_normal(K).astype(np.float32)))
    h, ids = device.empty((1, K), F32), device.array(np.array([2, 0, 1], np.int32))
    g = device.array(np.full(K, 0x3F80, np.uint16))
    outputs = Outputs(device, [K] * 3, F32)
    for number in range(3):
        embed(device, h, table, ids.view((1,), number), pdl=True)
        for linear in linears[:-1]:
            GEMV.add(device, h.view((K,)), x, linear, pdl=True, grid=3)
        GEMV.logits(device, outputs.view(number), h.view((K,)), g, linears[-1], 1e-6, pdl=True, grid=3)
    return outputs


CASES = {
    case.name: case
    for case in (
        Case(
            "allreduce_lamport",
            _allreduce(LamportWorkspace, allreduce_lamport, _any_shapes),
            2,
            "one-shot push, sentinel",
        ),
        Case("allreduce_flag", _allreduce(FlagWorkspace, allreduce_flag, _same_shapes), 2, "flag barrier, peer reads"),
        Case(
            "allreduce_twoshot",
            _allreduce(TwoShotWorkspace, allreduce_twoshot, _same_shapes),
            2,
            "reduce-scatter, all-gather",
        ),
        Case("allreduce_norm", allreduce_norm_case, 2, "push, residual, RMSNorm over several blocks"),
        Case("gemv_exchange", gemv_exchange_case, 2, "products that exchange their rows, no all-reduce"),
        Case("sample_ranks", _sample_ranks, 2, "candidates meet, every word carries its step"),
        Case("signal", _signal, 2, "put with signal, three slots"),
        Case("attn_decode", _alone(_attn_decode, range(3)), 1, "blocks push to their cluster, the last cluster merges"),
        Case("chain", _alone(_chain, range(4, 15, 5)), 1, "dependent launches of embed and gemv_bf16"),
    )
}
