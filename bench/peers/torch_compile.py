"""Decode's products as PyTorch writes them, compiled by torch.compile, for bench/gemv.py: a JSON object each on stdout.

    python -m bench.peers.torch_compile --shapes '[["qkv", 4608, 3584], …]' --dtype bf16 [--launches 64] [--repeats 7]

The same work as ours: RMSNorm before qkv, gate_up and head, bias after qkv, SwiGLU after gate_up, the residual after o
and down; no RoPE and no cache. fp8 is weight-only, e4m3 with a scale a row. A product runs in a CUDA graph over enough
copies of its weights to leave the L2 behind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from bench.peers.replay import replay_us

ROTATE_BYTES = 512 << 20
EPS = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description="decode's products by torch.compile")
    parser.add_argument("--shapes", type=json.loads, required=True, help="JSON: [[op, N, K], …]")
    parser.add_argument("--dtype", choices=["bf16", "fp8"], required=True)
    parser.add_argument("--launches", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    a = parser.parse_args()
    import torch

    for op, N, K in a.shapes:
        torch.compiler.reset()
        us = measure(torch, op, N, K, a.dtype, a.launches, a.repeats)
        print(json.dumps({"op": op, "N": N, "K": K, "torch": torch.__version__, "us": us}), flush=True)


def product(torch: Any, op: str) -> Callable[..., Any]:
    """f(h fp32 [1, K], g, w [N, K], scale [N] or None, extra) for one of bench/gemv.py's operations."""
    F = torch.nn.functional

    def weights(w: Any, scale: Any) -> Any:
        return w if scale is None else w.to(torch.bfloat16) * scale[:, None]

    def normed(h: Any, g: Any) -> Any:
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * g).to(torch.bfloat16)

    def qkv(h: Any, g: Any, w: Any, scale: Any, bias: Any) -> Any:
        return F.linear(normed(h, g), weights(w, scale), bias)

    def gate_up(h: Any, g: Any, w: Any, scale: Any, extra: Any) -> Any:
        gate, up = F.linear(normed(h, g), weights(w, scale)).chunk(2, -1)
        return F.silu(gate) * up

    def head(h: Any, g: Any, w: Any, scale: Any, extra: Any) -> Any:
        return F.linear(normed(h, g), weights(w, scale)).float()

    def add(h: Any, g: Any, w: Any, scale: Any, residual: Any) -> Any:
        return residual + F.linear(h.to(torch.bfloat16), weights(w, scale)).float()

    return {"qkv": qkv, "gate_up": gate_up, "head": head, "o": add, "down": add}[op]


def measure(torch: Any, op: str, N: int, K: int, dtype: str, launches: int, repeats: int) -> float:
    """Microseconds a product: median of `repeats` replays of a graph of `launches`."""
    item = 1 if dtype == "fp8" else 2
    copies = max(2, -(-ROTATE_BYTES // (N * K * item)))
    gpu: dict[str, Any] = {"device": "cuda"}
    ws = [(0.02 * torch.randn((N, K), **gpu)).to(torch.bfloat16) for _ in range(copies)]
    scale = None
    if dtype == "fp8":
        ws, scale = [(50 * w).to(torch.float8_e4m3fn) for w in ws], torch.full((N,), 0.02, dtype=torch.bfloat16, **gpu)
    h, g = torch.randn((1, K), **gpu), torch.rand((K,), **gpu)
    extra = torch.randn((1, N), **gpu) if op in ("o", "down") else torch.randn((N,), dtype=torch.bfloat16, **gpu)
    f = torch.compile(product(torch, op), fullgraph=True, mode="max-autotune-no-cudagraphs")
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        for w in ws[:2]:
            f(h, g, w, scale, extra)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for i in range(launches):
            f(h, g, ws[i % copies], scale, extra)
    return replay_us(torch, graph, launches, repeats)


if __name__ == "__main__":
    main()
