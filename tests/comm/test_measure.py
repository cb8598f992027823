"""The path of sums is chosen by time where that says something, once in a process; how the choice is told."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from model.ranks import open_ranks

from qwen_raw.comm.measure import INLINE, ROWS, Measured, measure_chunk, measure_token
from qwen_raw.comm.reduce import PATHS, usual_path
from qwen_raw.driver.device import CudaDevice
from qwen_raw.driver.probe import probe


def test_the_fastest_is_taken_and_all_are_told() -> None:
    measured = Measured((0, 1), 16 << 10, 512, (("twoshot", 10.04), ("lamport", 4.0), (INLINE, 3.14)))
    assert measured.fastest == INLINE
    said = "16 KB over GPUs 0, 1: inline 3.1 · lamport 4.0 · twoshot 10.0 µs, each with a small product"
    assert measured.line() == said
    assert Measured((2, 3), 16, 0, (("flag", 4.0),)).line() == "16 B over GPUs 2, 3: flag 4.0 µs"


def test_simulated_ranks_are_not_measured() -> None:
    for devices in open_ranks("sim-2"):
        assert measure_token(devices, 64) is None
    assert (usual_path(8192), usual_path(1 << 20)) == ("lamport", "twoshot")


@pytest.mark.gpu
@pytest.mark.parametrize("which", [(0, 0), (0,), (0, 1)])
def test_gpus_are_measured_once_if_each_has_a_rank(which: tuple[int, ...]) -> None:
    if max(which) >= len(probe().gpus):
        pytest.skip("needs two GPUs")
    with ExitStack() as stack:
        devices = [stack.enter_context(CudaDevice(n)) for n in which]
        token, chunk = measure_token(devices, 896), measure_chunk(devices, 2048, 512)
        if which != (0, 1):
            assert token is None and chunk is None
            return
        assert token is not None and chunk is not None
        assert {path for path, _ in token.us} == {*PATHS, INLINE} - {"host"}
        assert {path for path, _ in chunk.us} == {"flag", "twoshot", ROWS}
        assert all(0 < us < 1000 for _, us in (*token.us, *chunk.us))
        assert measure_token(devices, 896) is token and measure_token(devices, 904) is not token
