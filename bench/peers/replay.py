"""How the PyTorch peers time a captured graph."""

from __future__ import annotations

import statistics
from typing import Any


def replay_us(torch: Any, graph: Any, launches: int, repeats: int, warmup: int = 2) -> float:
    """Microseconds a launch of a torch.cuda.CUDAGraph of `launches`: the median of `repeats` replays, event time."""
    samples = []
    for i in range(warmup + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= warmup:
            samples.append(begin.elapsed_time(end))
    return float(statistics.median(samples)) * 1e3 / launches
