"""tests/kernels/test_small.py again, on the simulator's stricter ways to run a kernel (see conftest.dev)."""

from kernels.test_small import *  # noqa: F403
