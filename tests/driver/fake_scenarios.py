"""Scenarios of test_fake_driver.py. Run as: fake_scenarios.py LIBRARY NAME."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from typing import Any

import numpy as np

from qwen_raw.device import F32, I32, U32
from qwen_raw.driver.check import DriverError
from qwen_raw.driver.device import CudaDevice
from qwen_raw.driver.launch import CudaKernel, ParamLayout
from qwen_raw.driver.probe import peer_paths, probe
from qwen_raw.driver.stream import Wait
from qwen_raw.errors import QwenRawError, UnavailableError, UsageError

FORBIDDEN_IN_CAPTURE = ("cuMemAlloc_v2", "cuMemFree_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2")


class Fake:
    """The fake library's own functions."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)  # the bindings now find this one by its soname
        self.library.fake_log.restype = ctypes.c_char_p

    def expect(self, *lines: str) -> None:
        """Asserts that exactly these calls were made since the last time."""
        calls = self.calls()
        assert calls == list(lines), calls

    def calls(self) -> list[str]:
        """What has been asked since the last time."""
        lines = self.library.fake_log().decode().splitlines()
        self.library.fake_clear()
        return [line.strip() for line in lines]

    def fail(self, name: str, status: int) -> None:
        """Makes the next call of `name` return `status`."""
        self.library.fake_fail(name.encode(), status)


class Function(ctypes.Structure):
    """What the fake takes for a kernel."""

    _fields_ = (("count", ctypes.c_int), ("size", ctypes.c_int * 8))


def kernel(device: CudaDevice, sizes: tuple[int, ...] = (8, 4), static_smem: int = 0) -> CudaKernel:
    """A kernel with parameters of these sizes."""
    function = Function(len(sizes), sizes)
    return CudaKernel(
        name="fake",
        context=device.context,
        function=device.context.driver.CUfunction(ctypes.addressof(function)),
        layout=ParamLayout("fake", sizes),
        max_threads=256,
        static_smem=static_smem,
        registers=32,
        keep=function,
    )


def raises(kind: type[QwenRawError], text: str, action: Any) -> None:
    """Asserts that `action` raises exactly `kind` with `text` in its message."""
    try:
        action()
    except QwenRawError as error:
        assert type(error) is kind and text in str(error), f"{error!r} instead of {text!r}"
    else:
        raise AssertionError(f"no error with {text!r}")


def launch(device: CudaDevice, k: CudaKernel, args: list[Any], **options: Any) -> None:
    device.launch(k, (4, 2, 1), (64, 1, 1), args, **options)


def scenario_copies(fake: Fake) -> None:
    device = CudaDevice(0)
    assert (device.arch, device.sm_count, device.smem_per_block) == ("sm_90a", 132, 232448)
    x = device.array(np.arange(10, dtype=np.int32))
    x.view((3,), 2).fill(255)
    assert x.download().tolist() == [0, 1, -1, -1, -1, 5, 6, 7, 8, 9]
    assert device.host_syncs == 1
    device.zeros((1 << 15,), I32).upload(np.zeros(1 << 15, np.int32))
    assert device.host_syncs == 3  # a large upload, and the free of the temporary buffer
    raises(QwenRawError, "would take bytes 20…44 of a buffer of 40", lambda: x.view((6,), 5))
    raises(QwenRawError, "upload of float32[10] into a buffer of int32[10]", lambda: x.upload(np.zeros(10, np.float32)))


def scenario_frees_each_piece_once(fake: Fake) -> None:
    device = CudaDevice(0)
    fake.calls()
    x = device.empty((4,), I32)
    view = x.view((2,), 1)
    kept = device.empty((4,), I32)
    del x
    gc.collect()
    assert "cuMemFree_v2 0" not in fake.calls()  # the view needs it
    del view
    gc.collect()
    fake.expect("cuMemFree_v2 0")
    ring = device.host_ring(2)
    ring.words[0] = 7
    device.close()
    device.close()
    calls = fake.calls()
    assert calls.count("cuMemFree_v2 0") == 1 and calls.count("cuMemFreeHost 0") == 1
    assert calls[-2:] == ["cuStreamDestroy_v2", "cuDevicePrimaryCtxRelease_v2 0"]
    assert ring.words.tolist() == [7, 0]
    raises(QwenRawError, "used after its memory was freed", kept.download)
    raises(QwenRawError, "GPU 0 was closed", lambda: device.empty((1,), I32))
    del kept, ring
    gc.collect()
    fake.expect()


