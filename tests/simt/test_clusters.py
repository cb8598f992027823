"""Clusters on the simulator: blocks that start together, their barrier, pushes, and every way to get them wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen_raw.device import F32, U32
from qwen_raw.errors import QwenRawError
from qwen_raw.simt import run
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.native import SimError

NewDevice = Callable[..., SimDevice]
MODES: list[dict[str, Any]] = [{}, {"seed": 1}, {"seed": 2}, {"race": True}, {"race": True, "seed": 3}]
SMEM = 8 * 16 + 8 + 8


@pytest.fixture(params=MODES, ids=lambda mode: "-".join(f"{k}{v}" for k, v in mode.items()) or "in_order")
def device(request: pytest.FixtureRequest, new_device: NewDevice) -> SimDevice:
    return new_device(**request.param)


def sums(device: SimDevice, name: str, cluster: int, blocks: int, leave: int = 0) -> np.ndarray[Any, Any]:
    """What the blocks of clusters of `cluster` put out."""
    out = device.zeros((blocks,), F32)
    args = [out, np.int32(cluster), np.int32(leave)]
    kernel = device.kernel("clusters", name)
    device.launch(kernel, (blocks, 1, 1), (32, 1, 1), args, smem=SMEM, cluster=(cluster, 1, 1))
    return out.download()


@pytest.mark.parametrize("cluster", [1, 2, 5, 8])
def test_every_block_gets_what_its_cluster_pushed(device: SimDevice, cluster: int) -> None:
    blocks = 3 * cluster
    want = (np.arange(blocks, dtype=np.float32) + 1).reshape(3, cluster).sum(1).repeat(cluster)
    np.testing.assert_array_equal(sums(device, "cluster_sums", cluster, blocks), want)


def test_a_launch_without_clusters_is_clusters_of_one_block(device: SimDevice) -> None:
    out = device.zeros((3,), F32)
    kernel = device.kernel("clusters", "cluster_sums")
    device.launch(kernel, (3, 1, 1), (32, 1, 1), [out, np.int32(1), np.int32(0)], smem=SMEM)
    np.testing.assert_array_equal(out.download(), [1, 2, 3])


def test_blocks_that_have_returned_are_not_waited_for(device: SimDevice) -> None:
    got = sums(device, "cluster_sums", 4, 8, leave=0b0101)
    np.testing.assert_array_equal(got, [0, 6, 0, 6, 0, 14, 0, 14])


def test_the_barrier_keeps_blocks_in_step(device: SimDevice) -> None:
    out, rounds = device.zeros((6,), U32), device.zeros((6,), U32)
    args = [out, rounds, np.int32(3), np.int32(20)]
    device.launch(device.kernel("clusters", "barrier_rounds"), (6, 1, 1), (64, 1, 1), args, cluster=(3, 1, 1))
    np.testing.assert_array_equal(out.download(), 1)


MISTAKES = {
    "early_push": "a push before the cluster's first barrier",
    "arrives_twice": "cluster_arrive: the thread has arrived already",
    "waits_first": "cluster_wait: the thread has not arrived",
    "never_arrives": "cluster_wait: the thread has not arrived",
    "static_shared": "a push must go to dynamic shared memory",
    "no_peer": "a push to block 3 of a cluster of 3",
    "too_few": "deadlock: no thread can go on",
}


@pytest.mark.skipif(run.active(), reason="AddressSanitizer ends the process with reports of its own")
@pytest.mark.parametrize(("name", "report"), MISTAKES.items())
@pytest.mark.parametrize("mode", [{}, {"seed": 5}, {"race": True}], ids=["in_order", "random", "race"])
def test_a_mistake_is_reported(new_device: NewDevice, name: str, report: str, mode: dict[str, Any]) -> None:
    device = new_device(**mode)
    with pytest.raises(SimError, match=report):
        for _ in range(5):  # a push that was early once need not be so in the first run
            sums(device, name, 3, 6)


@pytest.mark.skipif(run.active(), reason="AddressSanitizer ends the process with reports of its own")
def test_what_the_race_checker_adds(new_device: NewDevice) -> None:
    """Reading what was pushed without looking at the barrier, and a barrier that nobody made."""
    with pytest.raises(SimError, match=r"data race: read of dynamic shared memory|uninitialised shared memory"):
        sums(new_device(race=True), "no_wait", 3, 6)
    with pytest.raises(SimError, match="uninitialised shared memory"):
        sums(new_device(race=True), "no_barrier", 3, 6)


def test_a_push_to_a_block_that_has_returned(new_device: NewDevice) -> None:
    if run.active():
        pytest.skip("AddressSanitizer ends the process with reports of its own")
    with pytest.raises(SimError, match="a push to block 0 of the cluster, which has returned"):
        sums(new_device(), "peer_returned", 3, 6, leave=1)


def test_geometry_is_refused_as_on_a_gpu(new_device: NewDevice) -> None:
    device = new_device()
    out, kernel = device.zeros((6,), F32), device.kernel("clusters", "cluster_sums")
    for cluster, report in [((4, 1, 1), "is not a multiple"), ((9, 1, 1), "is not"), ((1, 2, 1), "is not")]:
        with pytest.raises(QwenRawError, match=report):
            device.launch(kernel, (6, 1, 1), (32, 1, 1), [out, np.int32(1), np.int32(0)], smem=SMEM, cluster=cluster)
