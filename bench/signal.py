"""Put-with-signal: µs a hand-over, by form, shape and payload size; and a soak in which every payload is compared.

And how much work a stream takes while it is held, which bounds how far one end may be queued ahead of the other.

    python -m bench.signal [--devices 0,0] [--bytes 16 8192 …] [--rounds 150] [--soak 1000000] [--limit-s 300]

Results are written after every figure: to signal.json, or to signal_2gpu.json between two GPUs. After --limit-s the
process ends, whatever it waits for.

A round is a ping-pong between two devices, there and back, both ends' rounds captured in a graph each; a figure is half
a round's time: one hand-over, from the put's launch in one stream to the end of the wait's kernel in the other.
The median over replays, the slower device's. `--devices 0,0`: two streams of one GPU.
"""

from __future__ import annotations

import faulthandler
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from bench.allreduce import Ranks
from bench.common import command, environment, packs, result_arguments, save
from qwen_raw.cli.arguments import Parser, natural, ordinals, positive
from qwen_raw.comm.signal import Form, Ring, Shape, SignalChannel
from qwen_raw.device import U32
from qwen_raw.driver.device import CudaDevice
from qwen_raw.driver.stream import Wait
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.kernels.signal import STEM

BYTES = (16, 8 << 10, 64 << 10, 1 << 20, 16 << 20)


class Way(NamedTuple):
    """How a hand-over is made."""

    form: Form
    ring: Ring
    shape: Shape
    pdl: bool = (
        False  # put and wait as dependent launches: where the two do not share a GPU, whose blocks wait for both
    )

    def __str__(self) -> str:
        return f"{self.form} {self.ring} {self.shape}{' dependent' if self.pdl else ''}"


WAYS = (
    Way("kernel", "release", "push"),
    Way("kernel", "release", "pull"),
    Way("memop", "release", "push"),
    Way("memop", "node", "push"),
    Way("memop", "node", "pull"),
)
SOAK_GRAPHS = {"kernel": 768, "memop": 240}  # hand-overs a graph, by form: whole rotations, and what a stream holds
DEPENDENT = Way("kernel", "release", "push", pdl=True)
SOAKS = (  # and by what the hand-overs are divided
    (Way("kernel", "release", "push"), 1),
    (Way("memop", "release", "push"), 4),
    (Way("memop", "node", "push"), 4),
)
LARGE = 1 << 20  # bytes from which on a graph has fewer rounds
LIMIT_NS = 5_000_000_000
HELD_TRIED, HELD_S = 4096, 0.5


@dataclass(frozen=True)
class Figure:
    """µs a hand-over."""

    form: str
    ring: str
    shape: str
    pdl: bool
    bytes: int
    us: float
    us_worst: float  # of the replays
    gb_s: float  # payload over time

    def line(self, way: Way) -> str:
        speed = f"worst replay {self.us_worst:8.2f}  {self.gb_s:6.1f} GB/s"
        return f"{way!s:32} {self.bytes:8} B  {self.us:8.2f} µs  {speed}"


