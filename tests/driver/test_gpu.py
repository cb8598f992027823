"""The driver layer on a real GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen_raw
from qwen_raw.comm.lead import HELD
from qwen_raw.device import F32, I32, U32, U64
from qwen_raw.driver.device import CudaDevice
from qwen_raw.driver.stream import Stream, Wait
from qwen_raw.errors import QwenRawError

pytestmark = pytest.mark.gpu

HOLD_S = 0.5
HALF = 1 << 29  # of the memory that a test takes: others on this GPU take and give some back meanwhile
KERNELS = r"""
struct Pair { int a; double b; char c[5]; };
extern "C" __global__ void __launch_bounds__(64)
echo(unsigned char* out, int i, unsigned u, long long l, float f, double d, unsigned char b, unsigned short h, Pair p) {
  if (threadIdx.x || blockIdx.x) return;
  unsigned char* at = out;
  auto put = [&](const void* v, int n) { for (int k = 0; k < n; k++) *at++ = ((const unsigned char*)v)[k]; };
  put(&i, 4); put(&u, 4); put(&l, 8); put(&f, 4); put(&d, 8); put(&b, 1); put(&h, 2);
  put(&p.a, 4); put(&p.b, 8); put(p.c, 5);
}
extern "C" __global__ void add(int* x, int n, int v) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += v;
}
extern "C" __global__ void post(unsigned long long* ring, int slot, unsigned long long v) {
  *(volatile unsigned long long*)(ring + slot) = v;
  __threadfence_system();
}
extern "C" __global__ void dynamic(int* out, int words) {
  extern __shared__ int s[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) s[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) out[0] = s[words - 1];
}
extern "C" __global__ void ranks(int* out) {
  unsigned r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  if (threadIdx.x == 0) out[blockIdx.x] = r;
}
// Each link of a chain: starts early, waits for the one before, adds its value to all.
extern "C" __global__ void link(int* x, int n, int v) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = x[i] * 3 + v;
}
extern "C" __global__ void fail() { asm volatile("trap;"); }
extern "C" __global__ void spin(long long ns) {
  long long t, end;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  end = t + ns;
  while (t < end) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
}
"""
PAIR = np.dtype([("a", np.int32), ("b", np.float64), ("c", np.uint8, 5)], align=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the test's kernels."""
    root = tmp_path_factory.mktemp("cuda_src")
    (root / "probe.cu").write_text(KERNELS)
    return root


@pytest.fixture
def run(cuda_device: CudaDevice, sources: Path) -> Any:
    """run(name, grid, block, args, …): launches one of the kernels above."""

    def launch(name: str, grid: int, block: int, args: list[Any], **options: Any) -> None:
        kernel = cuda_device.kernel("probe", name, sources)
        cuda_device.launch(kernel, (grid, 1, 1), (block, 1, 1), args, **options)

    return launch


@pytest.mark.parametrize("count", [0, 1, 3, 16384, 16385, 3_000_001])
def test_round_trip(cuda_device: CudaDevice, count: int) -> None:
    host = np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)
    device = cuda_device.array(host)
    host_before = host.copy()
    host[:] = 0  # the copy has been taken
    np.testing.assert_array_equal(device.download(), host_before)


def test_views_share_memory(cuda_device: CudaDevice) -> None:
    whole = cuda_device.zeros((8, 16), I32)
    whole.view((2, 16), 3 * 16).upload(np.full((2, 16), 7, np.int32))
    whole.view((4,), 0, F32).fill(0x3F)
    expected = np.zeros((8, 16), np.int32)
    expected[3:5] = 7
    expected.reshape(-1)[:4] = 0x3F3F3F3F
    view = whole.view((8, 16))
    del whole
    gc.collect()
    np.testing.assert_array_equal(view.download(), expected)


