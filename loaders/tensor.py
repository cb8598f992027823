"""One named array of a model, whether its bytes lie in a file or come from a formula."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from loaders.dtypes import F32, U16, bf16_to_f32, e4m3_to_f32, f16_to_f32, f32_to_bf16
from qwen_raw.errors import UsageError

# safetensors' names of dtypes → the NumPy dtype that carries their bits.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("u1"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """How to make a synthetic tensor: uniform in ±bound from (tensor id, seed), by loaders/synthetic.py's formula."""

    tid: int  # uint32
    seed: int  # uint32
    bound: float  # a float32's value


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array. `raw` is bits in `shape`: uint16 for BF16 and F16, float32 for F32, uint8 for F8_E4M3."""

    name: str
    dtype: str  # safetensors' spelling: "BF16", "F16", "F32", "F8_E4M3", …
    shape: tuple[int, ...]
    load: Callable[[], npt.NDArray[Any]]
    synthetic: SyntheticSource | None = None  # set: a device can make the values itself

    @property
    def raw(self) -> npt.NDArray[Any]:
        """The bits: a read-only view of the mapped file, or freshly computed values (not kept)."""
        return self.load()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize

    def f32(self) -> F32:
        """float32 values in `shape`, exact; F8_E4M3 without any scale. Other dtypes raise UsageError."""
        if self.dtype == "BF16":
            return bf16_to_f32(self.raw)
        if self.dtype == "F16":
            return f16_to_f32(self.raw)
        if self.dtype == "F32":
            return np.asarray(self.raw, np.float32)
        if self.dtype == "F8_E4M3":
            return e4m3_to_f32(self.raw)
        raise UsageError(f"tensor {self.name} is {self.dtype}; expected BF16, F16, F32 or F8_E4M3")

    def bf16(self) -> U16:
        """bfloat16 bits in `shape`: the file's own for BF16, else rounded to nearest even."""
        return self.raw if self.dtype == "BF16" else f32_to_bf16(self.f32())
