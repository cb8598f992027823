"""Attention's cases for test_kernels.py: both kernels, head sizes and cache formats."""

from __future__ import annotations

from typing import Any

import numpy as np
from conformance.kernel_cases import Case, Outputs, exact, rounded
from conformance.machines import Array, Machine, Output
from kernel_reference import bf16_input, fp8_cache

from qwen_raw.device import BF16, Buffer
from qwen_raw.kernels.attn_decode import MIN_SPLIT, Split, Workspace, attn_decode, attn_decode_each
from qwen_raw.kernels.attn_prefill import attn_prefill
from qwen_raw.kernels.kv_widen import kv_widen

SPLIT = Split(1, 1, 8, 2, 6)  # a cluster of two blocks, and two by themselves


def attended(out: Buffer, rows: list[tuple[Array, Array, Array]]) -> Output:
    """An attention's result; `rows`: the (q, k, v) of each row of `out`."""
    bits = out.download()
    return rounded(bits, np.reshape(row_slack(rows), (*bits.shape[:-1], 1)), share=0.1)


def row_slack(rows: list[tuple[Array, Array, Array]]) -> Array:
    """What each row may differ by before it is rounded.

    Scores and exponentials differ in their last bits, so that a probability may round to the next bf16, 2^-8 of the
    largest key's share times its value away: seldom, but then in the whole row.
    """
    slack = []
    for q, k, v in rows:
        scores = k @ q / np.sqrt(q.size)
        slack.append(2.0**-8 * np.abs(v).max() / np.exp(scores - scores.max()).sum())
    return np.array(slack)


def caches(dev: Any, rng: np.random.Generator, cache: str, KV: int, max_len: int, HD: int) -> tuple[Any, ...]:
    """([k, v], {"fine": …} of an e4m3 cache, their values)."""
    if cache == "e4m3":
        k, v, fine, K, V = fp8_cache(rng, KV, max_len, HD, max_len)
        return [dev.array(k), dev.array(v)], {"fine": dev.array(fine)}, K, V
    (k, K), (v, V) = (bf16_input(rng, KV, max_len, HD) for _ in range(2))
    return [dev.array(k), dev.array(v)], {}, K, V


def decode(HD: int, T: int, cache: str, each: bool = False) -> Case:
    """T tokens of which each sees those before it; `each`: by itself, in its own blocks."""

    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, H, KV, max_len = machine.dev, 7, 1, 3 * MIN_SPLIT
        q, Q = bf16_input(rng, T, H, HD)
        kv, fine, K, V = caches(dev, rng, cache, KV, max_len, HD)
        buffers, sizes = [dev.array(q), *kv], {"each": T} if each else {"T": T}
        ws = Workspace.create(dev, H, KV, HD, max_len, split=SPLIT, **sizes)
        attend = attn_decode_each if each else attn_decode
        results = {}
        for n in (T, 100, max_len - 3):  # keys; the workspace goes on
            out = dev.zeros((T, H, HD), BF16)
            attend(dev, out, *buffers, dev.array(np.array([n - T], np.int32)), ws, **fine)
            seen = [n - T + t + 1 for t in range(T)]
            rows = [(Q[t, h], K[0, : seen[t]], V[0, : seen[t]]) for t in range(T) for h in range(H)]
            results[f"{n} keys"] = attended(out, rows)
        return results | {"arrivals": exact(ws.arrivals.download())}

    kind = "each" if each else "n1" if T == 1 else "n2"
    return Case(f"attn_decode_{cache}_hd{HD}_{kind}", run)


def prefill(HD: int, cache: str) -> Case:
    def run(machine: Machine, rng: np.random.Generator) -> Outputs:
        dev, T, pos0, H, KV, max_len = machine.dev, 67, 30, 4, 2, 104
        q, Q = bf16_input(rng, T, H, HD)
        kv, fine, K, V = caches(dev, rng, cache, KV, max_len, HD)
        out = dev.zeros((T, H, HD), BF16)
        attn_prefill(dev, out, dev.array(q), *kv, dev.array(np.array([pos0, T], np.int32)), **fine)
        rows = [(Q[t, h], K[h // 2, : pos0 + t + 1], V[h // 2, : pos0 + t + 1]) for t in range(T) for h in range(H)]
        return {"out": attended(out, rows)}

    return Case(f"attn_prefill_{cache}_hd{HD}", run)


def widen(machine: Machine, rng: np.random.Generator) -> Outputs:
    dev, KV, max_len, HD = machine.dev, 2, 104, 64
    kv, fine, _, _ = caches(dev, rng, "e4m3", KV, max_len, HD)
    out = [dev.zeros((KV, max_len, HD), BF16) for _ in range(2)]
    kv_widen(dev, *out, *kv, dev.array(np.array([30, 67], np.int32)), **fine)  # type: ignore[arg-type]
    return {name: exact(buffer.download()) for name, buffer in zip("kv", out, strict=True)}


ATTENTION = [
    Case("kv_widen_e4m3", widen),
    *(decode(HD, T, cache) for HD in (64, 128) for T in (1, 3) for cache in ("bf16", "e4m3")),
    *(decode(HD, 3, cache, each=True) for HD in (64, 128) for cache in ("bf16", "e4m3")),
    *(prefill(HD, cache) for HD in (64, 128) for cache in ("bf16", "e4m3")),
]
