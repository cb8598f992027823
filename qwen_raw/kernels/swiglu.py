"""cuda_src/swiglu.cu: SwiGLU of two products' results."""

import numpy as np

from qwen_raw.device import BF16, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer

STEM = "swiglu"


def swiglu(dev: Device, act: Buffer, gate: Buffer, up: Buffer, *, pdl: bool = False) -> None:
    """act = silu(gate)·up, all bf16 [T, I]."""
    T, columns = gate.shape
    require(columns % 8 == 0, f"{columns} intermediate columns are not a multiple of 8")
    for buffer, name in ((act, "act"), (gate, "gate"), (up, "up")):
        check_buffer(buffer, (T, columns), BF16, name)
    n = T * columns
    blocks = -(-n // (8 * 256))
    dev.launch(dev.kernel(STEM, "swiglu_bf16"), (blocks, 1, 1), (256, 1, 1), [act, gate, up, np.int64(n)], pdl=pdl)
