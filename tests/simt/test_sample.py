"""tests/kernels/test_sample.py again, on the simulator's stricter ways to run a kernel (see conftest.dev)."""

from kernels.test_sample import *  # noqa: F403
