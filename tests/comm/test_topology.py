"""Pairs of GPUs are tried before they are used; a link that loses or changes what crosses it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from qwen_raw.cli.main import main
from qwen_raw.comm.topology import links, require_links, verify
from qwen_raw.errors import QwenRawError
from qwen_raw.simt import run
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.world import SimWorld


class Broken:
    """A device whose launches of `kernel` on another's memory are changed by `fault`."""

    def __init__(self, device: SimDevice, kernel: str, fault: Callable[[list[Any]], list[Any] | None]) -> None:
        self._device, self._kernel, self._fault = device, kernel, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def enable_peer(self, other: Any) -> None:
        self._device.enable_peer(getattr(other, "_device", other))

    def launch(self, kernel: Any, grid: Any, block: Any, args: list[Any], **options: Any) -> None:
        world, rank = self._device.world, self._device.rank
        address = next(int(arg) for arg in args if isinstance(arg, np.uint64))
        if kernel.name == self._kernel and not is_of(world, rank, address):
            changed = self._fault(args)
            if changed is None:
                return
            args = changed
        self._device.launch(kernel, grid, block, args, **options)


def is_of(world: SimWorld, rank: int, address: int) -> bool:
    """Whether memory of `rank` is at the address: simulated ranks have equal ranges, in order."""
    probe = SimDevice(world=world, rank=rank).empty((4,), np.dtype(np.uint32))
    return abs(probe.ptr - address) < world.memory


@pytest.fixture
def world() -> Iterator[SimWorld]:
    with SimWorld(2, sanitize="address" if run.active() else None, memory=64 << 20) as world:
        yield world


def devices(world: SimWorld) -> list[Any]:
    return [SimDevice(world=world, rank=rank) for rank in range(2)]


def test_links_that_work(world: SimWorld) -> None:
    first, second = devices(world)
    assert verify(first, second) is None and verify(second, first) is None
    require_links([first, second, first])


def test_stores_that_get_lost_are_noticed(world: SimWorld) -> None:
    first, second = devices(world)
    lossy = Broken(first, "peercheck_store_u32", lambda args: None)
    assert verify(lossy, second) == "4 of 4 words stored by GPU 0 did not arrive at GPU 1"
    with pytest.raises(QwenRawError, match="GPUs 0 and 1 cannot work together: 4 of 4 words stored by GPU 0"):
        require_links([lossy, second])


def test_loads_that_are_wrong_are_noticed(world: SimWorld) -> None:
    first, second = devices(world)
    wrong = Broken(first, "peercheck_count_u32", lambda args: [*args[:2], np.uint32(args[2] + 1), args[3]])
    assert verify(wrong, second) == "4 of 4 words loaded by GPU 0 from GPU 1 were wrong"


def test_a_store_that_comes_late_but_once_is_noticed(world: SimWorld) -> None:
    """Stale data of the size before: every size has its own pattern."""
    first, second = devices(world)
    kept: list[Any] = []

    def short(args: list[Any]) -> list[Any]:
        kept.append(args)
        return [args[0], args[1], np.int32(1)]  # one pack arrives, the rest does not

    assert verify(Broken(first, "peercheck_store_u32", short), second) is not None
    assert len(kept) == 2  # the first size is one pack, and passes


@pytest.mark.gpu
def test_every_pair_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    from qwen_raw.driver.device import CudaDevice
    from qwen_raw.driver.probe import probe

    count = len(probe().gpus)
    opened = [CudaDevice(n) for n in range(count)]
    found = links(opened)
    for device in opened:
        device.close()
    assert len(found) == count * (count - 1)
    for link in found:
        assert link.path.access == (link.problem is None), link
    assert main(["devices", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(n["source"], n["target"]) for n in report["links"]] == [(n.path.source, n.path.target) for n in found]
    assert report["links_not_tried_because"] is None
