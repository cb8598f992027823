"""Torture of sums over ranks with more around them: RMSNorm in the same launch, products that exchange rows."""

from __future__ import annotations

import numpy as np

from loaders.dtypes import bf16_to_f32, f32_to_bf16
from qwen_raw.device import BF16, F32, Buffer
from qwen_raw.kernels.allreduce_lamport import LamportWorkspace, allreduce_lamport
from qwen_raw.kernels.allreduce_norm import allreduce_norm
from qwen_raw.kernels.embed import embed
from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.gemv_exchange import Exchange, Next
from qwen_raw.kernels.gemv_exchange_bf16 import EXCHANGE
from qwen_raw.kernels.linear import Linear
from qwen_raw.simt.case_tools import Mismatch, Outputs, payload, rank_order_sum, require_equal, start
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld

WIDTH, INNER, SUMS, STEPS = (
    72,
    16,
    3,
    2,
)  # of the small model in `gemv_exchange_case`: more rows than a block has threads
LAUNCHES = 2 + 2 * SUMS  # of a step


def allreduce_norm_case(world: SimWorld, rng: np.random.Generator) -> None:
    """Sums with residual and RMSNorm, by turns with plain sums on the same workspace; then replays of a graph.

    h is checked bit by bit; the normalised rows by being the same on all ranks and near the reference.
    """
    devices = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
    D, rows = 8 * 35, (2, 0, 1)  # 35 packs a row; 0: a plain sum of a few packs
    ends = LamportWorkspace.create(devices, D // 8 * max(rows), limit_ns=0)
    pdl, g = bool(rng.integers(2)), f32_to_bf16(rng.uniform(-2, 2, D).astype(np.float32))
    weights = [device.array(g) for device in devices]
    for replay in range(2):
        shapes = [(int(rng.choice((32, 64))), int(rng.integers(1, 5))) for _ in rows]
        in_place = [not T or bool(rng.integers(2)) for T in rows]
        bits = [[payload(rng, T * D // 8 or 5) for T in rows] for _ in devices]
        bases = [rng.uniform(-4, 4, row.size).astype(np.float32) for row in bits[0]]
        inputs = [[device.array(row) for row in rank] for device, rank in zip(devices, bits, strict=True)]
        h = [[device.array(base) for base in bases] for device in devices]
        sums = [[device.empty(base.shape, F32) for base in bases] for device in devices]
        outputs = [Outputs(device, [T * D or 8 for T in rows]) for device in devices]

        def queue(rank: int) -> None:
            for k, T in enumerate(rows):
                block, across = shapes[k]  # noqa: B023
                if not T:
                    allreduce_lamport(ends[rank], h[rank][k], inputs[rank][k], add=True, block=block, pdl=pdl)  # noqa: B023
                    continue
                total = h if in_place[k] else sums  # noqa: B023
                buffers = (total[rank][k], outputs[rank].view(k), h[rank][k], inputs[rank][k])  # noqa: B023
                to, out, old, inp = (b.view((T, D)) for b in buffers)
                allreduce_norm(
                    ends[rank], to, out, old, inp, weights[rank], 1e-6, block=block, row_blocks=across, pdl=pdl
                )

        start(world, rng, queue)
        got = [[(h if own else sums)[r][k].download() for k, own in enumerate(in_place)] for r in range(world.ranks)]
        for k, T in enumerate(rows):
            want = bases[k] + rank_order_sum([rank[k] for rank in bits])
            for rank in range(world.ranks):
                require_equal(got[rank][k], want, f"replay {replay}, call {k}: h", rank, 3 * replay + k)
            if not T:
                continue
            results = [out.results()[k] for out in outputs]
            for rank in range(world.ranks):
                require_equal(
                    results[rank], results[0], f"replay {replay}, call {k}: norm, unlike rank 0's", rank, 3 * replay + k
                )
            row = want.reshape(T, D).astype(np.float64)
            norm = row / np.sqrt((row**2).mean(1, keepdims=True) + 1e-6) * bf16_to_f32(g)
            if np.abs(bf16_to_f32(results[0]).reshape(T, D) - norm).max() > 2.0**-8 * np.abs(norm).max():
                raise Mismatch(f"replay {replay}, call {k}: norm", 0, 3 * replay + k)


class _Model:
    """One rank of a model without attention: embedding; then by turns a product of h and one that is summed into h."""

    def __init__(self, device: SimDevice, end: Exchange, rng: np.random.Generator, shared: np.random.Generator) -> None:
        def weights(generator: np.random.Generator, n: int, k: int) -> Buffer:
            return device.array(f32_to_bf16((generator.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)))

        self._device, self._end, self._rng = device, end, rng
        self._table = weights(shared, STEPS, WIDTH)
        self._head = Linear(weights(shared, WIDTH, WIDTH))
        self._gate, self._up = ([Linear(weights(rng, INNER, WIDTH)) for _ in range(SUMS)] for _ in range(2))
        self._back = [Linear(weights(rng, WIDTH, INNER)) for _ in range(SUMS)]
        self._act, self._h = device.empty((INNER,), BF16), device.empty((WIDTH,), F32)
        self._g = device.array(np.full(WIDTH, 0x3F80, np.uint16))
        self._ids = device.array(np.arange(STEPS, dtype=np.int32))
        self.outputs = Outputs(device, [WIDTH] * STEPS, F32)

    def step(self, step: int, *, pdl: bool, most_blocks: int) -> None:
        """Queue one step, whose logits go into outputs.view(step). Sums go on alternating from one step to the next."""
        dev, h = self._device, self._h
        embed(dev, h.view((1, WIDTH)), self._table, self._ids.view((1,), step), pdl=pdl)
        for i, (gate, up, back) in enumerate(zip(self._gate, self._up, self._back, strict=True)):
            blocks = [int(n) for n in self._rng.integers(1, most_blocks + 1, 2)]
            GEMV.swiglu(dev, self._act, h, self._g, gate, up, 1e-6, pdl=pdl, grid=blocks[0])
            ahead = Next(GEMV, "swiglu", (gate, up)).struct(dev, 4 * WIDTH)
            number = step * SUMS + i
            EXCHANGE.add(self._end, number, h, self._act, back, ahead=ahead, pdl=pdl, grid=blocks[1])
        GEMV.logits(dev, self.outputs.view(step), h, self._g, self._head, 1e-6, pdl=pdl, grid=most_blocks)


def _run_model(world: SimWorld, seed: int, *, pdl: bool, most_blocks: int, rng: np.random.Generator) -> list[_Model]:
    """Every rank's steps in a graph that is replayed; an even number of sums in all."""
    devices = [SimDevice(world=world, rank=rank) for rank in range(world.ranks)]
    ends = Exchange.create(devices, WIDTH, limit_ns=0)
    EXCHANGE.load(devices, [INNER])
    models = [
        _Model(device, end, np.random.default_rng((seed, rank)), np.random.default_rng(seed))
        for rank, (device, end) in enumerate(zip(devices, ends, strict=True))
    ]
    graphs = []
    for device, model in zip(devices, models, strict=True):
        with device.capture() as capture:
            for step in range(STEPS):
                model.step(step, pdl=pdl, most_blocks=most_blocks)
        graphs.append(capture.graph)
    for _ in range(2):
        start(world, rng, lambda rank: graphs[rank].launch())
    return models


def gemv_exchange_case(world: SimWorld, rng: np.random.Generator) -> None:
    """Sums over ranks inside of products: the logits are, bit by bit, those of ranks that run in order."""
    seed, pdl, race = int(rng.integers(2**31)), bool(rng.integers(2)), world.library.variant == "race"
    models = _run_model(world, seed, pdl=pdl, most_blocks=3, rng=rng)
    with SimWorld(world.ranks, library=world.library, race=race, memory=world.memory) as in_order:
        quiet = _run_model(in_order, seed, pdl=False, most_blocks=1, rng=np.random.default_rng(0))
        wants = [model.outputs.results() for model in quiet]
    launches = [LAUNCHES * (STEPS + step + 1) - 1 for step in range(STEPS)]
    for model in models:
        model.outputs.check(wants[0], "logits", launches)  # the same on all ranks
