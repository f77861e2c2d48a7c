"""Which number format a run computes in, by what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.precision import Precision, fastest_here, resolve

FLAGS = "processor\t: 0\nflags\t\t: fpu sse2 avx512f avx512_bf16{more}\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(("more", "expected"), [(" amx_bf16 amx_tile", "bfloat16"), ("", "float32")])
def test_bfloat16_only_where_a_processor_has_matrix_units(
    more: str, expected: Precision, tmp_path: Path
) -> None:
    """avx512_bf16 alone is instructions, not units: float32 is faster there."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(FLAGS.format(more=more))
    assert fastest_here(cpuinfo) == expected


def test_a_machine_that_says_nothing_computes_in_float32(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name : another architecture\n")
    assert fastest_here(tmp_path / "cpuinfo") == "float32"
    assert fastest_here(tmp_path / "missing") == "float32"


def test_a_setting_wins_over_the_machine() -> None:
    assert (resolve("float32"), resolve("bfloat16"), resolve("auto")) == (
        "float32",
        "bfloat16",
        fastest_here(),
    )
