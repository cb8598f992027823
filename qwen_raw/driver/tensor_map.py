"""Tensor maps for Hopper's copy engine: cuTensorMapEncodeTiled, which needs a driver but no GPU work."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from qwen_raw.device import BoxShape
from qwen_raw.driver.check import bindings, call
from qwen_raw.errors import QwenRawError

BYTES = 128


@functools.lru_cache(maxsize=8192)
def encode(address: int, dtype: np.dtype[Any], shape: BoxShape) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The 128 bytes of the map, as words: boxes with a swizzle of 128 bytes, zeros outside the tensor.

    Raises QwenRawError for what the hardware does not take.
    """
    driver = bindings()
    shape.check(address, dtype.itemsize)
    types = driver.CUtensorMapDataType
    # Bits are copied as they are, so the type only says how wide an element is; those of 4 bytes may be added.
    data = {
        1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2: types.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        4: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }.get(dtype.itemsize)
    if data is None:
        raise QwenRawError(f"a tensor map of {dtype}: elements have 1, 2 or 4 bytes")

    def words(values: tuple[int, ...], kind: Any) -> list[Any]:
        return [kind(value) for value in values]

    encoded = call(
        driver.cuTensorMapEncodeTiled,
        data,
        len(shape.dims),
        address,
        words(shape.dims, driver.cuuint64_t),
        words(shape.strides, driver.cuuint64_t),
        words(shape.box, driver.cuuint32_t),
        words((1,) * len(shape.dims), driver.cuuint32_t),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return np.frombuffer(ctypes.string_at(encoded.getPtr(), BYTES), np.uint64)
