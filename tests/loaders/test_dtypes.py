"""Every bit pattern of bf16, f16 and e4m3, and the rounding of float32 into them, against independent definitions."""

import struct
from fractions import Fraction

import numpy as np
import pytest

from loaders.dtypes import bf16_to_f32, e4m3_to_f32, f16_to_f32, f32_to_bf16, f32_to_e4m3, quantize_rows_e4m3
from qwen_raw.errors import UsageError

ALL16 = np.arange(65536, dtype=np.uint32).astype(np.uint16)
ALL8 = np.arange(256, dtype=np.uint32).astype(np.uint8)


def test_bf16_all_patterns_widen_exactly_and_return() -> None:
    wide = bf16_to_f32(ALL16)
    expected = np.frombuffer(b"".join(struct.pack("<HH", 0, b) for b in range(65536)), np.float32)
    assert np.array_equal(wide.view(np.uint32), expected.view(np.uint32))
    back = f32_to_bf16(wide)
    nan = np.isnan(wide)
    assert np.array_equal(back[~nan], ALL16[~nan])
    assert nan.sum() == 2 * 127 and np.isnan(bf16_to_f32(back[nan])).all()
    assert np.array_equal(back[nan] >> 15, ALL16[nan] >> 15)


def test_bf16_rounds_to_nearest_even() -> None:
    for bits in (0x0000, 0x0001, 0x007F, 0x3F80, 0x3F81, 0x7F7E, 0xBF81):
        low, high = float(bf16_to_f32(np.array(bits, np.uint16))), float(bf16_to_f32(np.array(bits + 1, np.uint16)))
        middle = np.float32((low + high) / 2)
        even = bits if bits % 2 == 0 else bits + 1
        x = np.array(
            [middle, np.nextafter(middle, np.float32(low)), np.nextafter(middle, np.float32(high))], np.float32
        )
        assert f32_to_bf16(x).tolist() == [even, bits, bits + 1]
    # The halfway point past the largest finite value goes to infinity; just below it does not.
    assert f32_to_bf16(np.array([0x7F7F8000, 0x7F7F7FFF], np.uint32).view(np.float32)).tolist() == [0x7F80, 0x7F7F]


@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000])
def test_bf16_keeps_nan(pattern: int) -> None:
    out = int(f32_to_bf16(np.array([pattern], np.uint32).view(np.float32))[0])
    assert out & 0x7FFF > 0x7F80 and out >> 15 == pattern >> 31


def test_f16_all_patterns() -> None:
    wide = f16_to_f32(ALL16)
    for bits in (0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xC000):
        assert wide[bits] == struct.unpack("<e", struct.pack("<H", bits))[0]
    assert np.isnan(wide).sum() == 2 * 1023 and np.isinf(wide).sum() == 2


def e4m3_value(code: int) -> Fraction:
    """The format's definition in exact arithmetic (NaN codes excluded)."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    return -size if code & 0x80 else size


def test_e4m3_all_patterns() -> None:
    wide = e4m3_to_f32(ALL8)
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert np.isnan(wide[code])
        else:
            assert Fraction(float(wide[code])) == e4m3_value(code)
    back = f32_to_e4m3(wide)
    assert np.array_equal(back[~np.isnan(wide)], ALL8[~np.isnan(wide)])
    assert set(back[np.isnan(wide)].tolist()) == {0x7F}
    assert np.signbit(wide[0x80]) and back[0x80] == 0x80


def test_e4m3_rounds_to_nearest_even_everywhere() -> None:
    for code in range(0x7E):
        middle = np.float32(float((e4m3_value(code) + e4m3_value(code + 1)) / 2))
        x = np.array([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))], np.float32)
        even = code if code % 2 == 0 else code + 1
        assert f32_to_e4m3(x).tolist() == [even, code, code + 1]
        assert f32_to_e4m3(-x).tolist() == [even | 0x80, code | 0x80, (code + 1) | 0x80]


def test_e4m3_saturates() -> None:
    x = np.array([448, 449, 463.9, 464, 480, 1e30, np.inf, -449, -np.inf, np.nan, -np.nan, 1e-40, -1e-40], np.float32)
    assert f32_to_e4m3(x).tolist() == [0x7E] * 7 + [0xFE] * 2 + [0x7F] * 2 + [0x00, 0x80]


def test_chunked_paths_equal_small_ones() -> None:
    """Arrays longer than one chunk, strided and multidimensional, give the same bits as element by element."""
    x = np.random.default_rng(0).standard_normal((3, 700_001), dtype=np.float32)
    assert np.array_equal(f32_to_bf16(x)[1], f32_to_bf16(x[1]))
    assert np.array_equal(f32_to_e4m3(x.T)[-5:, 2], f32_to_e4m3(x[2, -5:].copy()))
    assert np.array_equal(bf16_to_f32(f32_to_bf16(x))[2, -9:], bf16_to_f32(f32_to_bf16(x[2, -9:])))
    assert f32_to_bf16(np.ones((), np.float32)).shape == ()
    assert f32_to_bf16(np.empty((0, 3), np.float32)).shape == (0, 3)


def test_quantize_rows() -> None:
    w = np.random.default_rng(1).standard_normal((900, 1536), dtype=np.float32)
    w[3] = 0
    w[4] *= 1e4
    w[5] = 1e-44  # amax / 448 underflows
    bits, scale = quantize_rows_e4m3(w)
    assert bits.shape == w.shape and bits.dtype == np.uint8 and scale.shape == (900,) and scale.dtype == np.float32
    assert scale[3] == 1 and not bits[3].any() and scale[5] == 1
    normal = np.r_[0:3, 4, 6:900]
    assert np.array_equal(scale[normal], np.abs(w[normal]).max(axis=1) / np.float32(448))
    error = np.abs(e4m3_to_f32(bits) * scale[:, None] - w)[normal]
    # Half a step: 2^-4 of the value where normal, 2^-10 of the scale where subnormal.
    assert (error <= np.maximum(np.abs(w[normal]) / 16, scale[normal, None] / 1024) * 1.001).all()
    assert (np.abs(e4m3_to_f32(bits[normal])).max(axis=1) == 448).all()


def test_quantize_rows_refuses_non_finite() -> None:
    w = np.ones((4, 8), np.float32)
    w[2, 1] = np.nan
    with pytest.raises(UsageError, match="row 2 "):
        quantize_rows_e4m3(w)
