"""The one door to the CUDA driver: every call goes through `call`, and every failure names the call.

The CUDA packages are imported on first use, so that the CPU path works where they are not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen_raw.errors import QwenRawError, UsageError

# Results of cuInit that mean "this machine has no usable GPU", not "something broke".
_ABSENT = {
    "CUDA_ERROR_NO_DEVICE": "no NVIDIA GPU is visible to this process",
    "CUDA_ERROR_STUB_LIBRARY": "libcuda.so is the toolkit's stub, there is no NVIDIA driver",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the NVIDIA kernel module and libcuda.so are of different versions",
}
# After these the context is gone: every later call fails too, and what was allocated has gone with it.
LOST = {
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
}


class DriverError(QwenRawError):
    """A driver call failed. `name` is the driver's own name of the error, e.g. CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name

    @property
    def lost(self) -> bool:
        """Whether the GPU can no longer be used by this process, because a kernel failed."""
        return self.name in LOST


def bindings() -> Any:
    """The module cuda.bindings.driver (12.8+ or 13).

    Raises UsageError where it is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UsageError(f"cuda-python is not installed ({error}): reinstall qwen-raw") from error
    return driver


def initialised() -> Any:
    """The driver's module after cuInit; calling it again costs nothing.

    Raises UsageError where there is no driver library or no GPU.
    """
    driver = bindings()
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as error:  # the bindings' way to say that libcuda cannot be opened
        raise UsageError("no NVIDIA driver was found on this machine") from error
    if status.name in _ABSENT:
        raise UsageError(_ABSENT[status.name])
    if int(status) != 0:
        raise DriverError(f"cuInit(0) failed: {_describe(driver, status)}", status.name)
    return driver


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls one function of cuda.bindings and returns what follows the status: nothing, one value, or a tuple.

    Raises DriverError with the call's name, its arguments and the error's name and text.
    """
    status, *values = function(*args)
    if int(status) != 0:
        raise failure(function, args, status)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def failure(function: Callable[..., Any], args: tuple[Any, ...], status: Any) -> DriverError:
    """The error for a call whose status was not success."""
    shown = ", ".join(_short(arg) for arg in args)
    why = " in a kernel that was queued earlier" if status.name in LOST else ""
    return DriverError(f"{function.__name__}({shown}) failed: {_describe(bindings(), status)}{why}", status.name)


def _describe(driver: Any, status: Any) -> str:
    """ "CUDA_ERROR_INVALID_VALUE (invalid argument)"; the text is the driver's, where it knows the code."""
    try:
        text = driver.cuGetErrorString(status)[1]
    except RuntimeError:  # no driver library to ask
        text = None
    return f"{status.name} ({text.decode()})" if text else str(status.name)


def _short(value: Any) -> str:
    """One argument for an error message: enums by name, handles and addresses in hexadecimal, at most 60 characters."""
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(_short(item) for item in value[:4]) + (", …]" if len(value) > 4 else "]")
    elif hasattr(value, "name") and hasattr(value, "value"):
        text = str(value.name)
    elif type(value) is int:
        text = str(value) if value < 1 << 32 else hex(value)
    elif hasattr(value, "getPtr") and hasattr(value, "__int__"):
        text = f"{type(value).__name__} {int(value):#x}"
    elif hasattr(value, "getPtr"):
        text = type(value).__name__
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
