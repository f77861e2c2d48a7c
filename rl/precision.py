"""Which number format the matrix products of generator and trainer are computed in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Precision = Literal["float32", "bfloat16"]
"""Of the factors. Sums, the trainer's weights, their gradients and the optimiser are float32 in both."""

MATRIX_UNITS = "amx_bf16"
"""The kernel's name for matrix units that take bfloat16. Without them bfloat16 is 2.5 times slower than
float32 on a processor; with them three to seven times faster at 32 rows and more (docs/log.md)."""

CPUINFO = Path("/proc/cpuinfo")


def fastest_here(cpuinfo: Path = CPUINFO) -> Precision:
    """bfloat16 where the processors have units for it, else float32. (Not all GPUs take bfloat16.)"""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "float32"
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "bfloat16" if MATRIX_UNITS in flags else "float32"


def resolve(setting: Literal["auto"] | Precision) -> Precision:
    return fastest_here() if setting == "auto" else setting
