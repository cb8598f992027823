"""cuda_src/embed.cu: token ids → rows of the residual stream."""

import numpy as np

from qwen_raw.device import BF16, F32, I32, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

STEM = "embed"


def embed(dev: Device, h: Buffer, table: Buffer, ids: Buffer, *, pdl: bool = False) -> None:
    """h f32 [T, D] = table bf16 [V, D] at ids int32 [T]. Whoever wrote the ids has checked them."""
    (V, D), T = table.shape, ids.shape[0]
    require(D % 8 == 0, f"hidden size {D} is not a multiple of 8")
    check_buffer(h, (T, D), F32, "h")
    check_buffer(table, (V, D), BF16, "table")
    require(ids.dtype == I32, f"ids are {ids.dtype}, expected int32")
    dev.launch(
        dev.kernel(STEM, "embed_bf16"),
        (min(T, 65535), 1, 1),
        (256, 1, 1),
        [h, table, ids, np.int32(T), np.int32(D)],
        pdl=pdl,
    )
