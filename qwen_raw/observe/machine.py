"""The processor of this machine, for people. Its GPUs: qwen_raw.driver.probe."""

from __future__ import annotations

import os
import platform


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