def scenario_nothing_is_collected_while_ranks_are_queued(fake: Fake) -> None:
    """A free waits for what runs: for a rank that waits for one that has nothing queued yet."""
    device, earlier = CudaDevice(0), CudaDevice(1)
    cycle: list[Any] = [earlier.empty((4,), I32)]
    cycle.append(cycle)
    gc.set_threshold(1)
    fake.calls()
    with device.queueing(), device.queueing():
        del cycle
        assert len([[] for _ in range(1000)]) == 1000  # enough for a collection
        assert "cuMemFree_v2 1" not in fake.calls()
    assert gc.isenabled() and len([[] for _ in range(1000)]) == 1000
    gc.collect()
    assert "cuMemFree_v2 1" in fake.calls()


def scenario_launch(fake: Fake) -> None:
    device = CudaDevice(0)
    k = kernel(device, (8, 4, 8, 12))
    x = device.zeros((4,), I32)
    fake.calls()
    args = [x, np.int32(-2), np.float64(1.5), np.arange(3, dtype=np.int32)]
    packed = f"{x.ptr.to_bytes(8, 'little').hex()} feffffff 000000000000f83f 000000000100000002000000"
    launch(device, k, args)
    launch(device, k, args, smem=60000, pdl=True, cluster=(2, 1, 1))
    launch(device, k, args, smem=50000)
    geometry = "cuLaunchKernelEx grid 4,2,1 block 64,1,1"
    fake.expect(
        f"{geometry} smem 0 params {packed}",
        "cuFuncSetAttribute 8 60000",  # once: 50000 is within it
        f"{geometry} smem 60000 attribute 6=1 cluster 2,1,1 params {packed}",
        f"{geometry} smem 50000 params {packed}",
    )
    device.pdl = False  # before sm_90 there is no such attribute
    launch(device, k, args, pdl=True)
    fake.expect(f"{geometry} smem 0 params {packed}")


def scenario_launch_refuses(fake: Fake) -> None:
    device, other = CudaDevice(0), CudaDevice(1)
    k, x, theirs = kernel(device), device.zeros((4,), I32), other.zeros((4,), I32)
    one = np.int32(1)
    fake.calls()
    raises(QwenRawError, "takes 2 arguments, 1 were given", lambda: launch(device, k, [x]))
    raises(QwenRawError, "argument 1: int 1 has no fixed size", lambda: launch(device, k, [x, 1]))
    raises(QwenRawError, "argument 1: float 1.0 has no fixed size", lambda: launch(device, k, [x, 1.0]))
    raises(QwenRawError, "has 8 bytes, the kernel's parameter 4", lambda: launch(device, k, [x, np.int64(1)]))
    raises(QwenRawError, "enable peer access first", lambda: launch(device, k, [theirs, one]))
    raises(QwenRawError, "(fake on GPU 0) was launched on GPU 1", lambda: launch(other, k, [theirs, one]))
    raises(QwenRawError, "232449 dynamic", lambda: launch(device, k, [x, one], smem=232449))
    raises(QwenRawError, "not a multiple of the cluster", lambda: launch(device, k, [x, one], cluster=(3, 1, 1)))
    for grid, block in (((0, 1, 1), (1, 1, 1)), ((1, 65536, 1), (1, 1, 1)), ((1, 1, 1), (257, 1, 1))):
        raises(QwenRawError, "fake: ", lambda g=grid, b=block: device.launch(k, g, b, [x, one]))
    fake.expect()  # the driver was never asked
    device.enable_peer(other)
    device.enable_peer(other)
    launch(device, k, [theirs, one])
    launch(device, k, [other.host_ring(1).buffer, one])  # pinned memory is everyone's
    calls = fake.calls()
    assert calls.count("cuCtxEnablePeerAccess 0 1") == 1 and sum(c.startswith("cuLaunch") for c in calls) == 2


