"""Which of a product's compiled variants a row length takes."""

from __future__ import annotations

from dataclasses import dataclass

from qwen_raw.errors import QwenRawError

WARP = 32


@dataclass(frozen=True, slots=True)
class Variants:
    """A weight type's kernels by C, the packs of a row that one thread holds (include/gemv_fma.cuh)."""

    pack: int  # weights in 16 bytes
    add_threads: dict[int, int]  # C → the largest block of that variant, plain x
    normed_threads: dict[int, int]  # the same for the kernels that normalise

    def choose(self, op: str, K: int) -> tuple[int, int]:
        """(C, threads): the fewest packs a thread that a block of whole warps can cover K with."""
        table = self.add_threads if op in ("add", "store", "push") else self.normed_threads
        for C, most in table.items():
            threads = -(-(K // self.pack) // (C * WARP)) * WARP
            if threads <= most:
                return C, threads
        longest = max(C * most for C, most in table.items()) * self.pack
        raise QwenRawError(f"gemv_{op}: rows of {K} weights, the longest variant takes {longest}")