def test_memory_comes_back(cuda_device: CudaDevice) -> None:
    gc.collect()
    free = cuda_device.memory_info()[0]
    buffer = cuda_device.empty((1 << 28,), U32)
    assert cuda_device.memory_info()[0] <= free - HALF
    view = buffer.view((1,))
    del buffer
    assert cuda_device.memory_info()[0] <= free - HALF
    del view
    assert cuda_device.memory_info()[0] >= free - HALF


def test_out_of_memory_says_how_much(cuda_device: CudaDevice) -> None:
    with pytest.raises(QwenRawError, match=r"out of memory: 16384\.00 GiB wanted, .* GiB free"):
        cuda_device.empty((1 << 44,), np.dtype(np.uint8))


def test_every_kind_of_argument(cuda_device: CudaDevice, run: Any) -> None:
    out = cuda_device.zeros((48,), np.dtype(np.uint8))
    pair = np.zeros(1, PAIR)
    pair[0] = (-9, 2.5, [1, 2, 3, 4, 5])
    scalars = [np.int32(-2), np.uint32(2**32 - 3), np.int64(-(2**40)), np.float32(0.1), np.float64(0.1)]
    scalars += [np.uint8(200), np.uint16(0x3F80)]
    run("echo", 2, 64, [out, *scalars, pair])
    expected = b"".join(s.tobytes() for s in scalars) + b"".join(pair[0][f].tobytes() for f in PAIR.names or ())
    assert out.download().tobytes()[: len(expected)] == expected


def test_launch_refuses_what_the_kernel_does_not_take(cuda_device: CudaDevice, run: Any) -> None:
    x = cuda_device.zeros((64,), I32)
    for args, text in (
        ([x, np.int32(64)], "takes 3 arguments, 2 were given"),
        ([x, 64, np.int32(1)], r"argument 1: int 64 has no fixed size"),
        ([x, np.int64(64), np.int32(1)], "argument 1: .* has 8 bytes, the kernel's parameter 4"),
    ):
        with pytest.raises(QwenRawError, match=text):
            run("add", 1, 64, args)
    with pytest.raises(QwenRawError, match=r"128 threads, 1…64 are legal"):
        types = (np.int32, np.uint32, np.int64, np.float32, np.float64, np.uint8, np.uint16)
        run("echo", 1, 128, [x, *(kind(0) for kind in types), np.zeros(1, PAIR)])
    assert not x.download().any()