def scenario_devices_on_one_gpu(fake: Fake) -> None:
    """They address each other's memory without being asked to, and leave each other's shared memory limits alone."""
    first, second = CudaDevice(0), CudaDevice(0)
    mine, theirs = kernel(first), kernel(second)
    first.enable_peer(second)
    x, one = first.zeros((4,), I32), np.int32(1)
    fake.calls()
    launch(second, theirs, [x, one])
    assert [c.split()[0] for c in fake.calls()] == ["cuLaunchKernelEx"]
    launch(first, mine, [x, one], smem=100_000)
    launch(second, theirs, [x, one], smem=60_000)
    assert [c for c in fake.calls() if c.startswith("cuFuncSet")] == ["cuFuncSetAttribute 8 100000"]
    raises(QwenRawError, "was launched on GPU 0", lambda: launch(second, mine, [x, one]))
    first.close()
    raises(QwenRawError, "after its memory was freed", lambda: launch(second, theirs, [x, one]))
    assert second.zeros((4,), I32).ptr  # closing one leaves the other


def scenario_rehearsal(fake: Fake) -> None:
    device = CudaDevice(0)
    k, x = kernel(device), device.zeros((4,), I32)
    fake.calls()
    with device.rehearsing():
        launch(device, k, [x, np.int32(1)])
        raises(QwenRawError, "arguments", lambda: launch(device, k, [x]))
    fake.expect()
    launch(device, k, [x, np.int32(1)])
    assert any(c.startswith("cuLaunchKernelEx") for c in fake.calls())


def scenario_capture(fake: Fake) -> None:
    device = CudaDevice(0)
    k, x, doomed = kernel(device), device.zeros((4,), I32), device.zeros((8,), I32)
    syncs = device.host_syncs
    fake.calls()
    with device.capture() as capture:
        launch(device, k, [x, np.int32(1)])
        x.fill(0)
        raises(QwenRawError, "only after the capture", lambda: capture.graph)
        del doomed
        gc.collect()  # a free is forbidden here: it waits
        raises(QwenRawError, "starting a capture while", lambda: device.capture().__enter__())
    calls = fake.calls()
    end = calls.index("cuStreamEndCapture")
    assert calls[0] == "cuStreamBeginCapture_v2 1"  # thread-local
    assert not [c for c in calls[:end] if c.split()[0] in FORBIDDEN_IN_CAPTURE]
    assert "cuMemFree_v2 0" in calls[end:]
    assert device.host_syncs == syncs + 1  # the late free
    where = x.ptr
    del x
    gc.collect()
    fake.expect()  # the graph holds the buffer
    capture.graph.launch()
    capture.graph.close()
    capture.graph.close()
    gc.collect()
    fake.expect("cuGraphLaunch", "cuStreamSynchronize", "cuGraphExecDestroy", "cuMemFree_v2 0")
    raises(QwenRawError, "after close()", capture.graph.launch)
    assert where


def scenario_loop(fake: Fake) -> None:
    device = CudaDevice(0)
    k, buffers = kernel(device), [device.zeros((4,), I32)]
    handles = []

    def part(handle: np.ndarray[Any, Any]) -> None:
        handles.append(handle.tolist())
        launch(device, k, [*buffers, np.int32(len(handles))])
        raises(QwenRawError, "starting a capture while", lambda: device.capture_loop(part, part))

    fake.calls()
    graph = device.capture_loop(part, part)
    assert handles == [[0x77], [0x77]]
    calls = [call.split(" params")[0] for call in fake.calls()]
    queued = "cuLaunchKernelEx grid 4,2,1 block 64,1,1 smem 0"
    assert calls == [
        "cuGraphCreate 0",
        "cuGraphConditionalHandleCreate 0 0 1",  # as each replay begins: not to go on
        "cuStreamBeginCaptureToGraph 1",
        queued,
        "cuStreamEndCapture",
        "cuGraphAddNode_v2 after 3 type 13 handle 0x77 kind 1 size 1 context 0",
        "cuStreamBeginCaptureToGraph 1",
        queued,
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags 0",
        "cuGraphDestroy",  # the template alone: the body is the node's
    ], calls
    owner = weakref.ref(buffers.pop().owner)
    gc.collect()
    assert owner() is not None  # the graph needs it
    graph.launch()
    graph.close()
    fake.expect("cuGraphLaunch", "cuStreamSynchronize", "cuGraphExecDestroy", "cuMemFree_v2 0")


