"""What a sum over ranks waits for in the decode step, path "inline": the way over the link, or ranks that are late.

    python -m bench.skew [--model SPEC[:DTYPE] …] [--tp N] [--devices N,N,…] [--tokens 64] [--repeats 5]

The step runs with kernels that are the project's own but for clock stamps (include/exchange.cuh with the edits below,
which must fit exactly once): thread 0 of every block notes how long its product took and how long it then waited until
its rows were summed. Blocks of the same number on all ranks wait for each other. The last of them to arrive waits for
what it takes to hand over, the others also for it: so of each sum and block the shortest wait is the `hand-over`, and
what the ranks waited beyond that, on average, the `skew`. The skew of the ranks' mean waits is that of whole `ranks`;
the rest is that of `blocks`. A rank that waits less on average is the slower one: what it loses it would lose without
sums too. `spread` is the standard deviation of the blocks' arrivals on one GPU.

The step without its sums is timed on every rank, in turns with the whole step, not stamped; `reduce` as in
bench.decode.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.allreduce_parts import Counters, Staged
from bench.common import SETTLE_S, command, environment, open_gpus, ranks_of, result_arguments, save
from bench.decode import check_models, open_runner, split_spec
from qwen_raw import paths
from qwen_raw.cli.arguments import Parser, ordinals, positive
from qwen_raw.device import U64
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError
from qwen_raw.kernels.peers import PollLimit
from qwen_raw.model.decode import StepOptions
from qwen_raw.model.residual import Inline
from qwen_raw.model.runner import DeviceRunner, Step

DEFAULT = ["random:7b:fp8", "random:7b:bf16"]
MOST_BLOCKS = 1024  # of a product
LIMIT_NS = 2_000_000_000
_KEPT = "  SHARED(Share, kept);"
_NOW = "if (threadIdx.x == 0) stamps[{0}] = clock64(), stamps[{0} + 1] = (long long)(global_timer_ns());\n"
_EDITS = [
    (_KEPT, f"  SHARED(long long[4], stamps);\n{_KEPT}"),
    ("    engine.input();\n", f"    {_NOW.format(0)}    engine.input();\n"),
    ("  fetch_ahead(next);\n", f"  {_NOW.format(2)}  fetch_ahead(next);\n"),
    (
        "scale[rows.begin + i]) : sums.total(i);\n  });\n}\n",
        "scale[rows.begin + i]) : sums.total(i);\n  });\n"
        "  if (threadIdx.x == 0)\n"
        f"    reinterpret_cast<uint4*>(end.limit.fault + 16)[sum * {MOST_BLOCKS} + blockIdx.x] =\n"
        "        make_uint4(uint32_t(stamps[2] - stamps[0]), uint32_t(clock64() - stamps[2]),\n"
        "                   uint32_t(stamps[3] - stamps[1]), uint32_t(stamps[3]));\n}\n",
    ),
]


def stamped() -> str:
    """include/exchange.cuh with stamps. Raises QwenRawError if an edit does not fit once."""
    text = (paths.cuda_src() / "include" / "exchange.cuh").read_text()
    for old, new in _EDITS:
        if text.count(old) != 1:
            raise QwenRawError(f"an edit fits {text.count(old)} times, not once: {old[:60]!r}")
        text = text.replace(old, new)
    return text


class Stamped(Staged):
    """A device whose products that exchange rows are the stamped ones."""

    def kernel(self, stem: str, name: str) -> Any:
        """As the device's, or from the folder."""
        return super().kernel(stem, name) if stem.startswith("gemv_exchange") else self._device.kernel(stem, name)


@contextmanager
def stamped_sources() -> Any:
    """A folder with the project's kernels, exchange.cuh stamped."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "cuda_src"
        shutil.copytree(paths.cuda_src(), root)
        (root / "include" / "exchange.cuh").write_text(stamped())
        yield root


def step_of(runner: DeviceRunner, root: Path) -> tuple[Step, list[Counters]]:
    """A stamped step of the runner, and where each rank's stamps are."""
    ranks, counters = [], []
    for rank in runner.ranks:
        residual = rank.residual
        if not isinstance(residual, Inline):
            raise QwenRawError(f"stamps are made for path inline, not {residual.path}")
        counters.append(Counters(rank.device.zeros((2 + 2 * 2 * runner.config.L * MOST_BLOCKS,), U64)))
        end = replace(
            residual.end,
            dev=Stamped(rank.device, root),  # type: ignore[arg-type]
            limit=PollLimit(LIMIT_NS, counters[-1]),
        )
        layer = rank.weights.layers[0]
        residual.kernels.load([end.dev], [layer.o.K, layer.down.K])
        ranks.append(replace(rank, residual=replace(residual, end=end)))
    return Step.create(ranks), counters


def by_rank_us(devices: Sequence[CudaDevice], runner: DeviceRunner, tokens: int, step: Step | None) -> list[float]:
    """Each rank's time of a step, of `tokens` replays back to back."""
    pairs = [(dev.event(), dev.event()) for dev in devices]
    for dev, (begin, _) in zip(devices, pairs, strict=True):
        begin.record(dev.stream)
    runner.replay(0, tokens, step)
    for dev, (_, end) in zip(devices, pairs, strict=True):
        end.record(dev.stream)
    times = [end.elapsed_ms(begin) * 1e3 / tokens for begin, end in pairs]
    for pair in pairs:
        for event in pair:
            event.close()
    return times


