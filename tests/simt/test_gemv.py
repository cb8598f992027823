"""tests/kernels/test_gemv.py again, on the simulator's stricter ways to run a kernel (see conftest.dev)."""

from kernels.test_gemv import *  # noqa: F403
