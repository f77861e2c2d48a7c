"""What a measurement was made on, so that two of them can be compared honestly."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def facts() -> dict[str, object]:
    """Processor, memory, kernel and load of this host at this moment."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpus": os.cpu_count(),
        "cpu": models[0] if models else platform.machine(),
        "memory_bytes": int(meminfo["MemTotal"].split()[0]) * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": os.getloadavg()[0],
        "root": os.geteuid() == 0,
    }
