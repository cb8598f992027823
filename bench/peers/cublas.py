"""cuBLAS through CuPy, on our buffers and our stream: the bare product Y[M, N] = X[M, K]·Wᵀ in bf16, fp32 sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from qwen_raw.device import Buffer
from qwen_raw.driver.device import CudaDevice
from qwen_raw.errors import QwenRawError

# cublas_api.h, library_types.h.
OP_N, OP_T, R_16BF, COMPUTE_32F, ALGO_DEFAULT = 0, 1, 14, 68, -1


class Cublas:
    """One handle on a device's stream, cublasGemmEx with the library's own choice of algorithm.

    Raises QwenRawError, with the reason, where CuPy or cuBLAS is not installed.
    """

    def __init__(self, dev: CudaDevice) -> None:
        try:
            import cupy
            from cupy_backends.cuda.libs import cublas

            self._lib: Any = cublas
            self._stream: Any = cupy.cuda.ExternalStream(int(dev.stream.handle), dev.ordinal)
            self._handle = cublas.create()
            self.version = int(cublas.getVersion(self._handle))
        except (ImportError, RuntimeError) as error:
            raise QwenRawError(f"no cuBLAS through CuPy: {error}") from error
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def product(self, y: Buffer, x: Buffer, w: Buffer) -> None:
        """Queue y bf16 [M, N] = x bf16 [M, K]·w bf16 [N, K]ᵀ. Raises QwenRawError if cuBLAS refuses it."""
        (M, K), N = x.shape, w.shape[0]
        a, b = (w.ptr, R_16BF, K), (x.ptr, R_16BF, K)
        alpha, beta = self._one.ctypes.data, self._zero.ctypes.data
        try:
            with self._stream:  # CuPy's calls go to its current stream, whatever the handle was told
                self._lib.gemmEx(
                    self._handle, OP_T, OP_N, N, M, K, alpha, *a, *b, beta, y.ptr, R_16BF, N, COMPUTE_32F, ALGO_DEFAULT
                )
        except RuntimeError as error:
            raise QwenRawError(f"cublasGemmEx of {M} × {N} × {K}: {error}") from error


def open_cublas(dev: CudaDevice, wanted: bool) -> tuple[Cublas | None, dict[str, Any]]:
    """cuBLAS or None, and what the results say of it: its version, or why it is missing, which is printed too."""
    if not wanted:
        return None, {"cublas": "not asked for"}
    try:
        library = Cublas(dev)
    except QwenRawError as error:
        print(f"# {error}")
        return None, {"cublas": str(error)}
    return library, {"cublas": library.version}
