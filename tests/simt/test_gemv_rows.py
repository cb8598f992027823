"""tests/kernels/test_gemv_rows.py again, on the simulator's stricter ways to run a kernel (see conftest.dev)."""

from kernels.test_gemv_rows import *  # noqa: F403
