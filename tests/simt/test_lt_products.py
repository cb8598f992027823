"""tests/kernels/test_lt_products.py again, on the simulator's stricter ways to run a kernel (see conftest.dev)."""

from kernels.test_lt_products import *  # noqa: F403
