"""cuda_src/peercheck.cu: words stored and counted through another GPU's address."""

from __future__ import annotations

import numpy as np

from qwen_raw.device import U32, Buffer, Device
from qwen_raw.errors import require

STEM = "peercheck"
THREADS = 256


def _shape(data: Buffer) -> tuple[np.int32, int]:
    require(data.nbytes % 16 == 0 and data.ptr % 16 == 0, f"{data!r} is not whole, aligned 16-byte packs")
    packs = data.nbytes // 16
    return np.int32(packs), max(1, min(-(-packs // THREADS), 64))


def store_pattern(dev: Device, data: Buffer, seed: int) -> None:
    """`dev` stores pattern(i, seed) into every word of `data`, its own memory or a peer's."""
    packs, blocks = _shape(data)
    kernel = dev.kernel(STEM, "peercheck_store_u32")
    dev.launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), [np.uint64(data.ptr), np.uint32(seed), packs])


def count_wrong(dev: Device, wrong: Buffer, data: Buffer, seed: int) -> None:
    """`dev` adds to wrong u32 [1] how many words of `data`, its own memory or a peer's, are not pattern(i, seed)."""
    require(wrong.shape == (1,) and wrong.dtype == U32, f"wrong is {wrong!r}, expected uint32[1]")
    packs, blocks = _shape(data)
    kernel = dev.kernel(STEM, "peercheck_count_u32")
    dev.launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), [wrong, np.uint64(data.ptr), np.uint32(seed), packs])
