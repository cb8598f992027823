"""All-reduce latency: µs a call, every path and size, and NCCL's in the same run.

    python -m bench.allreduce [--devices 0,1] [--bytes 16384 …] [--paths lamport …] [--calls 500] [--no-nccl]

Calls are chained in a graph a rank, h += Σ partial, as dependent launches and as ordinary ones. All ranks' graphs are
held by one word and start together; a figure is the slowest rank's time over the calls, the median over replays.
Path "host" cannot be captured: its figure is the host's clock over eager calls. "lamport fused" also writes
RMSNorm(h)·g; "lamport bare" leaves h alone: out = Σ partial.
Then a small product is timed together with the sum of its shares, which is how path "inline", that has no call of its
own, is held against the others (qwen_raw/comm/measure.py); NCCL follows; a last table says what a call of 16 KB pays
for what (bench/allreduce_parts.py). The JSON is written after every line.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.allreduce_parts import STAMPED, parts_of
from bench.common import command, environment, packs, result_arguments, save
from loaders.dtypes import bf16_to_f32
from qwen_raw.cli.arguments import Parser, ordinals, positive
from qwen_raw.comm.measure import measure_token
from qwen_raw.comm.reduce import Lamport, Reducer, create_reducers
from qwen_raw.device import BF16, F32
from qwen_raw.driver.device import CudaDevice
from qwen_raw.driver.stream import Wait
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels.allreduce_lamport import allreduce_lamport
from qwen_raw.kernels.allreduce_norm import LONGEST
from qwen_raw.kernels.peers import MAX_RANKS, connect

PATHS = ("lamport", "lamport bare", "lamport fused", "flag", "twoshot", "host")
BYTES = (2 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20)
ONE_SHOT_MOST = 1 << 20  # bytes up to which pushing all to all is measured
FUSED_MOST = 2 * LONGEST  # bytes: one row, as in a decode step
EAGER_CALLS = 50
LIMIT_NS = 2_000_000_000
EPS = 1e-6
Call = Callable[[int, bool], None]  # (rank, as a dependent launch)


@dataclass(frozen=True)
class Figure:
    """µs a call."""

    path: str
    bytes: int
    pdl: bool | None  # None: not a graph of ours
    us: float
    us_worst: float  # of the replays
    gb_s: float  # message bytes over time

    @staticmethod
    def of(path: str, nbytes: int, pdl: bool | None, samples: Sequence[float]) -> Figure:
        us = statistics.median(samples)
        return Figure(path, nbytes, pdl, us, max(samples), nbytes / us / 1e3)

    def line(self) -> str:
        how = {True: "dependent", False: "ordinary", None: ""}[self.pdl]
        return f"{self.path:14} {self.bytes:9} B  {how:10} {self.us:9.3f} µs  worst replay {self.us_worst:9.3f}"


class Ranks:
    """One device a rank, and a gate that their streams are held at so that what is queued starts together."""

    def __init__(self, devices: Sequence[CudaDevice]) -> None:
        self.devices = list(devices)
        self._gate = devices[0].host_ring(1)
        self._round = 0

    def wait(self) -> None:
        for dev in self.devices:
            dev.synchronize()

    def capture(self, call: Call, calls: int, *, pdl: bool) -> list[Any]:
        """`calls` calls of every rank as a graph each, run once."""
        graphs = []
        for rank, dev in enumerate(self.devices):
            with dev.capture() as capture:
                for _ in range(calls):
                    call(rank, pdl)
            graphs.append(capture.graph)
        self.wait()
        for graph in graphs:
            graph.launch()
        self.wait()
        return graphs

    def time(self, graphs: Sequence[Any], repeats: int) -> list[float]:
        """Milliseconds of each replay: the slowest rank's."""
        samples = []
        for _ in range(repeats):
            self._round += 1
            events = []
            try:
                for dev, graph in zip(self.devices, graphs, strict=True):
                    dev.stream.wait_value32(self._gate.buffer.ptr, self._round, Wait.GEQ)
                    begin, end = dev.event(), dev.event()
                    begin.record(dev.stream)
                    graph.launch()
                    end.record(dev.stream)
                    events.append((begin, end))
            finally:
                self._gate.words[0] = self._round
            samples.append(max(end.elapsed_ms(begin) for begin, end in events))
            for pair in events:
                for event in pair:
                    event.close()
        return samples


