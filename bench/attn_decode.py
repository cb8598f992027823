"""Decode attention alone: µs, GB/s of keys and values and share of the read ceiling, at each length.

    python -m bench.attn_decode [--model 7b …] [--tp 1 …] [--context N …] [--tokens N …] [--kv-cache-dtype bf16 fp8]
                                [--cluster N …] [--keys N …]

LAUNCHES dependent launches in a graph, each on keys and values of its own and on the output of the one before as its
queries; what the L2 holds is driven out before each replay. A long context has fewer copies, 512 MiB at least.
Where FlashInfer was measured on such a GPU, in another run, its figure is quoted beside.
`--cluster` and `--keys` try other splits than the launcher's: blocks a cluster, and keys a block before another
cluster joins.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import numpy as np

from bench.common import command, environment, quoted, read_ceiling, result_arguments, save, time_ms
from loaders.synthetic import SIZES
from qwen_raw.cli.arguments import Parser, positive
from qwen_raw.config import FINE
from qwen_raw.device import BF16, E4M3, U32, Buffer
from qwen_raw.driver.device import CudaDevice
from qwen_raw.kernels.attn_decode import (
    FULL_SPLIT,
    MAX_CLUSTER,
    MIN_SPLIT,
    Split,
    Workspace,
    attn_decode,
    block_rows,
    candidates,
    choose_split,
)
from qwen_raw.kernels.bandwidth import read_all
from qwen_raw.kernels.kv_cache import COARSE, FINE_PAIRS, fine_bytes
from qwen_raw.kernels.synthetic import synthetic_bf16, synthetic_e4m3

LAUNCHES = 64
CLUSTERS = [1 << log for log in range(MAX_CLUSTER.bit_length())]
ROTATE_BYTES = 512 << 20
FLUSH_BYTES = 256 << 20
# µs of FlashInfer 0.6.13 on an H200: paged decode (page 16), batch 1, bf16, tensor-core path, in a graph, rotated KV.
# By (query heads, KV heads), then context.
FLASHINFER = {
    (28, 4): {128: 8.85, 1024: 10.21, 4096: 11.99, 32768: 28.09},
    (64, 8): {128: 8.70, 1024: 10.71, 4096: 13.76, 32768: 44.77},
    (32, 4): {128: 8.77, 1024: 10.25, 4096: 12.04, 32768: 28.10},
    (16, 2): {128: 6.49, 1024: 8.20, 4096: 11.47, 32768: 19.79},
    (8, 1): {128: 6.60, 1024: 7.79, 4096: 8.67, 32768: 17.64},
}


class Case:
    """Heads of one rank at one length: buffers, and a graph of LAUNCHES for a split."""

    def __init__(self, dev: CudaDevice, H: int, KV: int, HD: int, context: int, tokens: int, kv: str) -> None:
        self.dev, self.heads, self.context, self.tokens, self.kv = dev, (H, KV, HD), context, tokens, kv
        self.nbytes = KV * context * (2 * HD * 2 if kv == "bf16" else 2 * HD + FINE)
        copies = min(LAUNCHES, max(2, -(-ROTATE_BYTES // self.nbytes)))
        whole = dev.empty((copies, 2, KV, context, HD), BF16 if kv == "bf16" else E4M3)
        self.fine: list[Buffer | None] = [None] * copies
        if kv == "bf16":
            synthetic_bf16(dev, whole, 1, 0, 1.0)
        else:
            synthetic_e4m3(dev, whole, 1, 0)
            self.fine = [self._second_parts(dev, KV, HD, context, i) for i in range(copies)]
        part = KV * context * HD
        views = [whole.view((KV, context, HD), i * part) for i in range(2 * copies)]
        self.k, self.v = views[0::2], views[1::2]
        self.q = [dev.empty((tokens, H, HD), BF16) for _ in range(2)]
        synthetic_bf16(dev, self.q[0], 2, 0, 3.0)
        self.pos = dev.array(np.array([context - tokens], np.int32))
        self.junk, self.sink = dev.empty((FLUSH_BYTES // 2,), BF16), dev.zeros((1,), U32)
        synthetic_bf16(dev, self.junk, 3, 0, 1.0)

    @staticmethod
    def _second_parts(dev: CudaDevice, KV: int, HD: int, context: int, seed: int) -> Buffer:
        """Those of the first pairs of each head."""
        buffer, codes = dev.empty((fine_bytes(KV, context, HD),), E4M3), KV * context * FINE
        synthetic_e4m3(dev, buffer.view((codes,)), 2, seed)
        slots = np.full((KV, HD // 2), COARSE, np.uint8)
        slots[:, :FINE_PAIRS] = np.arange(FINE_PAIRS)
        tables = np.concatenate([slots.reshape(-1), np.tile(np.arange(FINE_PAIRS, dtype=np.uint8), KV)])
        buffer.view(tables.shape, codes).upload(tables)
        return buffer

    def us(self, split: Split) -> float:
        """Microseconds a launch."""
        dev, (H, KV, HD) = self.dev, self.heads
        ws = Workspace.create(dev, H, KV, HD, self.context, T=self.tokens, split=split)

        def launch(i: int) -> None:
            k, v, fine = (each[i % len(self.k)] for each in (self.k, self.v, self.fine))
            assert k is not None and v is not None
            attn_decode(dev, self.q[(i + 1) % 2], self.q[i % 2], k, v, self.pos, ws, fine=fine, pdl=True)

        launch(0)
        with dev.capture() as capture:
            for i in range(LAUNCHES):
                launch(i)

        def flush() -> None:
            read_all(dev, self.junk, self.sink)

        timing = time_ms(dev, capture.graph.launch, repeats=9, warmup=2, before=flush)
        capture.graph.close()
        return timing.median * 1e3 / LAUNCHES

    def splits(self, clusters: list[int], keys: list[int]) -> list[Split]:
        """The launcher's, or those asked for."""
        H, KV, HD = self.heads
        R = block_rows(self.tokens, H // KV)
        shape = (self.dev, R, HD, KV * -(-self.tokens * (H // KV) // R), self.context)
        if not clusters and not keys:
            return [choose_split(*shape)]
        found = [s for full in keys or [FULL_SPLIT] for s in candidates(*shape, full)]
        return [s for s in found if not clusters or s.cluster in clusters]


def measure(case: Case, label: dict[str, Any], splits: list[Split], ceiling: float) -> list[dict[str, Any]]:
    """One row a split."""
    (H, KV, HD), rows = case.heads, []
    alike = HD == 128 and case.tokens == 1 and case.kv == "bf16"
    theirs = FLASHINFER.get((H, KV), {}).get(case.context) if alike else None
    for s in splits:
        us = case.us(s)
        rate = case.nbytes / (us * 1e-6)
        row = label | {"H": H, "KV": KV, "HD": HD, "kv": case.kv, "context": case.context, "tokens": case.tokens}
        row |= {"cluster": s.cluster, "clusters": s.clusters, "singles": s.singles}
        row |= {"keys": 1 << (s.log_keys - s.log_cluster)}
        row |= {"us": us, "gb_s": rate / 1e9, "of_read": rate / ceiling} | quoted("FlashInfer 0.6.13", us=theirs)
        rows.append(row)
        beside = f"   FlashInfer (quoted) {theirs:5.2f} µs, {theirs / us:4.2f} times" if theirs else ""
        print(
            f"{label['model']:5} tp{label['tp']} {H:2}/{KV} hd{HD:<3} {case.kv} context {case.context:5} "
            f"tokens {case.tokens} "
            f"{s.clusters:3}×{s.cluster}+{s.singles} blocks {row['keys']:4} keys {us:7.2f} µs "
            f"{rate / 1e9:6.0f} GB/s {rate / ceiling:6.3f}{beside}",
            flush=True,
        )
    return rows


def block_keys(text: str) -> int:
    """An argument: keys a block, a power of two of at least a block's step."""
    value = positive(text)
    if value < MIN_SPLIT or value & (value - 1):
        raise argparse.ArgumentTypeError(f"{text} keys: a power of two, at least {MIN_SPLIT}")
    return value


def main() -> int:
    parser = Parser("python -m bench.attn_decode", description="decode attention")
    parser.add_argument("--model", nargs="+", default=["7b", "72b"], choices=list(SIZES))
    parser.add_argument("--tp", nargs="+", type=positive, default=[1])
    parser.add_argument("--context", nargs="+", type=positive, default=[128, 1024, 4096, 32768], help="keys")
    parser.add_argument("--tokens", nargs="+", type=positive, default=[1], help="query rows a head, the newest keys'")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["bf16"], choices=["bf16", "fp8"])
    parser.add_argument("--cluster", nargs="+", type=int, choices=CLUSTERS, metavar="N", default=[], help="blocks")
    parser.add_argument("--keys", nargs="+", type=block_keys, default=[], help=f"powers of two from {MIN_SPLIT} on")
    result_arguments(parser, "attn_decode.json")
    a = parser.parse_args()
    dev = CudaDevice(0)
    ceiling = read_ceiling(dev)
    print(f"# {dev.name}, {dev.driver}; reads reach {ceiling / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    seen, env = set(), environment(dev, a.commit)
    for size in a.model:
        for tp in a.tp:
            c = SIZES[size]
            heads = (c.H // tp, max(1, c.KV // tp), c.HD)
            if c.H % tp or heads[0] % heads[1] or heads in seen:
                continue
            seen.add(heads)
            for context, tokens, kv in product(a.context, a.tokens, a.kv_cache_dtype):
                case = Case(dev, *heads, context, tokens, kv)
                rows += measure(case, {"model": size, "tp": tp}, case.splits(a.cluster, a.keys), ceiling)
                save("attn_decode", env, rows, a.output)  # after each case: a run may be cut off
    dev.close()
    return 0


if __name__ == "__main__":
    command(main)
