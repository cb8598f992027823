"""Causal attention by PyTorch's scaled_dot_product_attention, for bench/attn_prefill.py: a JSON object a shape.

    python -m bench.peers.torch_sdpa --shapes '[[28, 4, 128, 4096], …]' [--repeats 7]

A shape is H, KV, HD, tokens; batch 1, bf16, no earlier keys. Each backend by itself, in a graph, over enough sets of
inputs to leave the L2 behind; q lies as [T, H, HD], keys and values as [KV, T, HD].
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.peers.replay import replay_us

ROTATE_BYTES = 128 << 20
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def main() -> None:
    parser = argparse.ArgumentParser(description="causal attention by PyTorch")
    parser.add_argument("--shapes", type=json.loads, required=True, help="JSON: [[H, KV, HD, tokens], …]")
    parser.add_argument("--repeats", type=int, default=7)
    a = parser.parse_args()
    try:
        import torch
    except ImportError:
        raise SystemExit("# PyTorch is not installed: --no-peers goes without it") from None
    for shape in a.shapes:
        row: dict[str, Any] = {"shape": shape, "torch": torch.__version__}
        for name, backend in BACKENDS.items():
            try:
                row[f"{name}_us"] = measure(torch, backend, *shape, repeats=a.repeats)
            except RuntimeError as error:  # this backend does not take the shape
                row[f"{name}_error"] = str(error).splitlines()[0]
        print(json.dumps(row), flush=True)


def measure(torch: Any, backend: str, H: int, KV: int, HD: int, T: int, *, repeats: int) -> float:
    """Microseconds a call: median of `repeats` replays of a graph of a few milliseconds."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    count = max(2, min(64, ROTATE_BYTES // (4 * T * HD * (H + KV))))
    expected_us = 2 * HD * H * T * T / 300e6
    launches = max(4, min(100, int(3000 / expected_us)))

    def random(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    sets = [(2 * random(1, T, H, HD).transpose(1, 2), random(1, KV, T, HD), random(1, KV, T, HD)) for _ in range(count)]
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(getattr(SDPBackend, backend)):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for q, k, v in sets[:2]:
                attend(q, k, v, is_causal=True, enable_gqa=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                q, k, v = sets[i % count]
                attend(q, k, v, is_causal=True, enable_gqa=True)
    return replay_us(torch, graph, launches, repeats)


if __name__ == "__main__":
    main()
