"""The sum of a chunk and the norm behind it: µs, by rows in one launch beside a sum and a norm in two.

    python -m bench.allreduce_rows [--devices 0,1] [--rows 512 2048] [--hidden 8192] [--calls 40] [--repeats 9]
                                   [--block N …] [--grid N …]

Calls are chained in a graph a rank as dependent launches, all graphs start together, and a figure is the slowest rank's
time over the calls, the median over replays; variants take turns. `GB/s`: what a rank takes in over the link, and gives
out at the same time: shares and normed rows. Before it is timed each variant is held against the sum and the norm.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from bench.allreduce import Call, Ranks
from bench.common import command, environment, result_arguments, save
from loaders.dtypes import bf16_to_f32, e4m3_to_f32
from qwen_raw.cli.arguments import Parser, ordinals, positive
from qwen_raw.comm.reduce import create_reducers
from qwen_raw.device import BF16, F32
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels.allreduce_rows import KINDS, LONGEST, RowBuffers, RowsWorkspace, allreduce_rows, rows_of_owner
from qwen_raw.kernels.norm import STEM, rmsnorm_bf16, rmsnorm_e4m3
from qwen_raw.kernels.peers import MAX_RANKS

LIMIT_NS = 2_000_000_000
EPS = 1e-6
# received: by rows, of shares that products have pushed to the rows' owners; spread: h itself, without a norm.
PATHS = ("rows", "received", "twoshot", "spread")


@dataclass(frozen=True)
class Variant:
    """One way to do it."""

    path: str  # of PATHS
    kind: str  # bf16 or e4m3
    block: int | None = None
    grid: int | None = None

    def line(self) -> str:
        said = [self.path, self.kind] + [f"{what} {n}" for what, n in (("block", self.block), ("grid", self.grid)) if n]
        return f"{' '.join(said):32}"


class Chunk:
    """Buffers of T rows of D on every rank, and a call for each variant."""

    def __init__(self, ranks: Ranks, T: int, D: int) -> None:
        rng = np.random.default_rng(0)
        self.T, self.D, self.ranks, devices = T, D, ranks, ranks.devices
        # bf16 values of at most 2^-6, so that thousands of sums stay finite.
        bits = [(rng.uniform(-1, 1, (T, D)) / 64).astype(np.float32).view(np.uint32) >> 16 for _ in devices]
        self.shares = [dev.array(b.astype(np.uint16)) for dev, b in zip(devices, bits, strict=True)]
        self.h = [dev.zeros((T, D), F32) for dev in devices]
        self.g = [dev.array(np.full(D, 0x3F80, np.uint16)) for dev in devices]
        self.out = {k: [dev.empty((T, D), KINDS[k]) for dev in devices] for k in ("bf16", "e4m3")}
        self.scale = [dev.empty((T,), F32) for dev in devices]
        world, part = len(devices), rows_of_owner(T, len(devices))
        self.received = [dev.zeros((world, part, D), BF16) for dev in devices]
        for owner, buffer in enumerate(self.received):
            for source, b in enumerate(bits):
                rows = b[owner * part : (owner + 1) * part].astype(np.uint16)
                buffer.view(rows.shape, source * part * D).upload(rows)
        self.reducers = create_reducers(devices, path="twoshot", elements=T * D, limit_ns=LIMIT_NS)
        self.ends = {kind: RowsWorkspace.create(devices, self._buffers(kind), limit_ns=LIMIT_NS) for kind in self.out}
        for dev in devices:  # loaded before ranks wait for each other
            for name in ("rmsnorm_bf16", "rmsnorm_e4m3"):
                dev.kernel(STEM, name)
        ranks.wait()

    def _buffers(self, kind: str) -> list[RowBuffers]:
        scale = self.scale if kind == "e4m3" else [None] * len(self.h)
        parts = (self.shares, self.out[kind], scale, self.h, self.received)
        return [RowBuffers(kind, *own) for own in zip(*parts, strict=True)]

    def call(self, variant: Variant, rank: int, pdl: bool) -> None:
        """Queue it on one rank."""
        dev, h, kind, g = self.ranks.devices[rank], self.h[rank], variant.kind, self.g[rank]
        if variant.path != "twoshot":
            end, weight = self.ends[kind][rank], None if variant.path == "spread" else g
            pushed, shape = variant.path == "received", {"block": variant.block, "grid": variant.grid}
            allreduce_rows(end, self.T, self.D, weight, EPS, **shape, pdl=pdl, pushed=pushed)
            return
        n, out = (self.T * self.D,), self.out[kind][rank]
        self.reducers[rank].add(h.view(n), self.shares[rank].view(n), pdl=pdl)
        if kind == "e4m3":
            rmsnorm_e4m3(dev, out, self.scale[rank], h, g, EPS, pdl=pdl)
        else:
            rmsnorm_bf16(dev, out, h, g, EPS, pdl=pdl)

    def check(self, variant: Variant) -> None:
        """One call from zero: the norm of the sum, on every rank. Raises QwenRawError otherwise."""
        for h, out in zip(self.h, self.out[variant.kind], strict=True):
            h.fill(0)
            out.fill(0)
        for rank in range(len(self.h)):
            self.call(variant, rank, False)
        want = np.sum([bf16_to_f32(share.download()) for share in self.shares], axis=0, dtype=np.float32)
        if variant.path == "spread":
            right = all((h.download() == want).all() for h in self.h)
        else:
            want /= np.sqrt((want**2).mean(-1, keepdims=True) + EPS)
            bound = np.abs(want) * 2.0**-7 if variant.kind == "bf16" else np.abs(want) * 2.0**-3 + 1e-2
            right = all((np.abs(self._normed(variant.kind, rank) - want) <= bound).all() for rank in range(len(self.h)))
        if not right:
            raise QwenRawError(f"{variant.line().strip()}: the sum or its norm is wrong")

    def _normed(self, kind: str, rank: int) -> np.ndarray[Any, Any]:
        bits = self.out[kind][rank].download()
        return bf16_to_f32(bits) if kind == "bf16" else e4m3_to_f32(bits) * self.scale[rank].download()[:, None]

    def gb_s(self, variant: Variant, us: float) -> float:
        """Each way, of one rank."""
        world = len(self.h)
        out = {"spread": 4}.get(variant.path, 1 if variant.kind == "e4m3" and variant.path != "twoshot" else 2)
        shares = 0 if variant.path == "received" else 2
        return (world - 1) / world * self.T * self.D * (shares + out) / us / 1e3


def measure(chunk: Chunk, variants: Sequence[Variant], calls: int, repeats: int) -> dict[Variant, list[float]]:
    """µs a call of each replay."""
    graphs: dict[Variant, list[Any]] = {}
    samples: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for variant in variants:
        chunk.check(variant)
        call: Call = partial(chunk.call, variant)
        graphs[variant] = chunk.ranks.capture(call, calls, pdl=True)
    for _ in range(repeats):
        for variant in variants:
            samples[variant] += [ms * 1e3 / calls for ms in chunk.ranks.time(graphs[variant], 1)]
    for each in graphs.values():
        for graph in each:
            graph.close()
    return samples


def hidden(text: str) -> int:
    """A row's length."""
    size = positive(text)
    if size % 16 or size > LONGEST:
        raise argparse.ArgumentTypeError(f"{size} is not a multiple of 16, up to {LONGEST}")
    return size


