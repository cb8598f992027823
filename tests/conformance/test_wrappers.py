"""Every wrapper of ptx.cuh, conversion of vec.cuh and sum of reduce.cuh: GPU against simulator, both against NumPy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.machines import HERE, PROBE_STEMS, Machine, Output, compare, probe_stem
from conformance.mma_cases import MMA
from conformance.probe_cases import CONVERSIONS, PTX, REDUCTIONS, Probe
from conformance.sm90_cases import SM90

import qwen_raw
from qwen_raw import paths

PROBES = [*PTX, *MMA, *SM90, *CONVERSIONS, *REDUCTIONS]
HEADERS = ("ptx.cuh", "vec.cuh", "reduce.cuh")
NewRng = Callable[[], np.random.Generator]
each_probe = pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.id)


def wrappers(header: str) -> set[str]:
    """The functions that a header of cuda_src/include defines."""
    text = (paths.cuda_src() / "include" / header).read_text()
    return set(re.findall(r"^DEVICE\s+[\w ]+?\b(\w+)\s*\(", text, re.MULTILINE))


@pytest.mark.parametrize("header", HEADERS)
def test_every_wrapper_has_a_probe(header: str) -> None:
    """A new wrapper needs an entry point probe_X that calls it, and a case here."""
    source = "".join((HERE / f"{stem}.cu").read_text() for stem in PROBE_STEMS)
    names = wrappers(header)
    assert len(names) >= 3
    assert names <= {probe.wrapper for probe in PROBES}
    # Called by its entry point, or named by the macro that makes one.
    unused = [n for n in names if not re.search(rf"probe_{n}\([^)]*\) {{[^}}]*\b{n}\(|^PROBE_\w+\({n}\b", source, re.M)]
    assert not unused, f"no probe uses {unused}"


def test_every_probe_is_of_a_wrapper() -> None:
    assert {probe.wrapper for probe in PROBES} == set().union(*map(wrappers, HEADERS))
    assert len({probe.id for probe in PROBES}) == len(PROBES)


def test_probes_compile_for_a_gpu(staged: Path, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="the CUDA packages are not installed")
    from qwen_raw.kernels import compile as nvrtc
    from qwen_raw.kernels.cubin import resources

    for stem, arch in (("probes", "sm_80"), ("probes", "sm_90a"), ("probes_sm90", "sm_90a")):
        table = resources(nvrtc.build(stem, arch, source_root=staged, cache_dir=tmp_path))
        expected = {f"probe_{p.wrapper}" for p in PROBES if probe_stem(f"probe_{p.wrapper}") == stem}
        assert expected and all(any(name.startswith(probe) for name in table) for probe in expected)


@each_probe
@pytest.mark.parametrize("schedule", ["in_order", "shuffled"])
def test_simulator(request: pytest.FixtureRequest, new_rng: NewRng, probe: Probe, schedule: str) -> None:
    """The simulator against NumPy."""
    machine: Machine = request.getfixturevalue(schedule)
    got, want = probe.run(machine, new_rng())
    compare(got, want, f"simulator, {probe.id}")
    assert any(name.startswith(f"probe_{probe.wrapper}") for name in machine.dev.launched)


@pytest.mark.gpu
@pytest.mark.parametrize("probe", [p for p in PROBES if p.gpu], ids=lambda probe: probe.id)
def test_gpu(gpu: Machine, shuffled: Machine, new_rng: NewRng, probe: Probe) -> None:
    """The GPU against the simulator, and against NumPy."""
    if probe_stem(f"probe_{probe.wrapper}") == "probes_sm90" and gpu.dev.arch != "sm_90a":
        pytest.skip(f"{gpu.dev.name} is no Hopper GPU")
    got, want = probe.run(gpu, new_rng())
    twin, _ = probe.run(shuffled, new_rng())
    compare(got, want, f"GPU, {probe.id}")
    compare(got, Output(twin.values, want.allowed), f"GPU and simulator, {probe.id}")


def test_trap_fails_the_launch_in_the_simulator(in_order: Machine) -> None:
    from qwen_raw.simt.native import SimError

    out = in_order.dev.zeros((64,), np.dtype(np.uint32))
    with pytest.raises(SimError, match="trap"):
        in_order.run("trap", [out, np.int32(1)], grid=1)


@pytest.mark.gpu
def test_trap_fails_the_launch_on_a_gpu(cuda_device: Any, staged: Path) -> None:
    """In a process of its own, because the GPU is lost to the one in which a kernel trapped."""
    script = f"""
from pathlib import Path
import numpy as np
from qwen_raw.driver.device import CudaDevice
with CudaDevice(0) as device:
    out = device.zeros((64,), np.dtype(np.uint32))
    kernel = device.kernel("probes", "probe_trap", Path({str(staged)!r}))
    for fail in (0, 1):
        device.launch(kernel, (1, 1, 1), (64, 1, 1), [out, np.int32(fail)])
        print(int(out.download()[63]), flush=True)
"""
    env = os.environ | {"PYTHONPATH": str(Path(qwen_raw.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout.split()) == (1, ["63"]), done.stderr
    assert "CUDA_ERROR_LAUNCH_FAILED" in done.stderr.splitlines()[-1]
