"""Tensor-core products: tiles whose sums are exact must agree in every bit, tiles that round within a bound.

A tensor core forms exact products, shifts all addends to the exponent of the largest, cuts what falls off its window,
adds, and cuts the sum (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021, and later measurements; the
window and how many products go in one addition differ by generation). The simulator adds in double and rounds once.
"""

from __future__ import annotations

import numpy as np
from conformance.machines import Array, Machine, Output
from conformance.probe_cases import Outcome, Probe

from loaders.dtypes import bf16_to_f32, f16_to_f32, f32_to_bf16
from qwen_raw.device import F32

TILES = 24


def _bits(x: Array, bf16: bool) -> Array:
    return f32_to_bf16(x.astype(np.float32)) if bf16 else x.astype(np.float16).view(np.uint16)


def _integers(rng: np.random.Generator, bf16: bool) -> tuple[Array, Array, Array]:
    """Small integers, sums below 2^24: nothing is ever cut."""
    a, b = (rng.integers(-15, 16, (TILES, *s)).astype(np.float64) for s in ((16, 16), (16, 8)))
    return a, b, rng.integers(-(1 << 16), 1 << 16, (TILES, 16, 8)).astype(np.float64)


def _units(rng: np.random.Generator, bf16: bool) -> tuple[Array, Array, Array]:
    """One 1 in each row of a: picks rows of b, so a wrong fragment layout shows, whatever b holds."""
    a = np.zeros((TILES, 16, 16))
    a[np.arange(TILES)[:, None], np.arange(16)[None], rng.integers(0, 16, (TILES, 16))] = 1.0
    return a, rng.standard_normal((TILES, 16, 8)) * 100, np.zeros((TILES, 16, 8))


def _cancelling(rng: np.random.Generator, bf16: bool) -> tuple[Array, Array, Array]:
    """Large products that cancel, and small integers that must be left: all within 24 bits of the largest."""
    a, b, c = _integers(rng, bf16)
    at = np.argsort(rng.random((TILES, 16)), 1)[:, :2]
    tile = np.arange(TILES)
    a[tile, :, at[:, 0]], a[tile, :, at[:, 1]] = 2048.0, -2048.0
    b[tile, at[:, 0], :] = b[tile, at[:, 1], :] = 1024.0
    return a, b, np.rint(c / 256)


def _subnormal(rng: np.random.Generator, bf16: bool) -> tuple[Array, Array, Array]:
    """Subnormal a times powers of two, sums of at most eleven bits: operands are not flushed to zero."""
    unit = 2.0**-133 if bf16 else 2.0**-24
    a = rng.integers(-127, 128, (TILES, 16, 16)) * unit
    return a, np.full((TILES, 16, 8), 2.0**60 if bf16 else 2.0**10), np.zeros((TILES, 16, 8))


def _not_finite(rng: np.random.Generator, bf16: bool) -> tuple[Array, Array, Array]:
    """An infinity, both infinities, an infinity times zero, a NaN, an infinite accumulator; other rows are whole."""
    a, b, c = _integers(rng, bf16)
    b[:] = np.abs(b) + 1
    b[:, 5, 3] = 0.0
    a[:, 0, 2], a[:, 1, 2], a[:, 1, 9], a[:, 2, 5], a[:, 3, 7] = np.inf, np.inf, -np.inf, np.inf, np.nan
    c[:, 4, 1], c[:, 5, 2] = -np.inf, np.nan
    return a, b, c


def _normal(rng: np.random.Generator, bf16: bool) -> tuple[Array, Array, Array]:
    a, b = (rng.standard_normal((TILES, *s)) for s in ((16, 16), (16, 8)))
    return a, b, rng.standard_normal((TILES, 16, 8)).astype(np.float32).astype(np.float64)


def _spread(rng: np.random.Generator, bf16: bool) -> tuple[Array, Array, Array]:
    """Magnitudes over 2^±12, accumulators that dwarf the products or are dwarfed by them, near-cancellations."""
    a, b = (rng.standard_normal((TILES, *s)) * 2.0 ** rng.integers(-6, 7, (TILES, *s)) for s in ((16, 16), (16, 8)))
    a[:, :, 1], b[:, 1] = -a[:, :, 0], b[:, 0]
    c = rng.standard_normal((TILES, 16, 8)) * 2.0 ** rng.integers(-20, 21, (TILES, 16, 8))
    return a, b, c.astype(np.float32).astype(np.float64)


_EXACT = {
    "integers": _integers,
    "units": _units,
    "cancelling": _cancelling,
    "subnormal": _subnormal,
    "not_finite": _not_finite,
}
_ROUNDED = {"normal": _normal, "spread": _spread}


def _probe(name: str, variant: str) -> Probe:
    bf16, exact = "bf16" in name, variant in _EXACT

    def run(machine: Machine, rng: np.random.Generator) -> Outcome:
        a, b, c = (_EXACT if exact else _ROUNDED)[variant](rng, bf16)
        a_bits, b_bits, dev = _bits(a, bf16), _bits(b, bf16), machine.dev
        out = dev.zeros(c.shape, F32)
        buffers = [dev.array(a_bits), dev.array(b_bits), dev.array(c.astype(np.float32))]
        machine.run(name, [out, *buffers], grid=TILES, block=32)
        widen = bf16_to_f32 if bf16 else f16_to_f32
        with np.errstate(invalid="ignore"):
            products = widen(a_bits).astype(np.float64)[..., None] * widen(b_bits).astype(np.float64)[:, None]
            want = (products.sum(2) + c).astype(np.float32)
        allowed: Array | float = 0.0
        if not exact:
            total = np.abs(products).sum(2) + np.abs(c)
            allowed = machine.mma_error * total
            if variant == "spread":  # one addend outweighs all: each of the others may lose a quarter of its ulp
                largest = np.maximum(np.abs(products).max(2), np.abs(c))
                allowed += machine.mma_error * 17 / 8 * largest
        # + 0: the sign of a sum that is zero is not compared.
        return Output(out.download() + np.float32(0)), Output(want + np.float32(0), allowed)

    return Probe(name, run, variant)


MMA = [_probe(name, v) for name in ("mma_bf16_16816", "mma_f16_16816") for v in (*_EXACT, *_ROUNDED)]