def scenario_loop_fails(fake: Fake) -> None:
    device = CudaDevice(0)
    k, x = kernel(device), device.zeros((4,), I32)

    def works(handle: np.ndarray[Any, Any]) -> None:
        launch(device, k, [x, np.int32(1)])

    def waits(handle: np.ndarray[Any, Any]) -> None:
        device.synchronize()

    for begin, body in ((waits, works), (works, waits)):
        fake.calls()
        raises(QwenRawError, "while a graph is being captured", lambda b=begin, w=body: device.capture_loop(b, w))
        calls = fake.calls()
        assert calls[-2:] == ["cuStreamEndCapture", "cuGraphDestroy"] and calls.count("cuGraphDestroy") == 1, calls
    for name in ("cuGraphConditionalHandleCreate", "cuGraphAddNode_v2", "cuStreamBeginCaptureToGraph"):
        fake.fail(name, 801)  # not supported
        raises(UnavailableError, name.removesuffix("_v2"), lambda: device.capture_loop(works, works))
        assert fake.calls().count("cuGraphDestroy") == 1
        fake.fail(name, 1)
        raises(DriverError, name.removesuffix("_v2"), lambda: device.capture_loop(works, works))
        assert fake.calls().count("cuGraphDestroy") == 1
    with device.capture():
        launch(device, k, [x, np.int32(1)])
    fake.library.fake_version(12030)
    raises(UnavailableError, "of CUDA 12.3, loops begin with 12.4", lambda: device.capture_loop(works, works))


def scenario_capture_refuses(fake: Fake) -> None:
    device = CudaDevice(0)
    x, event = device.zeros((4,), I32), device.event()
    actions = {
        "allocating memory": lambda: device.empty((4,), I32),
        "allocating pinned memory": lambda: device.host_ring(1),
        "uploading": lambda: x.upload(np.zeros(4, np.int32)),
        "downloading": x.download,
        "Stream.synchronize": device.synchronize,
        "Event.synchronize": event.synchronize,
        "loading embed.embed_bf16": lambda: device.kernel("embed", "embed_bf16"),
        "asking whether the stream is idle": device.idle,
    }
    for what, action in actions.items():
        fake.calls()

        def attempt(action: Any = action) -> None:
            with device.capture():
                action()

        raises(QwenRawError, f"{what} while a graph is being captured on GPU 0", attempt)
        fake.expect("cuStreamBeginCapture_v2 1", "cuStreamEndCapture", "cuGraphDestroy")
    x.download()


def scenario_other_device_is_freed_during_capture(fake: Fake) -> None:
    device, other = CudaDevice(0), CudaDevice(1)
    doomed = other.empty((4,), I32)
    fake.calls()
    with device.capture():
        del doomed
        gc.collect()
    assert "cuMemFree_v2 1" in fake.calls()  # the fake refuses it with 900 unless the thread's mode is relaxed


