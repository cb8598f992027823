"""tests/kernels/test_attn_sm90.py again, on the simulator's stricter ways to run a kernel (see conftest.dev)."""

from kernels.test_attn_sm90 import *  # noqa: F403
