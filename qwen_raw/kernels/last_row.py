"""cuda_src/last_row.cu: the residual stream of a chunk's last token."""

import numpy as np

from qwen_raw.device import F32, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer, check_span

STEM = "last_row"


def last_row(dev: Device, out: Buffer, h: Buffer, span: Buffer) -> None:
    """out f32 [D] = row T - 1 of h f32 [rows, D]; span int32 [2] is {pos0, T}, 1 <= T <= rows."""
    rows, D = h.shape
    require(D % 4 == 0, f"hidden size {D} is not a multiple of 4")
    check_buffer(h, (rows, D), F32, "h")
    check_buffer(out, (D,), F32, "out")
    check_span(span)
    dev.launch(dev.kernel(STEM, "last_row_f32"), (1, 1, 1), (256, 1, 1), [out, h, span, np.int32(D)])
