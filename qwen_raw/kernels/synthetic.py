"""cuda_src/synthetic.cu: synthetic weights made on the device, the same bits as loaders/synthetic.py makes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qwen_raw.device import BF16, E4M3, Arg, Buffer, Device
from qwen_raw.errors import require

STEM = "synthetic"


class Window(NamedTuple):
    """Which elements of a row-major matrix of `stride` columns: `columns` of each row, from element `first` on."""

    first: int
    columns: int
    stride: int


def _geometry(dev: Device, out: Buffer, window: Window | None) -> tuple[tuple[int, int, int], list[Arg]]:
    """Grid and leading arguments. `window` None: the first elements of the tensor, one after the other."""
    n = out.nbytes // out.dtype.itemsize
    first, columns, stride = window or Window(0, n, n)
    require(n % columns == 0, f"{n} elements are not whole rows of {columns}")
    require(0 < columns <= stride and first >= 0, f"a window of {columns} columns at {first}, the matrix has {stride}")
    return (max(1, min(dev.sm_count * 8, (n + 255) // 256)), 1, 1), [
        out, np.int64(n), np.int64(first), np.int64(columns), np.int64(stride)
    ]  # fmt: skip


def synthetic_bf16(
    dev: Device, out: Buffer, tensor: int, seed: int, bound: float, window: Window | None = None
) -> None:
    """out bf16, any shape: uniform in [-bound, bound) by row-major index, tensor id (u32) and seed (u32)."""
    require(out.dtype == BF16, f"out is {out.dtype}, expected bf16")
    grid, args = _geometry(dev, out, window)
    args += [np.uint32(tensor), np.uint32(seed), np.float32(bound)]
    dev.launch(dev.kernel(STEM, "synthetic_bf16"), grid, (256, 1, 1), args)


def synthetic_e4m3(dev: Device, out: Buffer, tensor: int, seed: int, window: Window | None = None) -> None:
    """out e4m3, any shape: uniform over ±448; the row scale that belongs to it is bound / 448."""
    require(out.dtype == E4M3, f"out is {out.dtype}, expected e4m3")
    grid, args = _geometry(dev, out, window)
    args += [np.uint32(tensor), np.uint32(seed)]
    dev.launch(dev.kernel(STEM, "synthetic_e4m3"), grid, (256, 1, 1), args)