def test_dynamic_shared_memory_above_48_kib(cuda_device: CudaDevice, run: Any) -> None:
    out = cuda_device.zeros((1,), I32)
    for nbytes in (1024, cuda_device.smem_per_block, 64 << 10):
        run("dynamic", 1, 128, [out, np.int32(nbytes // 4)], smem=nbytes)
        assert out.download()[0] == nbytes // 4 - 1
    with pytest.raises(QwenRawError, match="a block of this GPU has"):
        run("dynamic", 1, 128, [out, np.int32(1)], smem=cuda_device.smem_per_block + 4)


def test_cluster(cuda_device: CudaDevice, run: Any) -> None:
    if not cuda_device.pdl:
        pytest.skip("clusters need sm_90")
    out = cuda_device.zeros((8,), I32)
    run("ranks", 8, 32, [out], cluster=(4, 1, 1))
    np.testing.assert_array_equal(out.download(), [0, 1, 2, 3] * 2)


@pytest.mark.parametrize("captured", [False, True])
def test_dependent_launches_stay_in_order(cuda_device: CudaDevice, run: Any, captured: bool) -> None:
    if not cuda_device.pdl:
        pytest.skip("programmatic dependent launch needs sm_90")
    n = 100_000
    x = cuda_device.zeros((n,), I32)

    def chain() -> None:
        for v in range(12):
            run("link", n // 256 + 1, 256, [x, np.int32(n), np.int32(v)], pdl=True)

    if captured:
        with cuda_device.capture() as capture:
            chain()
        capture.graph.launch()
    else:
        chain()
    expected = 0
    for v in range(12):
        expected = expected * 3 + v
    np.testing.assert_array_equal(x.download(), np.full(n, expected, np.int32))


def test_graph_replays_and_keeps_its_buffers(cuda_device: CudaDevice, run: Any) -> None:
    n, rounds = 1 << 20, 5
    total = cuda_device.zeros((n,), I32)
    scratch = cuda_device.array(np.full(n, 1, np.int32))
    run("add", n // 256, 256, [total, np.int32(n), np.int32(0)])  # loads the kernel
    with cuda_device.capture() as capture:
        run("add", n // 256, 256, [scratch, np.int32(n), np.int32(1)])
        run("add", n // 256, 256, [total, np.int32(n), np.int32(2)])
    where = scratch.ptr
    del scratch
    gc.collect()
    others = [cuda_device.array(np.full(n, 7, np.int32)) for _ in range(3)]  # would land on freed memory
    assert all(other.ptr != where for other in others)
    for _ in range(rounds):
        capture.graph.launch()
    np.testing.assert_array_equal(total.download(), np.full(n, 2 * rounds, np.int32))
    for other in others:
        np.testing.assert_array_equal(other.download(), np.full(n, 7, np.int32))
    capture.graph.close()
    capture.graph.close()
    with pytest.raises(QwenRawError, match="after close"):
        capture.graph.launch()


def test_a_rehearsal_runs_nothing(cuda_device: CudaDevice, run: Any) -> None:
    x = cuda_device.zeros((256,), I32)
    cuda_device._kernels.clear()
    with cuda_device.rehearsing():
        run("add", 1, 256, [x, np.int32(256), np.int32(1)])
    assert not x.download().any() and cuda_device._kernels
    run("add", 1, 256, [x, np.int32(256), np.int32(1)])
    assert (x.download() == 1).all()


def test_capture_refuses_before_the_driver_does(cuda_device: CudaDevice, run: Any) -> None:
    x = cuda_device.zeros((4,), I32)
    forbidden = {
        "allocating memory": lambda: cuda_device.empty((4,), I32),
        "allocating pinned memory": lambda: cuda_device.host_ring(4),
        "uploading": lambda: x.upload(np.zeros(4, np.int32)),
        "downloading": x.download,
        "Stream.synchronize": cuda_device.synchronize,
        "loading probe.post": lambda: run("post", 1, 1, []),
    }
    cuda_device._kernels.clear()
    for text, action in forbidden.items():
        with pytest.raises(QwenRawError, match=f"{text} while a graph is being captured"), cuda_device.capture():
            action()
        x.fill(0)  # the stream is in order again
        assert not x.download().any()


def test_garbage_collected_during_capture(cuda_device: CudaDevice, run: Any) -> None:
    x = cuda_device.zeros((256,), I32)
    run("add", 1, 256, [x, np.int32(256), np.int32(0)])
    free = cuda_device.memory_info()[0]
    doomed = cuda_device.empty((1 << 28,), U32)
    with cuda_device.capture() as capture:
        run("add", 1, 256, [x, np.int32(256), np.int32(1)])
        del doomed
        gc.collect()
    capture.graph.launch()
    assert (x.download() == 1).all()
    assert cuda_device.memory_info()[0] >= free - HALF


def test_host_ring_is_seen_without_waiting(cuda_device: CudaDevice, run: Any) -> None:
    ring = cuda_device.host_ring(8)
    assert not ring.words.any()
    before = cuda_device.host_syncs
    for slot in range(8):
        run("post", 1, 1, [ring.buffer, np.int32(slot), np.uint64(slot + (1 << 40))])
    deadline = time.monotonic() + 10
    while int(ring.words[7]) == 0 and time.monotonic() < deadline:
        pass
    assert ring.words.tolist() == [slot + (1 << 40) for slot in range(8)]
    assert cuda_device.host_syncs == before
    words = ring.words
    del ring
    gc.collect()
    assert words[3] == 3 + (1 << 40)  # the array keeps the memory


def test_host_waits_are_counted(cuda_device: CudaDevice) -> None:
    x = cuda_device.zeros((32 << 10,), I32)
    small = cuda_device.zeros((16 << 10,), I32)
    event = cuda_device.event()

    def counted(action: Any) -> int:
        before = cuda_device.host_syncs
        action()
        return cuda_device.host_syncs - before

    event.record(cuda_device.stream)
    assert counted(lambda: small.upload(np.zeros(16 << 10, np.int32))) == 0
    assert counted(lambda: x.upload(np.zeros(32 << 10, np.int32))) == 1
    assert counted(x.download) == 1
    assert counted(cuda_device.synchronize) == 1
    assert counted(event.synchronize) == 1
    assert counted(lambda: (x.fill(1), event.record(cuda_device.stream), event.done(), cuda_device.idle())) == 0


def test_idle_and_elapsed_time(cuda_device: CudaDevice, run: Any) -> None:
    begin, end = cuda_device.event(), cuda_device.event()
    run("spin", 1, 1, [np.int64(0)])
    cuda_device.synchronize()
    begin.record(cuda_device.stream)
    run("spin", 1, 1, [np.int64(50_000_000)])
    end.record(cuda_device.stream)
    assert not cuda_device.idle() and not end.done()
    assert 49 <= end.elapsed_ms(begin) <= 200
    assert cuda_device.idle() and end.done()
    begin.close()
    end.close()
    end.close()


def test_stream_memory_operations(cuda_device: CudaDevice, sources: Path) -> None:
    other = Stream(cuda_device.context)
    word, x = cuda_device.zeros((2,), U32), cuda_device.zeros((256,), I32)
    add = cuda_device.kernel("probe", "add", sources)
    args = [x, np.int32(256), np.int32(1)]
    cuda_device.synchronize()
    for condition, value in ((Wait.EQ, 5), (Wait.GEQ, 3), (Wait.AND, 0x7FFFFFFF)):
        word.fill(0)
        cuda_device.synchronize()
        other.wait_value32(word.ptr, value, condition)
        cuda_device.launch(add, (1, 1, 1), (256, 1, 1), args, stream=other)
        time.sleep(0.02)
        assert not other.idle()  # held
        cuda_device.stream.write_value32(word.ptr, 5)
        other.synchronize()
    assert (x.download() == 3).all()
    assert word.download().tolist() == [5, 0]
    with pytest.raises(QwenRawError, match="multiple of 4"):
        other.wait_value32(word.ptr + 2, 1, Wait.EQ)
    if not other.memops.flush:
        with pytest.raises(QwenRawError, match="cannot flush remote writes"):
            other.wait_value32(word.ptr, 1, Wait.EQ | Wait.FLUSH)
    other.close()


def test_closed_device_refuses(sources: Path) -> None:
    device = CudaDevice(0)
    kernel = device.kernel("probe", "add", sources)
    x, ring = device.zeros((4,), I32), device.host_ring(2)
    ring.words[1] = 9
    device.close()
    device.close()
    assert ring.words.tolist() == [0, 9]
    with pytest.raises(QwenRawError, match="after its memory was freed"):
        x.download()
    with pytest.raises(QwenRawError):
        device.launch(kernel, (1, 1, 1), (1, 1, 1), [x, np.int32(4), np.int32(1)])


def test_failed_kernel_is_reported_once_and_cleanly(sources: Path) -> None:
    """In a process of its own, because the GPU is lost to the one in which a kernel failed."""
    script = f"""
from pathlib import Path
import numpy as np
from qwen_raw.driver.device import CudaDevice
with CudaDevice(0) as device:
    x = device.zeros((4,), np.dtype(np.int32))
    device.launch(device.kernel("probe", "fail", Path({str(sources)!r})), (1, 1, 1), (1, 1, 1), [])
    x.download()
"""
    env = os.environ | {"PYTHONPATH": str(Path(qwen_raw.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "CUDA_ERROR_LAUNCH_FAILED" in last and last.endswith("in a kernel that was queued earlier")
    assert "Exception ignored" not in done.stderr and "During handling" not in done.stderr


def test_a_device_can_be_opened_again(sources: Path) -> None:
    """In a process of its own, where nobody else holds the context while it is closed."""
    script = f"""
from pathlib import Path
import numpy as np
from qwen_raw.driver.device import CudaDevice
for round in range(3):
    with CudaDevice(0) as device:
        x = device.zeros((64,), np.dtype(np.int32))
        kernel = device.kernel("probe", "add", Path({str(sources)!r}))
        with device.capture() as capture:
            device.launch(kernel, (1, 1, 1), (64, 1, 1), [x, np.int32(64), np.int32(5)])
        capture.graph.launch()
        print(int(x.download().sum()))
"""
    env = os.environ | {"PYTHONPATH": str(Path(qwen_raw.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["320"] * 3, "")


def test_wrong_device(cuda_device: CudaDevice, second_cuda_device: CudaDevice, sources: Path) -> None:
    mine, theirs = cuda_device.zeros((64,), I32), second_cuda_device.zeros((64,), I32)
    kernel = cuda_device.kernel("probe", "add", sources)
    args = [np.int32(64), np.int32(1)]
    with pytest.raises(QwenRawError, match=r"GPU 0\) was launched on GPU 1"):
        second_cuda_device.launch(kernel, (1, 1, 1), (64, 1, 1), [theirs, *args])
    with pytest.raises(QwenRawError, match="enable peer access first"):
        cuda_device.launch(kernel, (1, 1, 1), (64, 1, 1), [theirs, *args])
    cuda_device.launch(kernel, (1, 1, 1), (64, 1, 1), [mine, *args])  # whichever device was used last
    assert (mine.download() == 1).all()


def test_cupy_shares_the_context(cuda_device: CudaDevice) -> None:
    import cupy

    x = cuda_device.array(np.arange(16, dtype=np.uint64))
    cuda_device.synchronize()
    memory = cupy.cuda.UnownedMemory(x.ptr, x.nbytes, x, 0)
    theirs = cupy.ndarray((16,), np.uint64, cupy.cuda.MemoryPointer(memory, 0))
    np.testing.assert_array_equal(cupy.asnumpy(theirs * 2), np.arange(16) * 2)
    assert x.dtype == U64


@pytest.mark.parametrize(
    ("graph", "operations", "held", "waits"),
    [
        ("kernels", 0, 3 * HELD, False),  # one submission, however many
        ("stream operations", 1, HELD // 2, False),
        ("stream operations", 1, HELD + 100, True),
        ("both in turn", 2, HELD // 2 - 100, False),
        ("both in turn", 2, HELD // 2 + 100, True),
    ],
)
def test_what_a_held_stream_takes(cuda_device: CudaDevice, graph: str, operations: int, held: int, waits: bool) -> None:
    """What qwen_raw/comm/lead.py reckons with: every stream operation of a graph is a submission, and parts kernels.

    Beyond what the stream holds, the launch itself waits until it goes on; here another thread sees to that.
    """
    stream, gate, x = cuda_device.stream, cuda_device.host_ring(1), cuda_device.zeros((4,), U32)
    kernel = cuda_device.kernel("signal", "signal_ring")
    with cuda_device.capture() as capture:
        for _ in range(held):
            if operations != 1:
                cuda_device.launch(kernel, (1, 1, 1), (1, 1, 1), [np.uint64(x.ptr)])
            if operations:
                stream.write_value32(x.ptr + 4, 1)
    stream.wait_value32(gate.buffer.ptr, 1, Wait.GEQ)
    opens = threading.Timer(HOLD_S, gate.words.__setitem__, (0, 1))
    begin = time.perf_counter()
    opens.start()
    capture.graph.launch()
    seconds = time.perf_counter() - begin
    opens.join()
    cuda_device.synchronize()
    capture.graph.close()
    assert (seconds > HOLD_S / 2) == waits, f"{held} of {graph}: the launch took {seconds} s"
