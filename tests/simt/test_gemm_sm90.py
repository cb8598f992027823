"""tests/kernels/test_gemm_sm90.py again, on the simulator's stricter ways to run a kernel (see conftest.dev)."""

import pytest
from kernels.test_gemm_sm90 import *  # noqa: F403


@pytest.fixture(autouse=True)
def short_polls(request: pytest.FixtureRequest) -> None:
    """Blocks of a cluster that wait for three others poll for most of a minute here; for one other they do not."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if params.get("name") == "cut128" and params["split"] > 2:
        pytest.skip("tiles cut in three and four: in tests/kernels")
