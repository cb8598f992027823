"""What a call of an all-reduce pays for what: today's kernels with clock stamps put between their steps.

A stamped kernel is the project's own but for the edits below, which must fit exactly once; thread 0 of every block
adds the cycles of each step to a counter. What is left of a call's time lies between two launches.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_raw import paths
from qwen_raw.device import U64, Arg, Buffer, Dim
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.peers import VARIANTS, PollLimit, variant

if TYPE_CHECKING:
    from bench.allreduce import Message, Ranks

COUNTERS = 8  # one a step, the last one for the blocks that added to them
_BEGIN = re.compile(r"griddep_wait\w*\(.*\);\n")
_STAMPS = """
struct Stamps {
  long long at[9];
  DEVICE void stamp(int k) { if (threadIdx.x == 0) at[k] = clock64(); }
  DEVICE void add(uint64_t counters, int steps) {
    if (threadIdx.x == 0)
      for (int k = 0; k < 8; k++) {
        const unsigned long long more = k == 7 ? 1 : k < steps ? at[k + 1] - at[k] : 0;
        if (more) atomicAdd(reinterpret_cast<unsigned long long*>(counters) + k, more);
      }
  }
};
extern "C" __global__ void spin_cycles(long long n) {
  const long long begin = clock64();
  while (clock64() - begin < n) {}
}
"""
# path → (kernel file, entry point, [(text, step that ends right before it)], what the rest is, where the kernel ends)
_BARRIER = "  __syncthreads();\n  next_turn"
_PLANS: dict[str, tuple[str, str, list[tuple[str, str]], str, str]] = {
    "lamport": (
        "allreduce_lamport",
        "allreduce_lamport_add_bf16",
        [(_BARRIER, "push"), ("  if (item.from) item.finish", "turn and re-arm")],
        "wait and reduce",
        "  if (item.from) item.finish(end, turn, first, watch);\n",
    ),
    "lamport fused": (
        "allreduce_norm",
        "allreduce_norm_bf16",
        [
            (_BARRIER, "push"),
            ("  uint4 v[PACKS]", "turn and re-arm"),
            ("  const float row = ", "wait and reduce"),
        ],
        "norm",
        "[base + begin + thread + k * stride] = pack_bf16x8(f[k]);\n  }\n",
    ),
    "flag": (
        "allreduce_flag",
        "allreduce_flag_add_bf16",
        [("  block_barrier(end, epoch, watch);\n", "push"), ("  write_epoch(end, epoch);\n", "wait")],
        "reduce",
        "    out.store(sum);\n  }\n",
    ),
    "twoshot": (
        "allreduce_twoshot",
        "allreduce_twoshot_add_bf16",
        [
            ("  block_barrier(end, epoch - 1, watch);\n", "copy"),
            ("  constexpr int READS", "wait"),
            ("  block_barrier(end, epoch, watch);\n", "reduce and spread"),
            ("  write_epoch(end, epoch);\n", "second wait"),
        ],
        "gather",
        "      outs[k].store(sum);\n    }\n  }\n",
    ),
}
STAMPED = tuple(_PLANS)


@dataclass(frozen=True)
class Parts:
    """µs of one call's steps; `launch` is what lies between two calls."""

    path: str
    bytes: int
    us: float  # of the stamped kernel
    launch: float
    steps: dict[str, float]
    mhz: float
    kind: str = field(default="parts")

    def line(self) -> str:
        steps = ", ".join(f"{name} {us:.3f}" for name, us in self.steps.items())
        return f"{self.path:14} {self.bytes:9} B  of {self.us:.3f} µs: launch {self.launch:.3f}, {steps}"


class Staged:
    """A device whose kernels come from another source root."""

    def __init__(self, device: CudaDevice, root: Path) -> None:
        self._device, self._root = device, root

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def kernel(self, stem: str, name: str) -> Any:
        """As the device's, from the root."""
        return self._device.kernel(stem, name, self._root)

    def launch(self, kernel: Any, grid: Dim, block: Dim, args: Sequence[Arg], **options: Any) -> None:
        """As the device's."""
        self._device.launch(kernel, grid, block, args, **options)


@dataclass(frozen=True)
class Counters:
    """In the place of a fault record's ring: its two words, and the counters behind them."""

    buffer: Buffer  # u64 [2 + COUNTERS]
    words: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(2, np.uint64))


def stamped(path: str, world: int) -> str:
    """The kernel file of `path` with stamps, for `world` ranks. Raises QwenRawError if an edit does not fit once."""
    stem, _, steps, _, end = _PLANS[path]
    text = (paths.cuda_src() / f"{stem}.cu").read_text()
    begins = _BEGIN.findall(text)
    if len(begins) != 1:
        raise QwenRawError(f"stamps of {path}: {len(begins)} waits for the previous kernel, not one")
    edits = [(begins[0], f"{begins[0]}  Stamps stamps;\n  stamps.stamp(0);\n")]
    edits += [(at, f"  stamps.stamp({k});\n{at}") for k, (at, _) in enumerate(steps, 1)]
    last = len(steps) + 1
    edits += [(end, f"{end}  stamps.stamp({last});\n  stamps.add(end.limit.fault + 16, {last});\n")]
    others = "|".join(str(most) for most in VARIANTS if most != variant(world))
    text = re.sub(rf"^ALLREDUCE_\w+\(({others})\b.*\n", "", text, flags=re.MULTILINE)  # they need not be compiled
    for old, new in edits:
        if text.count(old) != 1:
            raise QwenRawError(f"stamps of {path}: an edit fits {text.count(old)} times, not once: {old[:60]!r}")
        text = text.replace(old, new)
    head, template, rest = text.partition("\ntemplate <")
    return head + _STAMPS + template + rest


def parts_of(message: Message, ranks: Ranks, calls: int) -> Parts:
    """The steps of `message`'s calls as dependent launches in a graph, rank 0's; its reducers are of no use after."""
    stem, entry, steps, rest, _ = _PLANS[message.path]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shutil.copytree(paths.cuda_src() / "include", root / "include")
        (root / f"{stem}.cu").write_text(stamped(message.path, len(ranks.devices)))
        counters = []
        for rank, reducer in enumerate(message.reducers):
            end: Any = reducer.end  # type: ignore[attr-defined]
            counters.append(Counters(end.dev.zeros((2 + COUNTERS,), U64)))
            limit = PollLimit(end.limit.ns, counters[rank])
            message.reducers[rank] = replace(reducer, end=replace(end, dev=Staged(end.dev, root), limit=limit))  # type: ignore[type-var]
        for staged in ranks.devices:
            staged.kernel(stem, f"{entry}_r{variant(len(ranks.devices))}", root)
        dev = ranks.devices[0]
        spin = dev.kernel(stem, "spin_cycles", root)
        graphs = ranks.capture(message.call, calls, pdl=True)
        for counter in counters:
            counter.buffer.fill(0)
        ranks.wait()
        us = ranks.time(graphs, 1)[0] * 1e3 / calls
        cycles = counters[0].buffer.download()[2:]
    begin, finish = dev.event(), dev.event()
    begin.record(dev.stream)
    dev.launch(spin, (1, 1, 1), (1, 1, 1), [np.int64(20_000_000)])
    finish.record(dev.stream)
    mhz = 20_000_000 / (finish.elapsed_ms(begin) * 1e3)
    names = [name for _, name in steps] + [rest]
    spent = {name: int(n) / (int(cycles[-1]) * mhz) for name, n in zip(names, cycles, strict=False)}
    nbytes = 2 * message.h[0].shape[0]
    return Parts(message.path, nbytes, us, us - sum(spent.values()), spent, mhz)
