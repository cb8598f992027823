"""tests/kernels/test_attn.py again, on the simulator's stricter ways to run a kernel (see conftest.dev)."""

from kernels.test_attn import *  # noqa: F403
