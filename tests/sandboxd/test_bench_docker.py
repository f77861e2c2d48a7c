"""The benches against a real Docker engine, with the bare SDK beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.timeout(200)]

QUANTILES = {"p50", "p90", "p99", "max"}


def bench(out: Path, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "sandboxd", "bench", *map(str, arguments), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "times as many a second as docker-sdk" in done.stdout
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def containers() -> list[str]:
    command = ["docker", "ps", "-aq", "--filter", "label=sandboxd.bench"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        ("burst", ("--count", 2)),
        ("exec", ("--count", 3, "--concurrency", 1, "--streams", 1, "--output-mb", 1)),
        ("churn", ("--seconds", 0.5, "--callers", 1, "--warm", 1)),
    ],
)
def test_the_baseline_does_the_same_work_on_the_bare_sdk(
    shape: str, more: tuple[object, ...], docker_python_image: str, tmp_path: Path
) -> None:
    result = bench(
        tmp_path / "out.json",
        *(shape, "--backend", "docker", "--image", docker_python_image, "--baseline", "docker-sdk", *more),
    )
    assert (result["backend"], result["failed"]) == ("docker", 0)
    assert not any(result["leaked"].values())
    baseline = result["baseline"]
    assert (baseline["backend"], baseline["shape"], baseline["failed"]) == ("docker-sdk", shape, 0)
    if shape == "burst":
        for phase in ("create", "start", "exec"):
            assert result["phases"][phase]["max"] > 0 < baseline["phases"][phase]["max"]
        assert result["phases"]["ready"]["max"] > 0
        assert (baseline["alive_after_hold"], baseline["leaked"]) == (2, {"containers": 0})
    assert set(baseline["exec_s" if shape == "exec" else "ready_s"]) == QUANTILES
    assert containers() == []


def test_a_baseline_without_its_image_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sandboxd", "bench", "burst", "--backend", "fake", "--count", "1"]
    command += ["--baseline", "docker-sdk", "--baseline-image", "no-such-image:here"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("sandboxd: the baseline needs Docker with image 'no-such-image:here'")
    assert len(done.stderr.splitlines()) == 1
