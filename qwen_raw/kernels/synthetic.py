"""cuda_src/synthetic.cu: synthetic weights made on the device, the same bits as loaders/synthetic.py makes."""

import numpy as np

from qwen_raw.device import BF16, E4M3, Arg, Buffer, Device
from qwen_raw.errors import require

STEM = "synthetic"


def _grid(dev: Device, n: int) -> tuple[int, int, int]:
    return (max(1, min(dev.sm_count * 8, (n + 255) // 256)), 1, 1)


def synthetic_bf16(dev: Device, out: Buffer, tensor: int, seed: int, bound: float) -> None:
    """out bf16, any shape: uniform in [-bound, bound) by row-major index, tensor id (u32) and seed (u32)."""
    require(out.dtype == BF16, f"out is {out.dtype}, expected bf16")
    n = out.nbytes // 2
    args: list[Arg] = [out, np.int64(n), np.uint32(tensor), np.uint32(seed), np.float32(bound)]
    dev.launch(dev.kernel(STEM, "synthetic_bf16"), _grid(dev, n), (256, 1, 1), args)


def synthetic_e4m3(dev: Device, out: Buffer, tensor: int, seed: int) -> None:
    """out e4m3, any shape: uniform over ±448; the row scale that belongs to it is bound / 448."""
    require(out.dtype == E4M3, f"out is {out.dtype}, expected e4m3")
    args: list[Arg] = [out, np.int64(out.nbytes), np.uint32(tensor), np.uint32(seed)]
    dev.launch(dev.kernel(STEM, "synthetic_e4m3"), _grid(dev, out.nbytes), (256, 1, 1), args)