def main() -> int:
    parser = Parser("python -m bench.allreduce_rows", description="sums of a chunk, with the norm behind them")
    parser.add_argument("--devices", type=ordinals, default=[0, 1], help="the GPU of each rank, as 0,1")
    parser.add_argument("--rows", nargs="+", type=positive, default=[16, 128, 512, 2048])
    parser.add_argument("--hidden", type=hidden, default=8192)
    parser.add_argument("--block", nargs="+", type=positive, default=[None], help="threads; default: the launcher's")
    parser.add_argument("--grid", nargs="+", type=positive, default=[None], help="blocks; default: the launcher's")
    parser.add_argument("--calls", type=positive, default=40, help="in a graph")
    parser.add_argument("--repeats", type=positive, default=9)
    result_arguments(parser, "allreduce_rows.json")
    a = parser.parse_args()
    if not 2 <= len(a.devices) <= MAX_RANKS:
        raise UsageError(f"{len(a.devices)} devices: 2 to {MAX_RANKS} ranks sum, as in --devices 0,1")
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ranks = Ranks([stack.enter_context(CudaDevice(n)) for n in a.devices])
        env = environment(ranks.devices[0], a.commit) | {"devices": a.devices, "hidden": a.hidden}
        for T in a.rows:
            chunk, kinds = Chunk(ranks, T, a.hidden), ("bf16", "e4m3")
            ways = product(PATHS[:2], kinds, a.block, a.grid)
            variants = [Variant(*way) for way in ways]
            variants += [Variant("twoshot", kind) for kind in kinds] + [Variant("spread", "bf16")]
            for variant, samples in measure(chunk, variants, a.calls, a.repeats).items():
                us = statistics.median(samples)
                gb_s = chunk.gb_s(variant, us)
                told = f"{us:8.2f} µs  worst replay {max(samples):8.2f}  {gb_s:4.0f} GB/s each way"
                print(f"{T:5} rows  {variant.line()} {told}", flush=True)
                times = {"us": us, "us_worst": max(samples), "gb_s_each_way": gb_s}
                rows.append({"rows": T} | asdict(variant) | times)
        print(f"# written: {save('allreduce_rows', env, rows, a.output).name}")
    return 0


if __name__ == "__main__":
    command(main)