def scenario_streams(fake: Fake) -> None:
    device = CudaDevice(0)
    word = device.zeros((2,), U32)
    begin, end, untimed = device.event(), device.event(), device.event(timing=False)
    fake.calls()
    begin.record(device.stream)
    end.record(device.stream)
    assert end.elapsed_ms(begin) == 1.5 and device.host_syncs == 1
    raises(QwenRawError, "timing=True", lambda: end.elapsed_ms(untimed))
    device.stream.wait_event(end)
    device.stream.wait_value32(word.ptr, 0x7FFFFFFF, Wait.AND)
    device.stream.write_value32(word.ptr + 4, 7)
    assert fake.calls()[3:] == [
        "cuStreamWaitEvent 0",
        "cuStreamWaitValue32_v2 2147483647 2",
        "cuStreamWriteValue32_v2 7 0",
    ]
    assert word.download().tolist() == [0, 7]
    fake.calls()
    raises(QwenRawError, "multiple of 4", lambda: device.stream.write_value32(word.ptr + 2, 7))
    raises(QwenRawError, "32 unsigned bits", lambda: device.stream.write_value32(word.ptr, -1))
    raises(QwenRawError, "cannot flush", lambda: device.stream.wait_value32(word.ptr, 1, Wait.EQ | Wait.FLUSH))
    fake.expect()
    fake.fail("cuStreamQuery", 600)
    assert not device.idle()
    assert device.idle()
    fake.fail("cuEventQuery", 700)
    raises(DriverError, "cuEventQuery(CUevent", end.done)


def scenario_errors(fake: Fake) -> None:
    device = CudaDevice(0)
    k, x = kernel(device), device.zeros((4,), I32)
    fake.fail("cuMemAlloc_v2", 2)
    raises(QwenRawError, "4.00 GiB wanted, 0.50 of 1.00 GiB free", lambda: device.empty((1 << 30,), F32))
    fake.fail("cuMemAlloc_v2", 1)
    raises(DriverError, "cuMemAlloc(4096) failed: CUDA_ERROR_INVALID_VALUE (invalid argument)",
           lambda: device.empty((1024,), F32))  # fmt: skip
    fake.fail("cuLaunchKernelEx", 1)
    raises(DriverError, "fake, grid (4, 2, 1), block (64, 1, 1)", lambda: launch(device, k, [x, np.int32(1)]))
    fake.fail("cuStreamSynchronize", 719)
    raises(DriverError, "in a kernel that was queued earlier", x.download)


def scenario_lost_context(fake: Fake) -> None:
    device = CudaDevice(0)
    x = device.zeros((4,), I32)
    fake.calls()
    fake.fail("cuStreamSynchronize", 700)
    raises(DriverError, "CUDA_ERROR_ILLEGAL_ADDRESS", device.close)
    device.close()
    raises(QwenRawError, "used after its memory was freed", x.download)
    del x
    gc.collect()
    fake.expect("cuStreamSynchronize")  # nothing is freed in a context that is gone
    try:
        with CudaDevice(0):
            fake.fail("cuStreamSynchronize", 700)
            raise QwenRawError("the block's own")
    except QwenRawError as error:
        assert str(error) == "the block's own"


def scenario_no_gpu(fake: Fake) -> None:
    fake.library.fake_devices(0)
    raises(UsageError, "no NVIDIA GPU is visible to this process", lambda: CudaDevice(0))
    assert probe().gpus == () and "no NVIDIA GPU is visible" in (probe().problem or "")
    fake.library.fake_devices(1)
    raises(UsageError, "there is no GPU 1: this machine has 1 GPU(s)", lambda: CudaDevice(1))


def scenario_compiler_newer_than_driver(fake: Fake) -> None:
    device = CudaDevice(0)
    device._cuda_version = 11080
    raises(
        UsageError,
        "update the driver, or install the packages of CUDA 11",
        lambda: device.kernel("embed", "embed_bf16"),
    )


def scenario_probe(fake: Fake) -> None:
    machine = probe()
    assert [g.peers for g in machine.gpus] == [(1,), (0,)] and machine.cuda == "13.0" and machine.problem is None
    assert machine.gpus[1].name == "Fake GPU" and machine.gpus[1].capability == (9, 0)
    paths = peer_paths([1, 0])
    assert [(p.source, p.target, p.access, p.native_atomics, p.performance_rank) for p in paths] == [
        (1, 0, True, True, 0),
        (0, 1, True, True, 0),
    ]
    assert not [c for c in fake.calls() if "Ctx" in c]


if __name__ == "__main__":
    library, name = sys.argv[1:]
    globals()[name](Fake(library))
    print(name, "passed")
