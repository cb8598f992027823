"""cuda_src/quantize.cu: bf16 rows → e4m3 with one scale each: weights at load, inputs of products."""

import numpy as np

from qwen_raw.device import BF16, E4M3, F32, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

STEM = "quantize"
MOST = 32 * 1024  # elements of a row that a block holds in registers
HELD = 64  # by a thread of quantize_tokens_bf16


def threads(K: int, held: int) -> int:
    """Of a block that holds a row of K elements, so many a thread: whole warps."""
    require(K <= MOST, f"a row of {K} elements: a block holds {MOST}")
    return -(-K // (32 * held)) * 32


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


def quantize_tokens(dev: Device, q: Buffer, scale: Buffer, a: Buffer, *, pdl: bool = False) -> None:
    """q e4m3 [T, K], scale f32 [T] from a bf16 [T, K]: scale = max|row| / 448, or 1 for a zero row."""
    T, K = a.shape
    require(K % 16 == 0, f"fp8 rows of {K} elements: need a multiple of 16, whole 16-byte packs")
    check_buffer(a, (T, K), BF16, "a")
    check_buffer(q, (T, K), E4M3, "q")
    check_buffer(scale, (T,), F32, "scale")
    kernel = dev.kernel(STEM, "quantize_tokens_bf16")
    dev.launch(kernel, (T, 1, 1), (threads(K, HELD), 1, 1), [q, scale, a, np.int32(K)], pdl=pdl)
