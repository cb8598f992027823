"""What this machine has to run a model on. Asks the driver without making a context, so it disturbs nobody."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from qwen_raw.driver.check import call, initialised


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU visible to this process."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    memory: int  # bytes
    driver: str  # the CUDA version that the driver supports, e.g. "12.8"


def gpus() -> list[Gpu]:
    """All visible GPUs. Raises UsageError, saying why, where the driver or the GPU is missing."""
    driver = initialised()
    version = int(call(driver.cuDriverGetVersion))
    attribute = driver.CUdevice_attribute
    found = []
    for ordinal in range(call(driver.cuDeviceGetCount)):
        device = call(driver.cuDeviceGet, ordinal)
        major, minor, sms = (
            int(call(driver.cuDeviceGetAttribute, getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{key}"), device))
            for key in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
        )
        found.append(
            Gpu(
                ordinal=ordinal,
                name=call(driver.cuDeviceGetName, 96, device).split(b"\0")[0].decode(),
                capability=(major, minor),
                sm_count=sms,
                memory=int(call(driver.cuDeviceTotalMem, device)),
                driver=f"{version // 1000}.{version % 1000 // 10}",
            )
        )
    return found


def cpu_name() -> str:
    """The processor for people: its model where the system tells, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def cpu_cores() -> int:
    """Logical cores."""
    return os.cpu_count() or 1
