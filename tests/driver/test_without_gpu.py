"""What the driver layer does on a machine that has no GPU, no driver, or no CUDA packages; and its pure parts."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from qwen_raw.device import BF16, F32, I32
from qwen_raw.driver.device import arch_name
from qwen_raw.driver.launch import ParamLayout
from qwen_raw.driver.memory import check_view
from qwen_raw.driver.probe import probe
from qwen_raw.errors import QwenRawError


def _run(script: str) -> subprocess.CompletedProcess[str]:
    prelude = f"import sys; sys.path[:0] = {sys.path!r}\n"
    return subprocess.run([sys.executable, "-c", prelude + script], capture_output=True, text=True, timeout=60)


def test_no_driver_is_a_usage_error() -> None:
    if probe().gpus:
        pytest.skip("this machine has a GPU")
    from qwen_raw.driver.device import CudaDevice
    from qwen_raw.errors import UsageError

    with pytest.raises(UsageError, match=r"^no [^\n]*$") as caught:
        CudaDevice(0)
    assert str(caught.value) == probe().problem


def test_importing_loads_no_cuda_package() -> None:
    done = _run(
        "import qwen_raw.driver.device, qwen_raw.driver.probe, qwen_raw.kernels.compile\n"
        "print(sorted(m for m in sys.modules if m.startswith(('cupy', 'cuda.', 'pynvml'))))"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_without_the_cuda_packages() -> None:
    """As on a Mac: the packages cannot be imported, and one line says so."""
    done = _run(
        "sys.modules.update(dict.fromkeys(['cuda', 'cuda.bindings', 'cupy', 'pynvml']))\n"
        "from qwen_raw.driver.device import CudaDevice\n"
        "from qwen_raw.driver.probe import probe\n"
        "from qwen_raw.errors import UsageError\n"
        "from qwen_raw.kernels.compile import build\n"
        "for action in (lambda: CudaDevice(0), lambda: build('embed', 'sm_90a')):\n"
        "    try: action()\n"
        "    except UsageError as error: print(error)\n"
        "print(probe().problem)"
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert lines[0].startswith("cuda-python is not installed") and lines[0].endswith("reinstall qwen-raw")
    assert lines[1].startswith("the CUDA compiler NVRTC is not installed")
    assert lines[2] == lines[0]


def test_arch_names_have_the_accelerated_suffix_from_hopper_on() -> None:
    capabilities = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 1)]
    assert [arch_name(*c) for c in capabilities] == ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_121a"]


def test_arguments_are_found_through_the_table() -> None:
    """As the driver reads them: a table of pointers, each to as many bytes as the parameter has."""
    pair = np.zeros(1, np.dtype([("a", np.int8), ("b", np.float64), ("c", np.int16)], align=True))
    pair[0] = (-1, 0.5, 7)
    args = [np.int8(-3), pair, np.float32(1.25), np.uint64(2**63), np.bool_(True), np.arange(5, dtype=np.uint16)]
    layout = ParamLayout("k", [arg.nbytes for arg in args])
    block = layout.pack(args)
    table = ctypes.cast(block, ctypes.POINTER(ctypes.c_uint64))
    for i, arg in enumerate(args):
        assert table[i] % 16 == ctypes.addressof(block) % 16
        assert ctypes.string_at(table[i], arg.nbytes) == arg.tobytes()
    assert ctypes.addressof(layout.pack(args)) != ctypes.addressof(block)  # two launches do not share storage


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([1, np.float32(1)], r"k, argument 0: int 1 has no fixed size; pass a buffer, a NumPy scalar"),
        ([np.int32(1), 1.0], r"k, argument 1: float 1\.0 has no fixed size"),
        ([np.int32(1), None], r"k, argument 1: NoneType None has no fixed size"),
        ([np.int32(1), np.float64(1)], r"k, argument 1: float64 .* has 8 bytes, the kernel's parameter 4"),
        ([np.int32(1)], r"k takes 2 arguments, 1 were given"),
        ([np.zeros(3, np.float32), np.float32(1)], r"argument 0: float32\[3\] by value has 12 bytes"),
    ],
)
def test_wrong_arguments(args: list[object], text: str) -> None:
    with pytest.raises(QwenRawError, match=text):
        ParamLayout("k", [4, 4]).pack(args)  # type: ignore[arg-type]


def test_views_stay_inside() -> None:
    assert check_view(64, F32, (4, 4), 0, F32) == 0
    assert check_view(64, F32, (2, 4), 8, BF16) == 32
    assert check_view(64, F32, (0,), 16, F32) == 64
    for shape, offset, dtype in (((17,), 0, F32), ((16,), 1, F32), ((1,), -1, F32), ((-1,), 0, F32), ((9, 4), 0, BF16)):
        with pytest.raises(QwenRawError, match="would take bytes"):
            check_view(64, F32, shape, offset, dtype)
    with pytest.raises(QwenRawError, match="not aligned to 4 bytes"):
        check_view(64, BF16, (2,), 1, I32)
