"""cuda_src/norm.cu: RMSNorm of prefill's rows."""

import numpy as np

from qwen_raw.device import BF16, E4M3, F16, F32, Arg, Buffer, Device
from qwen_raw.errors import require
from qwen_raw.kernels.linear import check_buffer
from qwen_raw.kernels.quantize import threads

STEM = "norm"
HELD = 32  # elements of a row by a thread, where the row is held


def rmsnorm(dev: Device, out: Buffer, h: Buffer, g: Buffer, eps: float) -> None:
    """out f16 [T, D] = RMSNorm(h f32 [T, D])·g bf16 [D]."""
    T, D = h.shape
    require(D % 8 == 0, f"hidden size {D} is not a multiple of 8")
    check_buffer(out, (T, D), F16, "out")
    check_buffer(h, (T, D), F32, "h")
    check_buffer(g, (D,), BF16, "g")
    dev.launch(dev.kernel(STEM, "rmsnorm_f32"), (T, 1, 1), (256, 1, 1), [out, h, g, np.int32(D), np.float32(eps)])


def rmsnorm_bf16(dev: Device, out: Buffer, h: Buffer, g: Buffer, eps: float, *, pdl: bool = False) -> None:
    """out bf16 [T, D] = RMSNorm(h f32 [T, D])·g bf16 [D]."""
    T, D = h.shape
    require(D % 8 == 0, f"hidden size {D} is not a multiple of 8")
    check_buffer(out, (T, D), BF16, "out")
    check_buffer(h, (T, D), F32, "h")
    check_buffer(g, (D,), BF16, "g")
    args: list[Arg] = [out, h, g, np.int32(D), np.float32(eps)]
    dev.launch(dev.kernel(STEM, "rmsnorm_bf16"), (T, 1, 1), (threads(D, HELD), 1, 1), args, pdl=pdl)


def rmsnorm_e4m3(
    dev: Device, out: Buffer, scale: Buffer, h: Buffer, g: Buffer, eps: float, *, pdl: bool = False
) -> None:
    """out e4m3 [T, D]·scale f32 [T] = RMSNorm(h f32 [T, D])·g bf16 [D]; scale = max|row| / 448, or 1 for a zero row."""
    T, D = h.shape
    require(D % 16 == 0, f"fp8 rows of {D} elements: need a multiple of 16, whole 16-byte packs")
    check_buffer(out, (T, D), E4M3, "out")
    check_buffer(scale, (T,), F32, "scale")
    check_buffer(h, (T, D), F32, "h")
    check_buffer(g, (D,), BF16, "g")
    args: list[Arg] = [out, scale, h, g, np.int32(D), np.float32(eps)]
    dev.launch(dev.kernel(STEM, "rmsnorm_e4m3"), (T, 1, 1), (threads(D, HELD), 1, 1), args, pdl=pdl)


def rmsnorm_split(dev: Device, hi: Buffer, lo: Buffer, h: Buffer, g: Buffer, eps: float) -> None:
    """hi + lo = RMSNorm(h f32 [T, D])·g bf16 [D] to about 16 bits, both bf16 [T, D]."""
    T, D = h.shape
    require(D % 8 == 0, f"hidden size {D} is not a multiple of 8")
    check_buffer(hi, (T, D), BF16, "hi")
    check_buffer(lo, (T, D), BF16, "lo")
    check_buffer(h, (T, D), F32, "h")
    check_buffer(g, (D,), BF16, "g")
    args: list[Arg] = [hi, lo, h, g, np.int32(D), np.float32(eps)]
    dev.launch(dev.kernel(STEM, "rmsnorm_split_f32"), (T, 1, 1), (256, 1, 1), args)
