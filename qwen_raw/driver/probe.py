"""What GPUs this machine has and how they are linked; makes no context, so it disturbs nobody and is quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from qwen_raw.driver.check import call, initialised
from qwen_raw.errors import QwenRawError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU visible to this process. What only NVML knows is None where NVML is not there."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    memory: int  # bytes
    free: int | None  # bytes
    pci: str  # bus id
    peers: tuple[int, ...]  # ordinals of the GPUs whose memory it can access
    nvlink_peers: tuple[int, ...] | None  # those of them that it reaches over NVLink


@dataclass(frozen=True, slots=True)
class PeerPath:
    """What driver and NVML say of GPU `source` reaching into the memory of GPU `target`."""

    source: int
    target: int
    access: bool
    native_atomics: bool
    performance_rank: int  # as the driver orders the paths of a machine; 0 is the best
    nvlink: bool | None  # None: NVML does not say
    active_links: int | None  # NVLinks of `source` that are up, whatever they lead to


@dataclass(frozen=True, slots=True)
class Machine:
    """All of them; `problem` says why there are none."""

    gpus: tuple[Gpu, ...]
    cuda: str | None  # the CUDA version that the driver supports: "13.0"
    driver: str | None  # the driver's own version: "580.159.04"
    problem: str | None


def probe() -> Machine:
    """Looks at the machine; never raises for what is missing."""
    try:
        driver = initialised()
        version = int(call(driver.cuDriverGetVersion))
        devices = [call(driver.cuDeviceGet, i) for i in range(call(driver.cuDeviceGetCount))]
        with _Nvml() as nvml:
            gpus = tuple(_gpu(driver, nvml, i, devices) for i in range(len(devices)))
            return Machine(gpus, f"{version // 1000}.{version % 1000 // 10}", nvml.driver_version(), None)
    except QwenRawError as error:
        return Machine((), None, None, str(error))


def peer_paths(ordinals: Sequence[int]) -> list[PeerPath]:
    """Every ordered pair of these GPUs; makes no context. Raises QwenRawError for a GPU that is not there."""
    driver = initialised()
    devices = {i: call(driver.cuDeviceGet, i) for i in ordinals}
    pci = {i: _text(call(driver.cuDeviceGetPCIBusId, 16, device)) for i, device in devices.items()}
    kinds = driver.CUdevice_P2PAttribute

    def asked(name: str, source: int, target: int) -> int:
        kind = getattr(kinds, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
        return int(call(driver.cuDeviceGetP2PAttribute, kind, devices[source], devices[target]))

    with _Nvml() as nvml:
        return [
            PeerPath(
                source=source,
                target=target,
                access=bool(call(driver.cuDeviceCanAccessPeer, devices[source], devices[target])),
                native_atomics=bool(asked("NATIVE_ATOMIC_SUPPORTED", source, target)),
                performance_rank=asked("PERFORMANCE_RANK", source, target),
                nvlink=nvml.nvlink(pci[source], pci[target]),
                active_links=nvml.active_links(pci[source]),
            )
            for source, target in permutations(ordinals, 2)
        ]


def _gpu(driver: Any, nvml: _Nvml, ordinal: int, devices: list[Any]) -> Gpu:
    device = devices[ordinal]
    attribute = driver.CUdevice_attribute
    major, minor, sms = (
        int(call(driver.cuDeviceGetAttribute, getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{key}"), device))
        for key in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
    )
    pci = [_text(call(driver.cuDeviceGetPCIBusId, 16, d)) for d in devices]
    others = [i for i in range(len(devices)) if i != ordinal]
    return Gpu(
        ordinal=ordinal,
        name=_text(call(driver.cuDeviceGetName, 96, device)),
        capability=(major, minor),
        sm_count=sms,
        memory=int(call(driver.cuDeviceTotalMem, device)),
        free=nvml.free_bytes(pci[ordinal]),
        pci=pci[ordinal],
        peers=tuple(i for i in others if call(driver.cuDeviceCanAccessPeer, device, devices[i])),
        nvlink_peers=nvml.nvlink_peers(pci, ordinal),
    )


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode()


class _Nvml:
    """NVML while it is needed, or nothing: every answer is None where it is missing or refuses."""

    def __init__(self) -> None:
        self._nvml: Any = None

    def __enter__(self) -> _Nvml:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except ImportError:
            self._nvml = None  # nvidia-ml-py is not installed
        except pynvml.NVMLError:
            self._nvml = None  # some containers have CUDA without NVML
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()

    def _ask(self, name: str, *args: Any) -> Any:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, name)(*args)
        except self._nvml.NVMLError:
            return None  # not supported on this GPU, or not permitted

    def driver_version(self) -> str | None:
        raw = self._ask("nvmlSystemGetDriverVersion")
        return raw.decode() if isinstance(raw, bytes) else raw

    def free_bytes(self, pci: str) -> int | None:
        handle = self._ask("nvmlDeviceGetHandleByPciBusId", pci)
        memory = None if handle is None else self._ask("nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None else int(memory.free)

    def nvlink(self, source: str, target: str) -> bool | None:
        """Whether two GPUs, by PCI bus id, reach each other over NVLink."""
        handles = [self._ask("nvmlDeviceGetHandleByPciBusId", bus) for bus in (source, target)]
        if self._nvml is None or None in handles:
            return None
        status = self._ask("nvmlDeviceGetP2PStatus", *handles, self._nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return None if status is None else bool(status == self._nvml.NVML_P2P_STATUS_OK)

    def active_links(self, pci: str) -> int | None:
        """How many NVLinks of a GPU are up."""
        handle = self._ask("nvmlDeviceGetHandleByPciBusId", pci)
        if handle is None:
            return None
        # Links that the GPU does not have are refused, which counts as not up.
        states = [self._ask("nvmlDeviceGetNvLinkState", handle, i) for i in range(self._nvml.NVML_NVLINK_MAX_LINKS)]
        return [state == self._nvml.NVML_FEATURE_ENABLED for state in states].count(True)

    def nvlink_peers(self, pci: list[str], ordinal: int) -> tuple[int, ...] | None:
        """The GPUs that one reaches over NVLink."""
        reached = {i: self.nvlink(pci[ordinal], bus) for i, bus in enumerate(pci) if i != ordinal}
        return None if None in reached.values() or self._nvml is None else tuple(i for i, on in reached.items() if on)
