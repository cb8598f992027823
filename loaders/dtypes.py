"""Number formats that NumPy lacks: bfloat16 as uint16 bits, float8 e4m3fn as uint8 bits.

Every function takes an array of any shape and returns a new array of that shape. Long arrays go through in chunks, so
that the temporaries stay small beside an operand of gigabytes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_raw.errors import UsageError

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
U8 = npt.NDArray[np.uint8]

E4M3_MAX = 448.0  # 0x7E; e4m3fn has no infinity, 0x7F and 0xFF are its NaNs
_CHUNK = 1 << 16  # elements: a few temporaries of this size fit in a core's cache


def _by_chunks(src: npt.NDArray[Any], out: npt.NDArray[Any], convert: Callable[[Any], Any]) -> None:
    """out.flat[i] = convert(src.flat[i]), a chunk at a time. `out` is contiguous."""
    flat, dst = np.ascontiguousarray(src).reshape(-1), out.reshape(-1)
    for i in range(0, flat.size, _CHUNK):
        dst[i : i + _CHUNK] = convert(flat[i : i + _CHUNK])


def bf16_to_f32(bits: U16) -> F32:
    """bfloat16 bits → float32, exactly (a bfloat16 is the upper half of a float32)."""
    out = np.empty(bits.shape, np.float32)
    _by_chunks(bits, out.view(np.uint32), lambda b: b.astype(np.uint32) << np.uint32(16))
    return out


def f32_to_bf16(x: F32) -> U16:
    """float32 → bfloat16 bits, nearest even. NaN stays NaN with its sign; past the largest value comes infinity."""
    out = np.empty(x.shape, np.uint16)
    _by_chunks(x, out, _f32_to_bf16)
    return out


def _f32_to_bf16(x: F32) -> U16:
    u = x.view(np.uint32)
    rounded = u >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += u
    rounded >>= np.uint32(16)
    out = rounded.astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():  # rounding takes a NaN such as 0x7F800001 to infinity; the quiet bit keeps it a NaN
        out[nan] = (u[nan] >> np.uint32(16)) | np.uint32(0x40)
    return out


def f16_to_f32(bits: U16) -> F32:
    """IEEE half bits → float32, exactly."""
    return bits.view(np.float16).astype(np.float32)


@cache
def _e4m3_table() -> F32:
    """The 256 values: sign, 4 exponent bits (bias 7), 3 mantissa bits; exponent 0 is subnormal in units of 2^-9."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    table = np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)
    table.flags.writeable = False
    return table


def e4m3_to_f32(bits: U8) -> F32:
    """float8 e4m3fn bits → float32, exactly."""
    return _e4m3_table()[bits]


def f32_to_e4m3(x: F32) -> U8:
    """float32 → e4m3fn bits as cvt.rn.satfinite does: nearest even, past ±448 and infinities → ±448, NaN → 0x7F."""
    out = np.empty(x.shape, np.uint8)
    _by_chunks(x, out, _f32_to_e4m3)
    return out


def _f32_to_e4m3(x: F32) -> U8:
    u = x.view(np.uint32)
    magnitude = np.minimum(np.abs(x), np.float32(E4M3_MAX))  # a NaN passes through and is replaced below
    m = magnitude.view(np.uint32)
    # Normal range: round the mantissa to 3 bits, then move the exponent's bias from 127 to 7.
    normal = ((m + (((m >> np.uint32(20)) & np.uint32(1)) + np.uint32(0x7FFFF))) >> np.uint32(20)) - np.uint32(120 << 3)
    # Below 2^-6 the step is 2^-9, which is the last bit of a float32 near 2^14: the addition does the rounding.
    anchor = np.float32(2.0**14)
    subnormal = (magnitude + anchor).view(np.uint32) - anchor.view(np.uint32)
    code = np.where(magnitude < np.float32(2.0**-6), subnormal, normal) | ((u >> np.uint32(24)) & np.uint32(0x80))
    out: U8 = code.astype(np.uint8)
    out[np.isnan(x)] = 0x7F
    return out


def quantize_rows_e4m3(w: F32) -> tuple[U8, F32]:
    """float32 [N, K] → (e4m3 bits [N, K], scale float32 [N]) with w ≈ e4m3 · scale and scale = row's max |w| / 448.

    A row of zeros gets scale 1. Both divisions are float32. Raises UsageError on a NaN or an infinity.
    """
    rows, width = w.shape
    bits, scale = np.empty((rows, width), np.uint8), np.empty(rows, np.float32)
    step = max(1, _CHUNK // max(1, width))
    for i in range(0, rows, step):
        part = w[i : i + step]
        amax = np.abs(part).max(axis=1, initial=0.0)
        if not np.isfinite(amax).all():
            row = i + int(np.flatnonzero(~np.isfinite(amax))[0])
            raise UsageError(f"cannot quantise to e4m3: row {row} of the weight holds a NaN or an infinity")
        s = amax / np.float32(E4M3_MAX)
        s[s == 0] = 1.0  # also where amax / 448 underflows
        bits[i : i + step] = f32_to_e4m3(part / s[:, None])
        scale[i : i + step] = s
    return bits, scale
