"""NCCL's all-reduce through CuPy, chained in a graph a rank, for bench/allreduce.py: one JSON object a size on stdout.

    python -m bench.peers.nccl --devices 0,1 --bytes 16384 … [--calls 500] [--repeats 9]

In place, bf16, one process, both ranks' graphs launched together. NVLink multicast is off, as everywhere here.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

os.environ["NCCL_NVLS_ENABLE"] = "0"  # before NCCL starts


def main() -> None:
    parser = argparse.ArgumentParser(description="NCCL's all-reduce")
    parser.add_argument("--devices", required=True)
    parser.add_argument("--bytes", nargs="+", type=int, required=True)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=9)
    a = parser.parse_args()
    import cupy
    from cupy.cuda import nccl

    ordinals = [int(n) for n in a.devices.split(",")]
    comms = nccl.NcclCommunicator.initAll(ordinals)
    streams: list[Any] = []
    for n in ordinals:
        with cupy.cuda.Device(n):
            streams.append(cupy.cuda.Stream(non_blocking=True))
    version = nccl.get_version()
    for nbytes in a.bytes:
        samples = measure(cupy, nccl, comms, streams, ordinals, nbytes, a.calls, a.repeats)
        print(json.dumps({"path": f"nccl {version}", "bytes": nbytes, "us": samples}), flush=True)


def measure(
    cupy: Any, nccl: Any, comms: Any, streams: Any, ordinals: list[int], nbytes: int, calls: int, repeats: int
) -> list[float]:
    """µs a call of each replay: the slowest rank's."""
    buffers = []
    for n in ordinals:
        with cupy.cuda.Device(n):
            buffers.append(cupy.zeros(nbytes // 2, cupy.uint16))
            cupy.cuda.Device(n).synchronize()

    def once() -> None:
        nccl.groupStart()
        for comm, stream, buffer in zip(comms, streams, buffers, strict=True):
            comm.allReduce(buffer.data.ptr, buffer.data.ptr, nbytes // 2, nccl.NCCL_BFLOAT16, nccl.NCCL_SUM, stream.ptr)
        nccl.groupEnd()

    def on_each(action: Any) -> list[Any]:
        results = []
        for n, stream in zip(ordinals, streams, strict=True):
            with cupy.cuda.Device(n):
                results.append(action(stream))
        return results

    once()
    on_each(lambda stream: stream.synchronize())
    on_each(lambda stream: stream.begin_capture())
    for _ in range(calls):
        once()
    graphs = on_each(lambda stream: stream.end_capture())
    samples = []
    for _ in range(repeats + 1):
        events = []
        for n, stream, graph in zip(ordinals, streams, graphs, strict=True):
            with cupy.cuda.Device(n):
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                events.append((begin, end))
        on_each(lambda stream: stream.synchronize())
        samples.append(max(cupy.cuda.get_elapsed_time(*pair) for pair in events) * 1e3 / calls)
    return samples[1:]


if __name__ == "__main__":
    main()
