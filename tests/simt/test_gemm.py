"""tests/kernels/test_gemm.py again, on the simulator's stricter ways to run a kernel (see conftest.dev)."""

from kernels.test_gemm import *  # noqa: F403
