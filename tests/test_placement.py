"""Which tensor-parallel degrees a model takes, and what is said where one is refused."""

from dataclasses import replace
from typing import NoReturn

import pytest

from loaders.synthetic import random_config
from qwen_raw import placement
from qwen_raw.driver.probe import Machine
from qwen_raw.errors import QwenRawError, UsageError, close_all
from qwen_raw.placement import degree, place


@pytest.mark.parametrize(
    ("size", "legal"), [("0.5b", (1, 2)), ("7b", (1, 2, 4)), ("14b", (1, 2, 4, 8)), ("72b", (1, 2, 4, 8))]
)
@pytest.mark.parametrize("fp8", [False, True])
def test_degrees_of_the_published_sizes(size: str, legal: tuple[int, ...], fp8: bool) -> None:
    """72B at 8 ranks has shares of 3696, no multiple of 128: that is legal."""
    config = random_config(size)
    assert config.legal_tp(16 if fp8 else 8) == legal
    for tp in range(1, 10):
        if tp in legal:
            assert degree(tp, None, config, fp8=fp8) == tp
        else:
            with pytest.raises(UsageError, match=f"tp {tp} does not fit random:{size}'s .*: use 1.* or {legal[-1]}$"):
                degree(tp, None, config, fp8=fp8)


def test_shares_are_whole_packs() -> None:
    config = replace(random_config("72b"), I=8 * 1848)
    assert degree(8, None, config, fp8=False) == 8
    with pytest.raises(
        UsageError, match=r"intermediate size of 14784, of which a rank takes whole packs of 16: use 1, 2 or 4"
    ):
        degree(8, None, config, fp8=True)


def test_gpus_say_how_many_ranks() -> None:
    config = random_config("72b")
    assert degree(None, [0, 0, 1, 1], config, fp8=True) == 4
    assert degree(None, None, config, fp8=True) == degree(None, [3], config, fp8=True) == 1


@pytest.mark.parametrize(("there", "advised"), [(0, False), (1, True)])
def test_sharing_a_gpu_is_advised_where_there_is_one(
    there: int, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(gpus: object) -> NoReturn:
        raise UsageError("no")

    monkeypatch.setattr(placement, "_open_gpus", refuse)
    monkeypatch.setattr(placement, "probe", lambda: Machine((None,) * there, None, None, None))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--device sim simulates several ranks") as caught:
        place("cuda", 2, None)
    assert ("--devices 0,0" in str(caught.value)) is advised


def test_simulated_ranks_end_with_the_first() -> None:
    placement = place("sim", 2, None)
    first, second = placement.devices
    buffer = second.zeros((4,), "u4")  # type: ignore[arg-type]
    close_all([device.close for device in placement.devices])
    with pytest.raises(QwenRawError, match="closed"):
        buffer.fill(1)
    first.close()


def test_closing_goes_on_after_a_failure() -> None:
    done = []

    def fail(message: str) -> None:
        raise QwenRawError(message)

    with pytest.raises(QwenRawError, match="first"):
        close_all([lambda: done.append(1), lambda: fail("first"), lambda: fail("second"), lambda: done.append(2)])
    assert done == [1, 2]


def test_a_simulated_draft_device_comes_after_the_ranks() -> None:
    placement = place("sim", 2, None, 2)
    assert [device.ordinal for device in placement.opened] == [0, 1, 2] and placement.draft is placement.opened[2]
    close_all([device.close for device in placement.opened])
    for wrong in (0, 1, 3):
        with pytest.raises(UsageError, match=f"draft device {wrong}: beside 2 simulated ranks it is 2: use 2$"):
            place("sim", 2, None, wrong)


def test_a_missing_draft_gpu_is_refused_and_the_others_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" too: a draft model's GPU is no reason to run on the CPU."""
    closed: list[int] = []

    class Gpu:
        def __init__(self, ordinal: int) -> None:
            if ordinal > 0:
                raise UsageError(f"there is no GPU {ordinal}: this machine has 1 GPU(s)")
            self.ordinal = ordinal

        def close(self) -> None:
            closed.append(self.ordinal)

    monkeypatch.setattr("qwen_raw.driver.device.CudaDevice", Gpu)
    with pytest.raises(UsageError, match=r"draft_device 7: there is no GPU 7: .*; it may be a rank's GPU too$"):
        place("auto", 2, [0, 0], 7)
    assert closed == [0, 0]
    same = place("auto", 1, None, 0)
    assert same.draft is not None and same.draft is not same.devices[0]
