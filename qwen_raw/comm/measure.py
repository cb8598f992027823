"""Which path sums fastest on these GPUs: every path is timed for a few milliseconds, once in a process and size.

A token's sum is timed together with a small product whose shares it sums, because path "inline" has no call of its own.
Nothing is measured where it would say nothing: on simulated ranks, and on GPUs that ranks share.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qwen_raw.comm.reduce import ONE_SHOT_BYTES, create_reducers
from qwen_raw.device import BF16, F32, Device
from qwen_raw.driver.device import CudaDevice
from qwen_raw.kernels.allreduce_rows import RowBuffers, RowsWorkspace, allreduce_rows, takes
from qwen_raw.kernels.gemv_bf16 import GEMV
from qwen_raw.kernels.gemv_exchange import Exchange
from qwen_raw.kernels.gemv_exchange_bf16 import EXCHANGE
from qwen_raw.kernels.linear import Linear

ROWS = "rows"  # a chunk's sum with the norm behind it: qwen_raw/kernels/allreduce_rows.py
INLINE = "inline"  # what there is beside the paths of qwen_raw/comm/reduce.py, for a token's sum
CALLS = 32  # in a graph
REPLAYS = 5
WIDTH = 512  # of the product's rows
LIMIT_NS = 2_000_000_000
Call = Callable[[int, int], None]  # (rank, number of the call)


@dataclass(frozen=True, slots=True)
class Measured:
    """µs of a sum by path, the slowest rank's; with a product of `width` weights a row, where that is not 0."""

    ordinals: tuple[int, ...]
    nbytes: int  # of the message in bf16
    width: int
    us: tuple[tuple[str, float], ...]

    @property
    def fastest(self) -> str:
        """The path."""
        return min(self.us, key=lambda timed: timed[1])[0]

    def line(self) -> str:
        """For people: "16 KB over GPUs 0, 1: inline 3.1 µs · lamport 4.0 · flag 6.8 · twoshot 10.1"."""
        times = [f"{path} {us:.1f}" for path, us in sorted(self.us, key=lambda timed: timed[1])]
        product = ", each with a small product" if self.width else ""
        size = f"{self.nbytes >> 10} KB" if self.nbytes >= 1 << 10 else f"{self.nbytes} B"
        return f"{size} over GPUs {', '.join(map(str, self.ordinals))}: {' · '.join(times)} µs{product}"


_measured: dict[tuple[tuple[int, ...], int, int, int], Measured] = {}  # by GPUs, bytes, width, rows' length


def measure_token(devices: Sequence[Device], elements: int) -> Measured | None:
    """Every path for the sum of one token's shares of `elements`; None where measuring says nothing."""
    return _measure(devices, elements, WIDTH)


def measure_chunk(devices: Sequence[Device], T: int, D: int) -> Measured | None:
    """Every path that is meant for chunks of T rows of D; the one by rows norms them too."""
    return _measure(devices, T * D, 0, D if takes(D) else 0)


def _measure(devices: Sequence[Device], elements: int, width: int, D: int = 0) -> Measured | None:
    gpus = [dev for dev in devices if isinstance(dev, CudaDevice)]
    ordinals = tuple(dev.ordinal for dev in devices)
    if len(gpus) < 2 or len(gpus) < len(devices) or len(set(ordinals)) < len(ordinals):
        return None
    key = (ordinals, 2 * elements, width, D)
    if key not in _measured:
        paths = (
            ["twoshot", "flag"] + (["lamport"] if 2 * elements < ONE_SHOT_BYTES else []) + ([INLINE] if width else [])
        )
        us = [(path, _time(gpus, _calls(gpus, path, elements, width))) for path in paths]
        us += [(ROWS, _time(gpus, _calls_by_rows(gpus, elements // D, D)))] if D else []
        _measured[key] = Measured(ordinals, 2 * elements, width, tuple(us))
    return _measured[key]


def _calls(devices: Sequence[CudaDevice], path: str, elements: int, width: int) -> Call:
    """One sum of zeros over the ranks, and the product before it."""
    h = [dev.zeros((elements,), F32) for dev in devices]
    share = [dev.zeros((elements,), BF16) for dev in devices]
    x = [dev.zeros((width,), BF16) for dev in devices] if width else []
    weights = [Linear(dev.zeros((elements, width), BF16)) for dev in devices] if width else []
    if path == INLINE:
        EXCHANGE.load(devices, [width])
        ends = Exchange.create(devices, elements, limit_ns=LIMIT_NS)
        return lambda rank, number: EXCHANGE.add(ends[rank], number, h[rank], x[rank], weights[rank], pdl=True)
    reducers = create_reducers(devices, path=path, elements=elements, limit_ns=LIMIT_NS)

    def call(rank: int, _: int) -> None:
        if width:
            GEMV.store(devices[rank], share[rank], x[rank], weights[rank], pdl=True)
        reducers[rank].add(h[rank], share[rank], pdl=True)

    if width:
        for rank, dev in enumerate(devices):  # loads the product's kernel
            GEMV.store(dev, share[rank], x[rank], weights[rank])
            dev.synchronize()
    return call


def _calls_by_rows(devices: Sequence[CudaDevice], T: int, D: int) -> Call:
    """One sum by rows of zeros, and their norm."""
    g = [dev.zeros((D,), BF16) for dev in devices]
    shares = [dev.zeros((T, D), BF16) for dev in devices]
    buffers = [RowBuffers("bf16", s, s, None, dev.zeros((T, D), F32)) for dev, s in zip(devices, shares, strict=True)]
    ends = RowsWorkspace.create(devices, buffers, limit_ns=LIMIT_NS)
    return lambda rank, _: allreduce_rows(ends[rank], T, D, g[rank], 1e-6, pdl=True)


def _time(devices: Sequence[CudaDevice], call: Call) -> float:
    """Median µs of a call in a replayed graph, of the slowest rank."""
    graphs, samples = [], []
    for rank, dev in enumerate(devices):
        with dev.capture() as capture:
            for number in range(CALLS):
                call(rank, number)
        graphs.append(capture.graph)
    for _ in range(1 + REPLAYS):
        pairs = [(dev.event(), dev.event()) for dev in devices]
        for dev, graph, (begin, end) in zip(devices, graphs, pairs, strict=True):
            begin.record(dev.stream)
            graph.launch()
            end.record(dev.stream)
        samples.append(max(end.elapsed_ms(begin) for begin, end in pairs) * 1e3 / CALLS)
        for pair in pairs:
            for event in pair:
                event.close()
    for graph in graphs:
        graph.close()
    return statistics.median(samples[1:])
