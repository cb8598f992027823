"""Every mistake of tests/simt/kernels/bugs.cu is reported: what, in which argument, by which thread, and where."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_raw.device import F32, I32, U32
from qwen_raw.errors import QwenRawError
from qwen_raw.simt import run
from qwen_raw.simt.device import SimDevice
from qwen_raw.simt.native import SimError

pytestmark = pytest.mark.skipif(run.active(), reason="AddressSanitizer ends the process with reports of its own")
SOURCE = (Path(__file__).parent / "kernels" / "bugs.cu").read_text().splitlines()
NewDevice = Callable[..., SimDevice]
MODES: dict[str, dict[str, Any]] = {"plain": {}, "random": {"seed": 3}, "race": {"race": True}}


def line(text: str) -> str:
    """ "bugs.cu:12" of the only line that holds `text`."""
    (number,) = [i for i, content in enumerate(SOURCE, 1) if text in content]
    return f"bugs.cu:{number}"


def report_of(device: SimDevice, name: str, args: list[Any], threads: int = 32, blocks: int = 1, smem: int = 0) -> str:
    """The report of one launch that must fail."""
    with pytest.raises(SimError) as caught:
        device.launch(device.kernel("bugs", name), (blocks, 1, 1), (threads, 1, 1), args, smem=smem)
        device.synchronize()
    return str(caught.value)


@pytest.fixture(params=MODES.values(), ids=MODES.keys())
def device(request: pytest.FixtureRequest, new_device: NewDevice) -> SimDevice:
    return new_device(**request.param)


@pytest.fixture
def race(new_device: NewDevice) -> SimDevice:
    return new_device(race=True)


class TestBounds:
    def test_one_past_the_end_is_noticed_after_the_launch(self, new_device: NewDevice) -> None:
        device = new_device()
        report = report_of(device, "writes_past_the_end", [device.zeros((63,), F32), np.int32(63)], 64)
        assert "out of bounds: kernel writes_past_the_end wrote argument x + 252 (252 bytes)" in report

    def test_one_past_the_end_names_the_thread_under_race(self, race: SimDevice) -> None:
        report = report_of(race, "writes_past_the_end", [race.zeros((63,), F32), np.int32(63)], 32, 2)
        assert "out of bounds: write of 4 bytes at argument x + 252 (252 bytes)" in report
        assert "block (1,0,0), thread (31,0,0)" in report
        assert line("if (i <= n)") in report

    def test_page_past_the_end(self, device: SimDevice) -> None:
        x = device.zeros((64,), F32)
        report = report_of(device, "far_out_of_bounds", [device.empty((32,), F32), x, np.int32(100)])
        assert re.search(r"out of bounds: read of .*argument x \+ \d+ \(256 bytes\)", report)
        assert re.search(r"kernel far_out_of_bounds, block \(0,0,0\), thread \(\d+,0,0\)", report)
        assert line("x[threadIdx.x + n]") in report

    def test_before_the_start(self, race: SimDevice) -> None:
        report = report_of(race, "reads_before_the_start", [race.empty((32,), F32), race.zeros((32,), F32)])
        assert "read of 4 bytes at argument x - 4 (128 bytes)" in report
        assert "thread (0,0,0)" in report

    def test_a_view_is_its_own_bound(self, race: SimDevice) -> None:
        whole = race.zeros((128,), F32)
        report = report_of(race, "writes_past_the_end", [whole.view((63,), 32), np.int32(63)], 64)
        assert "write of 4 bytes at argument x + 252 (252 bytes)" in report

    def test_the_neighbour_does_not_hide_an_overrun(self, device: SimDevice) -> None:
        x, y = device.zeros((64,), F32), device.zeros((64,), F32)
        beyond = np.int64((y.ptr - x.ptr) // 4 - 1)
        assert "out of bounds" in report_of(device, "touches_another_argument", [x, y, beyond])

    def test_use_after_free(self, device: SimDevice) -> None:
        x, freed = device.zeros((32,), F32), device.zeros((32,), F32)
        holder = device.array(np.array([freed.ptr], np.uint64))
        del freed
        assert ", freed)" in report_of(device, "null_pointer", [x, holder.view((1,), 0)]).replace(
            "bytes, freed", "bytes, freed)"
        )

    def test_null_pointer(self, device: SimDevice) -> None:
        report = report_of(device, "null_pointer", [device.zeros((32,), F32), device.zeros((1,), np.dtype(np.uint64))])
        assert "outside all device memory" in report or "null pointer used as 'float'" in report

    def test_static_shared(self, race: SimDevice) -> None:
        report = report_of(race, "past_static_shared", [race.zeros((32,), F32)])
        assert "write of 4 bytes at shared s + 128 (128 bytes)" in report and "thread (31,0,0)" in report

    def test_dynamic_shared(self, device: SimDevice) -> None:
        report = report_of(device, "past_dynamic_shared", [device.zeros((32,), F32)], smem=128)
        assert "dynamic shared memory + 128 (128 bytes)" in report and "thread (31,0,0)" in report


class TestMemory:
    def test_unwritten_shared_memory(self, race: SimDevice) -> None:
        report = report_of(race, "reads_unwritten_shared", [race.zeros((32,), F32)])
        assert "uninitialised shared memory: read of shared s + 0 (128 bytes)" in report
        assert "thread (0,0,0)" in report and "bugs.cu:" in report

    def test_unwritten_shared_memory_is_nan(self, new_device: NewDevice) -> None:
        device = new_device()
        x = device.zeros((32,), F32)
        device.launch(device.kernel("bugs", "reads_unwritten_shared"), (1, 1, 1), (32, 1, 1), [x])
        assert np.isnan(x.download()).tolist() == [True] + [False] * 31

    def test_misaligned_pack(self, device: SimDevice) -> None:
        assert "misaligned 16-byte" in report_of(device, "misaligned_pack", [device.zeros((32,), U32)])

    def test_misaligned_dereference(self, race: SimDevice) -> None:
        report = report_of(race, "misaligned_dereference", [race.zeros((32,), U32)])
        assert "misaligned 16-byte access as 'const struct uint4': argument x + 4" in report
        assert line("*reinterpret_cast<const uint4*>(x + 1)") in report

    def test_too_much_static_shared_memory(self, device: SimDevice) -> None:
        report = report_of(device, "too_much_static_shared", [device.zeros((32,), F32)])
        assert "static shared memory: b brings the block to 72000 bytes, the limit is 49152" in report


class TestDivergence:
    @pytest.mark.parametrize(
        ("name", "threads", "expected"),
        [
            ("divergent_barriers", 64, r"barrier divergence: .* bugs.cu:\d+ and bugs.cu:\d+"),
            ("returns_before_a_barrier", 64, r"barrier divergence: .*returned"),
            ("shuffles_in_half_a_warp", 32, r"(lane missing|returned or does not exist)"),
            ("shuffles_against_a_barrier", 32, r"(lane missing: the thread is at __syncthreads|warp divergence)"),
            ("shuffles_in_two_places", 32, r"warp divergence: .*__shfl_xor_sync at bugs.cu:\d+ and __shfl_xor_sync"),
            ("shuffles_outside_its_mask", 32, r"lane \d+ reads lane 20, which is not in the mask 0x0000ffff"),
            ("lane_not_in_its_mask", 32, r"the calling lane is not in its own mask"),
            ("names_lanes_that_do_not_exist", 48, r"names a lane that has returned or does not exist"),
        ],
    )
    def test_divergence(self, device: SimDevice, name: str, threads: int, expected: str) -> None:
        report = report_of(device, name, [device.zeros((64,), F32)], threads)
        assert re.search(expected, report), report
        assert f"kernel {name}, block (0,0,0), thread (" in report


class TestDeadlock:
    def test_a_poll_that_nobody_answers(self, device: SimDevice) -> None:
        report = report_of(device, "polls_for_ever", [device.zeros((1,), U32)])
        assert "deadlock: no thread can go on" in report
        assert re.search(
            r"polls_for_ever, block \(0,0,0\): poll argument flag \+ 0 \(4 bytes\), bugs.cu:\d+ \[1 thread", report
        )
        assert re.search(r"wait at __syncthreads, bugs.cu:\d+ \[31 threads, \(1,0,0\)…\(31,0,0\)\]", report)

    def test_a_poll_over_several_addresses(self, device: SimDevice) -> None:
        assert "deadlock: no thread can go on" in report_of(
            device, "polls_two_flags_for_ever", [device.zeros((64,), U32)]
        )

    def test_repeated_loads_are_no_deadlock(self, device: SimDevice) -> None:
        flag = device.array(np.full(33, 2, np.uint32))
        device.launch(device.kernel("bugs", "reads_repeatedly"), (1, 1, 1), (32, 1, 1), [flag, np.int32(20)])
        assert flag.download().tolist() == [2] + [40] * 32

    def test_a_deadline_passes(self, device: SimDevice) -> None:
        args = [device.zeros((1,), U32), np.uint64(5 * 10**9)]
        assert "trap: the kernel ended the launch" in report_of(device, "polls_until_a_deadline", args)

    def test_more_blocks_than_the_device_holds(self, device: SimDevice) -> None:
        kernel = device.kernel("bugs", "grid_barrier")
        fits = 2 * device.sm_count
        device.launch(kernel, (fits, 1, 1), (1024, 1, 1), [device.zeros((1,), U32)])
        report = report_of(device, "grid_barrier", [device.zeros((1,), U32)], 1024, fits + 1)
        assert f"1 block(s) have not started; {fits} are resident, the device holds {fits}" in report


class TestFaults:
    def test_integer_division_by_zero(self, device: SimDevice) -> None:
        report = report_of(device, "divides_by_zero", [device.zeros((32,), I32)])
        assert "integer division by zero" in report and "kernel divides_by_zero" in report

    @pytest.mark.parametrize(
        ("name", "value", "expected", "code"),
        [
            ("shifts_too_far", 33, "shift by", "1 << x[0]"),
            ("overflows_an_int", 2**31 - 1, "signed addition overflows", "x[0] + 1"),
            ("indexes_past_a_row", 4, "array index 4 is out of bounds of 'float [4]'", "s[0][x[0]]"),
            ("divides_by_zero", 0, "integer division by zero", "7 / x[threadIdx.x]"),
        ],
    )
    def test_undefined_behaviour(self, race: SimDevice, name: str, value: int, expected: str, code: str) -> None:
        report = report_of(race, name, [race.array(np.full(32, value, np.int32))], 1)
        assert expected in report and f"kernel {name}, block (0,0,0), thread (0,0,0), at {line(code)}" in report

    def test_stack_overflow(self, device: SimDevice) -> None:
        assert "stack overflow" in report_of(device, "overflows_its_stack", [device.zeros((32,), F32)])

    def test_assertion(self, device: SimDevice) -> None:
        report = report_of(device, "asserts", [device.array(np.arange(32, dtype=np.int32))])
        assert "assertion failed: x[threadIdx.x] == 0" in report

    def test_trap(self, device: SimDevice) -> None:
        assert "trap: the kernel ended the launch" in report_of(device, "traps", [device.array(np.ones(1, np.int32))])

    def test_dependent_launch_without_wait(self, device: SimDevice) -> None:
        x = device.zeros((32,), I32)
        kernel = device.kernel("bugs", "never_waits_for_its_predecessor")
        with pytest.raises(SimError, match=r"no thread of it executed griddepcontrol\.wait"):
            device.launch(kernel, (1, 1, 1), (32, 1, 1), [x], pdl=True)

    def test_a_failed_device_says_so(self, device: SimDevice) -> None:
        x = device.array(np.ones(1, np.int32))
        report_of(device, "traps", [x])
        with pytest.raises(QwenRawError, match="failed earlier: trap"):
            x.download()


class TestRefusedLaunches:
    @pytest.mark.parametrize(
        ("grid", "block", "smem", "expected"),
        [
            ((1, 1, 1), (33, 1, 1), 0, "compiled for at most 32 threads a block"),
            ((1, 1, 1), (2048, 1, 1), 0, "at most 1024 threads"),
            ((1, 1, 1), (1, 1, 65), 0, "64"),
            ((1, 70000, 1), (32, 1, 1), 0, "65535"),
            ((0, 1, 1), (32, 1, 1), 0, "at least 1"),
            ((1, 1, 1), (32, 1, 1), 228 << 10, "the limit is 232448 bytes"),
        ],
    )
    def test_geometry(self, new_device: NewDevice, grid: Any, block: Any, smem: int, expected: str) -> None:
        device = new_device()
        args = [device.zeros((32,), I32), np.int32(0), np.float32(0)]
        with pytest.raises(QwenRawError, match=expected):
            device.launch(device.kernel("bugs", "nothing"), grid, block, args, smem=smem)

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({0: np.int32(1)}, "is a pointer"),
            ({0: "float"}, "points to int32, got a buffer of float32"),
            ({1: np.float32(1)}, "is a signed integer of 4 bytes, got float32"),
            ({1: np.int64(1)}, "takes 4 bytes, got 8"),
            ({2: np.int32(1)}, "is a float of 4 bytes, got int32"),
            ({2: None}, "takes 3 arguments"),
        ],
    )
    def test_arguments(self, new_device: NewDevice, change: dict[int, Any], expected: str) -> None:
        device = new_device()
        args: list[Any] = [device.zeros((32,), I32), np.int32(0), np.float32(0)]
        for index, value in change.items():
            args[index] = device.zeros((32,), F32) if isinstance(value, str) else value
        with pytest.raises(QwenRawError, match=expected):
            launched = [a for a in args if a is not None]
            device.launch(device.kernel("bugs", "nothing"), (1, 1, 1), (32, 1, 1), launched)

    def test_memory_of_another_simulator(self, new_device: NewDevice) -> None:
        one, other = new_device(), new_device()
        args = [other.zeros((32,), I32), np.int32(0), np.float32(0)]
        with pytest.raises(QwenRawError, match="not memory of this simulator"):
            one.launch(one.kernel("bugs", "nothing"), (1, 1, 1), (32, 1, 1), args)
