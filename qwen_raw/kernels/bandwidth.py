"""cuda_src/bandwidth.cu: reads a buffer at the highest rate the memory gives."""

import numpy as np

from qwen_raw.device import U32, Arg, Buffer, Device
from qwen_raw.errors import require

STEM = "bandwidth"


def read_all(dev: Device, data: Buffer, sink: Buffer) -> None:
    """Read data (any type, whole 16-byte packs) once; sink u32 [1] keeps the compiler from dropping the loads."""
    require(data.ptr % 16 == 0 and data.nbytes % 16 == 0, "data must be 16-byte aligned and whole 16-byte packs")
    require(sink.shape == (1,) and sink.dtype == U32, f"sink is {sink.dtype}{list(sink.shape)}, expected uint32[1]")
    args: list[Arg] = [data, sink, np.int64(data.nbytes // 16)]
    dev.launch(dev.kernel(STEM, "read_v4"), (dev.sm_count * 4, 1, 1), (512, 1, 1), args)