def measure(ranks: Ranks, way: Way, nbytes: int, rounds: int, repeats: int) -> Figure:
    """Ping-pong. The payload that comes back is the one that was sent, or QwenRawError."""
    there, back = (
        SignalChannel(a, b, nbytes, form=way.form, ring=way.ring, shape=way.shape, limit_ns=LIMIT_NS)
        for a, b in (ranks.devices, ranks.devices[::-1])
    )
    words = np.random.default_rng(0).integers(0, 2**32, nbytes // 4, dtype=np.uint32)
    buffers = [ranks.devices[0].array(words), ranks.devices[1].zeros(words.shape, U32)]
    calls = max(there.slots, rounds // (1 + nbytes // LARGE) // there.slots * there.slots)

    def round_of(rank: int, _: bool) -> None:
        if rank == 0:
            there.put(buffers[0], pdl=way.pdl)
            back.wait(buffers[0], pdl=way.pdl)
        else:
            there.wait(buffers[1], pdl=way.pdl)
            back.put(buffers[1], pdl=way.pdl)

    graphs = ranks.capture(round_of, calls, pdl=False)
    samples = [ms * 1e3 / calls / 2 for ms in ranks.time(graphs, repeats)]
    for graph in graphs:
        graph.close()
    if not all(np.array_equal(buffer.download(), words) for buffer in buffers):
        raise QwenRawError(f"{way}: a payload of {nbytes} bytes came back changed")
    us = statistics.median(samples)
    return Figure(way.form, way.ring, way.shape, way.pdl, nbytes, us, max(samples), nbytes / us / 1e3)


def held(dev: CudaDevice) -> dict[str, Any]:
    """How many launches, or stream operations, a stream takes while it is held: the next one waits on the host."""
    kernel, word, gate = dev.kernel(STEM, "signal_ring"), dev.zeros((1,), U32), dev.host_ring(2)
    calls: dict[str, Callable[[], None]] = {
        "launches": lambda: dev.launch(kernel, (1, 1, 1), (1, 1, 1), [np.uint64(word.ptr)]),
        "stream operations": lambda: dev.stream.write_value32(word.ptr, 1),
    }
    row: dict[str, Any] = {"held_at_most": HELD_TRIED}
    for number, (name, call) in enumerate(calls.items(), 1):
        dev.stream.wait_value32(gate.buffer.ptr, number, Wait.GEQ)
        opens = threading.Timer(HELD_S, gate.words.__setitem__, (0, number))
        opens.start()
        taken, begin = 0, time.perf_counter()
        while taken < HELD_TRIED and time.perf_counter() - begin < HELD_S:
            call()
            taken += 1
        opens.join()
        dev.synchronize()
        row[name] = taken - 1 if taken < HELD_TRIED else taken  # the last one waited
    print(
        f"a held stream takes {row['launches']} launches, or {row['stream operations']} stream operations", flush=True
    )
    return row


def soak(ranks: Ranks, way: Way, handovers: int) -> dict[str, Any]:
    """At least so many hand-overs of distinct payloads, all compared. Raises QwenRawError if one is torn or stale."""
    producer, consumer = ranks.devices
    channel = SignalChannel(producer, consumer, 64, form=way.form, ring=way.ring, shape=way.shape, limit_ns=LIMIT_NS)
    count = SOAK_GRAPHS[way.form]
    source, sink = (dev.zeros((count, 16), U32) for dev in ranks.devices)
    graphs = []
    for dev, call, buffer in ((ranks.devices[0], channel.put, source), (ranks.devices[1], channel.wait, sink)):
        with dev.capture() as capture:
            for row in range(count):
                call(buffer.view((16,), 16 * row), pdl=way.pdl)
        graphs.append(capture.graph)
    rng, begin, done = np.random.default_rng(1), time.perf_counter(), 0
    while done < handovers:
        words = rng.integers(0, 2**32, (count, 16), dtype=np.uint32)
        words[:, 0] = np.arange(done, done + count)
        source.upload(words)
        for graph in graphs:
            graph.launch()
        if not np.array_equal(sink.download(), words):
            raise QwenRawError(f"{way}: a payload within {count} of hand-over {done} is wrong")
        done += count
    for graph in graphs:
        graph.close()
    seconds = time.perf_counter() - begin
    print(f"soak {way}: {done} hand-overs, every payload right, {seconds:.1f} s", flush=True)
    return {
        "soak": done,
        "form": way.form,
        "ring": way.ring,
        "shape": way.shape,
        "pdl": way.pdl,
        "wrong": 0,
        "seconds": seconds,
    }


def main() -> int:
    parser = Parser("python -m bench.signal", description="put-with-signal: latency by form, shape and size")
    parser.add_argument("--devices", type=ordinals, default=[0, 0], help="producer's and consumer's GPU, as 0,1")
    parser.add_argument("--bytes", nargs="*", type=packs, default=list(BYTES), help="of a payload; none: only soak")
    parser.add_argument("--rounds", type=positive, default=150, help="in a graph")
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--soak", type=natural, default=0, metavar="N", help="then N hand-overs whose payloads differ")
    parser.add_argument("--limit-s", type=positive, default=300, help="seconds after which the process ends")
    result_arguments(parser, "signal.json, signal_2gpu.json")
    a = parser.parse_args()
    if len(a.devices) != 2:
        raise UsageError(f"{len(a.devices)} devices: a channel has two ends, as in --devices 0,0")
    faulthandler.dump_traceback_later(a.limit_s, exit=True)  # a stream that waits for a word has no other end
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ranks = Ranks([stack.enter_context(CudaDevice(n)) for n in a.devices])
        env = environment(ranks.devices[0], a.commit) | {"devices": a.devices}
        variant = "2gpu" if len(set(a.devices)) > 1 else ""

        def done(row: dict[str, Any]) -> None:
            rows.append(row)
            save("signal", env, rows, a.output, variant)

        def latency(way: Way, nbytes: int) -> None:
            figure = measure(ranks, way, nbytes, a.rounds, a.repeats)
            print(figure.line(way), flush=True)
            done(asdict(figure))

        for nbytes in a.bytes:
            for way in WAYS:
                latency(way, nbytes)
        done(held(ranks.devices[0]))
        for way, share in SOAKS if a.soak else ():
            done(soak(ranks, way, max(1, a.soak // share)))
        if variant:  # dependent launches: not on a GPU that both ends share
            for nbytes in a.bytes:
                latency(DEPENDENT, nbytes)
            if a.soak:
                done(soak(ranks, DEPENDENT, a.soak))
    return 0


if __name__ == "__main__":
    command(main)
