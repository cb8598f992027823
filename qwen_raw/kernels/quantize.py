"""cuda_src/quantize.cu: bf16 weights → e4m3 with one scale a row, at load."""

import numpy as np

from qwen_raw.device import BF16, E4M3, F32, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

STEM = "quantize"


def quantize_rows(dev: Device, q: Buffer, scale: Buffer, w: Buffer, first: int = 0) -> None:
    """q e4m3 [N, n], scale f32 [N] from w bf16 [N, K]: columns first … first + n - 1 of the quantised rows.

    scale = max|row| / 448 over all K, or 1 for a zero row.
    """
    (N, K), n = w.shape, q.shape[1]
    for what, size in (("rows", K), ("a window", n), ("a window that starts at element", first)):
        require(size % 16 == 0, f"fp8 {what} of {size} elements: need a multiple of 16, whole 16-byte packs")
    require(first >= 0 and first + n <= K, f"columns {first} … {first + n - 1} of rows of {K}")
    check_buffer(w, (N, K), BF16, "w")
    check_buffer(q, (N, n), E4M3, "q")
    check_buffer(scale, (N,), F32, "scale")
    dims = [np.int32(K), np.int32(first), np.int32(n)]
    dev.launch(dev.kernel(STEM, "quantize_rows_bf16"), (N, 1, 1), (256, 1, 1), [q, scale, w, *dims])