def waits(stamps: np.ndarray[Any, Any]) -> dict[str, Any]:
    """µs, of stamps u32 [replays, ranks, sums, blocks, 4]: cycles of work, of the wait, ns of work, of the arrival."""
    mhz = stamps[..., 0].sum(dtype=np.float64) / stamps[..., 2].sum(dtype=np.float64) * 1e3
    wait = stamps[..., 1] / mhz
    hand_over, mean = wait.min(1).mean(), wait.mean()
    rank_wait = wait.mean(-1)  # of each rank, over its blocks
    ranks = (rank_wait.mean(1) - rank_wait.min(1)).mean()
    arrival = (stamps[..., 3] - stamps[..., :1, 3]).astype(np.int32) / 1e3  # the clock's low words may wrap
    return {
        "mhz": mhz, "work": (stamps[..., 0] / mhz).mean(), "wait": mean, "hand_over": hand_over,
        "skew": mean - hand_over, "ranks": ranks, "blocks": mean - hand_over - ranks,
        "rank_waits": rank_wait.mean((0, 2)).tolist(), "spread": arrival.std(-1).mean(),
    }  # fmt: skip


def measure(devices: Sequence[CudaDevice], spec: str, tokens: int, repeats: int, root: Path) -> list[dict[str, Any]]:
    """A row for each of the two sums of a layer."""
    model, dtype = split_spec(spec)
    runner = open_runner(devices, spec, 2 * tokens + 64, "inline")
    without = runner.capture_step(StepOptions(skip=frozenset({"reduce"})))
    stamped, counters = step_of(runner, root)
    times: dict[str, list[list[float]]] = {"whole": [], "without": [], "stamped": []}
    found: list[np.ndarray[Any, Any]] = []
    until = time.perf_counter() + SETTLE_S
    while len(found) < repeats:
        settled = time.perf_counter() > until
        for name, step in (("whole", None), ("without", without), ("stamped", stamped)):
            us = by_rank_us(devices, runner, tokens, step)
            if settled:
                times[name].append(us)
        if settled:
            words = [counter.buffer.download()[2:].view(np.uint32) for counter in counters]
            found.append(np.stack(words).reshape(len(devices), 2 * runner.config.L, MOST_BLOCKS, 4))
    stamps = np.stack(found)
    median = {name: [statistics.median(rank) for rank in zip(*rows, strict=True)] for name, rows in times.items()}
    reduce_us = (max(median["whole"]) - max(median["without"])) / (2 * runner.config.L)
    rows = []
    for first, product in enumerate(("o", "down")):
        part = stamps[:, :, first::2]
        used = int((part[0, 0, 0, :, 0] > 0).sum())
        rows.append(
            {"model": model, "dtype": dtype, "tp": len(devices), "product": product, "blocks_used": used,
             "us": median, "reduce_us": reduce_us, "replays": times, **waits(part[..., :used, :])}
        )  # fmt: skip
    stamped.close()
    without.close()
    runner.close()
    return rows


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows of a model as people read them."""
    first = rows[0]
    steps = ", ".join(f"{name} {' / '.join(f'{us:.1f}' for us in ranks)}" for name, ranks in first["us"].items())
    head = (
        f"{first['model']} {first['dtype']} tp {first['tp']}: µs a step by rank: {steps}; "
        f"reduce {first['reduce_us']:.3f}"
    )
    return [head] + [
        f"  {r['product']:4} {r['blocks_used']:4} blocks at {r['mhz']:.0f} MHz: work {r['work']:.2f}, "
        f"wait {r['wait']:.2f} = hand-over {r['hand_over']:.2f} + skew {r['skew']:.2f} "
        f"(ranks {r['ranks']:.2f}, blocks {r['blocks']:.2f}), by rank "
        f"{' / '.join(f'{us:.2f}' for us in r['rank_waits'])}; "
        f"spread on a GPU {r['spread']:.2f}"
        for r in rows
    ]


def main() -> int:
    parser = Parser("python -m bench.skew", description="what sums over ranks wait for in the decode step")
    parser.add_argument("--model", action="append", metavar="SPEC[:DTYPE]", help=f"default {' '.join(DEFAULT)}")
    parser.add_argument("--tp", type=positive, help="ranks; default 2, or one for each of --devices")
    parser.add_argument("--devices", type=ordinals, metavar="N,N,…", help="the ranks' GPUs; default 0,1,…")
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=5)
    result_arguments(parser, "skew.json")
    a = parser.parse_args()
    tp = a.tp or (None if a.devices else 2)
    check_models(a.model or DEFAULT, len(ranks_of(tp, a.devices)))
    with open_gpus(tp, a.devices) as devices, stamped_sources() as root:
        rows: list[dict[str, Any]] = []
        env = environment(devices[0], a.commit)
        for spec in a.model or DEFAULT:
            found = measure(devices, spec, a.tokens, a.repeats, root)
            print("\n".join(lines(found)), flush=True)
            rows += found
            save("skew", env, rows, a.output)
    return 0


if __name__ == "__main__":
    command(main)