class Message:
    """Buffers of one message of `nbytes` on every rank, and a call for each path."""

    def __init__(self, ranks: Ranks, path: str, nbytes: int) -> None:
        n, rng = nbytes // 2, np.random.default_rng(0)
        self.path, self._ranks = path, ranks
        # bf16 values of at most 2^-6, so that thousands of sums stay finite.
        self._bits = [(rng.uniform(-1, 1, n) / 64).astype(np.float32).view(np.uint32) >> 16 for _ in ranks.devices]
        self.partial = [dev.array(b.astype(np.uint16)) for dev, b in zip(ranks.devices, self._bits, strict=True)]
        self.h = [dev.zeros((n,), F32) for dev in ranks.devices]
        self.out = [dev.empty((n,), BF16) for dev in ranks.devices]
        self.g = [dev.array(np.full(n, 0x3F80, np.uint16)) for dev in ranks.devices]
        name = path.split()[0]
        self.reducers: list[Reducer] = create_reducers(ranks.devices, path=name, elements=n, limit_ns=LIMIT_NS)
        if path == "lamport fused":
            connect(ranks.devices, "allreduce_norm", ["allreduce_norm_bf16"])
        ranks.wait()

    def call(self, rank: int, pdl: bool) -> None:
        reducer, h, partial = self.reducers[rank], self.h[rank], self.partial[rank]
        if self.path == "lamport fused":
            assert isinstance(reducer, Lamport)
            total, out, inp = (b.view((1, b.shape[0])) for b in (h, self.out[rank], partial))
            reducer.add_and_norm(total, out, total, inp, self.g[rank], EPS, pdl=pdl)
        elif self.path == "lamport bare":
            assert isinstance(reducer, Lamport)
            allreduce_lamport(reducer.end, self.out[rank], partial, pdl=pdl)
        else:
            reducer.add(h, partial, pdl=pdl)

    def check(self) -> None:
        """One call from zero gives the sum, on every rank. Raises QwenRawError otherwise."""
        for h in self.h:
            h.fill(0)
        for rank in range(len(self.h)):
            self.call(rank, False)
        want = np.zeros(self.h[0].shape, np.float32)
        for bits in self._bits:
            want += (bits << 16).astype(np.uint32).view(np.float32)
        tolerance = 2.0**-8 * np.abs(want) if self.path == "twoshot" else 0.0
        if self.path == "lamport bare":
            got = [bf16_to_f32(out.download()) for out in self.out]
            tolerance = 2.0**-8 * np.abs(want)
        else:
            got = [h.download() for h in self.h]
        for rank, sums in enumerate(got):
            if (np.abs(sums - want) > tolerance).any():
                raise QwenRawError(f"{self.path}: rank {rank}'s sum is wrong")

    def measure(self, calls: int, repeats: int) -> list[Figure]:
        nbytes = 2 * self.h[0].shape[0]
        self.check()
        if self.path == "host":
            samples = []
            for _ in range(repeats):
                begin = time.perf_counter()
                for _ in range(EAGER_CALLS):
                    for rank in range(len(self.h)):
                        self.call(rank, False)
                samples.append((time.perf_counter() - begin) * 1e6 / EAGER_CALLS)
            return [Figure.of(self.path, nbytes, None, samples)]
        figures = []
        for pdl in (True, False):
            graphs = self._ranks.capture(self.call, calls, pdl=pdl)
            samples = [ms * 1e3 / calls for ms in self._ranks.time(graphs, repeats)]
            figures.append(Figure.of(self.path, nbytes, pdl, samples))
            for graph in graphs:
                graph.close()
        return figures


def measured(path: str, nbytes: int) -> bool:
    """Whether the path is meant for messages of this size."""
    most = {"lamport": ONE_SHOT_MOST, "lamport bare": ONE_SHOT_MOST, "flag": ONE_SHOT_MOST, "lamport fused": FUSED_MOST}
    return nbytes <= most.get(path, nbytes)


def nccl(devices: Sequence[int], sizes: Sequence[int], calls: int, repeats: int) -> list[Figure]:
    """NCCL's figures, from a process of its own (bench/peers/nccl.py); none, with the reason, where it does not run."""
    request = ["--devices", ",".join(map(str, devices)), "--calls", str(calls), "--repeats", str(repeats)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.peers.nccl", *request, "--bytes", *map(str, sizes)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print("nccl           no answer within 60 s")
        return []
    if done.returncode:
        print(f"nccl           none: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        return []
    return [Figure.of(r["path"], r["bytes"], None, r["us"]) for r in map(json.loads, done.stdout.splitlines())]


def main() -> int:
    parser = Parser("python -m bench.allreduce", description="all-reduce latency by path and size")
    parser.add_argument("--devices", type=ordinals, default=[0, 1], help="the GPU of each rank, as 0,1")
    parser.add_argument("--bytes", nargs="+", type=packs, default=list(BYTES))
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS)
    parser.add_argument("--calls", type=positive, default=500, help="in a graph")
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--no-nccl", action="store_true")
    result_arguments(parser, "allreduce.json")
    a = parser.parse_args()
    if not 2 <= len(a.devices) <= MAX_RANKS:
        raise UsageError(f"{len(a.devices)} devices: 2 to {MAX_RANKS} ranks sum, as in --devices 0,1")
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ranks = Ranks([stack.enter_context(CudaDevice(n)) for n in a.devices])
        env = environment(ranks.devices[0], a.commit) | {"devices": a.devices}

        def tell(line: str, row: dict[str, Any]) -> None:
            """A figure: printed, and in the JSON, should the run be cut off."""
            print(line, flush=True)
            rows.append(row)
            save("allreduce", env, rows, a.output)

        for nbytes in a.bytes:
            for path in a.paths:
                if measured(path, nbytes):
                    for figure in Message(ranks, path, nbytes).measure(a.calls, a.repeats):
                        tell(figure.line(), asdict(figure))
        for nbytes in (7 << 10, 16 << 10):
            timed = measure_token(ranks.devices, nbytes // 2)
            if timed is not None:
                tell(
                    timed.line(), {"kind": "with product", "bytes": nbytes, "width": timed.width, "us": dict(timed.us)}
                )
        for figure in [] if a.no_nccl else nccl(a.devices, a.bytes, a.calls, a.repeats):
            tell(figure.line(), asdict(figure))
        for path in a.paths:
            if path in STAMPED:
                parts = parts_of(Message(ranks, path, 16 << 10), ranks, a.calls)
                tell(parts.line(), asdict(parts))
    return 0


if __name__ == "__main__":
    command(main)
