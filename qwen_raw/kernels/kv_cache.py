"""One layer's keys and values as kernels take them (cuda_src/include/kv_cache.cuh): bf16, or e4m3 with `fine`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen_raw.config import FINE
from qwen_raw.device import BF16, E4M3, Arg, Buffer
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

FINE_PAIRS = FINE // 2  # of a KV head: pairs of dimensions whose keys are stored twice
COARSE = 255  # in the table of slots: a pair that is stored once


def fine_bytes(KV: int, max_len: int, HD: int) -> int:
    """Of `fine`: second parts of keys [KV, max_len, FINE], slots [KV, HD/2], pairs [KV, FINE_PAIRS]."""
    return KV * (max_len * FINE + HD // 2 + FINE_PAIRS)


@dataclass(frozen=True, slots=True)
class CacheArgs:
    """A checked cache as kernel arguments: three pointers, and whether it is e4m3."""

    pointers: tuple[Buffer, Buffer, Buffer]
    e4m3: np.int32

    @property
    def name(self) -> str:
        """Of the format, in kernels' names."""
        return "e4m3" if self.e4m3 else "bf16"

    def with_pointers(self, *before: Buffer) -> list[Arg]:
        """`before`, then the three pointers."""
        return [*before, *self.pointers]


def cache_args(k: Buffer, v: Buffer, fine: Buffer | None, KV: int, max_len: int, HD: int) -> CacheArgs:
    """k and v [KV, max_len, HD], both bf16, or both e4m3 with fine uint8 [fine_bytes(KV, max_len, HD)].

    Raises QwenRawError for anything else.
    """
    e4m3 = k.dtype == E4M3
    check_buffer(k, (KV, max_len, HD), E4M3 if e4m3 else BF16, "k_cache")
    check_buffer(v, (KV, max_len, HD), k.dtype, "v_cache")
    if not e4m3:
        require(fine is None, "a bf16 cache has no second parts of keys")
        return CacheArgs((k, v, k.view((1,), dtype=E4M3)), np.int32(0))
    require(fine is not None, "an e4m3 cache needs the second parts of its keys")
    assert fine is not None
    check_buffer(fine, (fine_bytes(KV, max_len, HD),), E4M3, "the second parts of keys")
    return CacheArgs((k, v, fine), np.int32(1))
