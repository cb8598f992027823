"""cuda_src/quantize.cu: bf16 weights → e4m3 with one scale a row, at load."""

import numpy as np

from qwen_raw.device import BF16, E4M3, F32, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

STEM = "quantize"


def quantize_rows(dev: Device, q: Buffer, scale: Buffer, w: Buffer) -> None:
    """q e4m3 [N, K], scale f32 [N] from w bf16 [N, K]: scale = max|row| / 448, or 1 for a zero row."""
    N, K = w.shape
    require(K % 16 == 0, f"fp8 rows of {K} elements are not whole 16-byte packs: need a multiple of 16")
    check_buffer(w, (N, K), BF16, "w")
    check_buffer(q, (N, K), E4M3, "q")
    check_buffer(scale, (N,), F32, "scale")
    dev.launch(dev.kernel(STEM, "quantize_rows_bf16"), (N, 1, 1), (256, 1, 1), [q, scale, w, np.int32(K)])
