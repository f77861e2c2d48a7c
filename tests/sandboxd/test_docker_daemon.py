"""Docker sandboxes through the whole daemon: leased, lost, refused; and a host without Docker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd.errors import SandboxLost, StartFailed
from tests.sandboxd.docker_kit import engine
from tests.source_tree import ROOT

pytestmark = [pytest.mark.anyio]


@pytest.mark.docker
@pytest.mark.parametrize("image", ["docker_python_image", "docker_busybox_image"])
async def test_a_leased_container(
    daemon: Callable[..., Any], image: str, request: pytest.FixtureRequest
) -> None:
    pool = {"backend": "docker", "image": request.getfixturevalue(image), "warm": 1, "size_limit": 2}
    async with daemon(pools={"box": pool}) as client, client.acquire("box", timeout=60) as box:
        await box.write_file("note", b"kept")
        result = await box.exec(["sh", "-c", "cat note; exit 7"])
        assert (result.stdout, result.exit_code) == (b"kept", 7)


@pytest.mark.docker
async def test_a_container_killed_under_its_lease(
    daemon: Callable[..., Any], docker_python_image: str
) -> None:
    pool = {"backend": "docker", "image": docker_python_image, "warm": 0, "size_limit": 1}
    async with daemon(pools={"box": pool}) as client, client.acquire("box", timeout=60) as box:
        async with engine() as host:
            name = box.name.rpartition("/")[2]
            filters = {"label": f"sandboxd.sandbox={name}"}
            (container,) = await host.call(lambda api: api.containers(filters=filters))
            await host.call(lambda api: api.kill(container["Id"]))
        with pytest.raises(SandboxLost):
            await box.exec(["true"])


@pytest.mark.docker
async def test_a_setup_that_fails_names_its_phase(
    daemon: Callable[..., Any], docker_python_image: str
) -> None:
    setup = ["sh", "-c", "echo no database here >&2; exit 4"]
    pool = {"backend": "docker", "image": docker_python_image, "warm": 0, "setup": setup}
    async with daemon(pools={"box": pool}) as client:
        with pytest.raises(StartFailed) as caught:
            async with client.acquire("box", timeout=60):
                pass
    assert caught.value.phase == "setup"
    assert "no database here" in caught.value.metadata["log"]


def test_serve_without_docker_says_so_in_one_line(tmp_path: Path) -> None:
    settings = tmp_path / "sandboxd.toml"
    settings.write_text('[pools.box]\nbackend = "docker"\nimage = "any"\n')
    served = subprocess.run(
        [sys.executable, "-m", "sandboxd", "serve", "--config", settings, "--state-dir", tmp_path / "state"],
        cwd=ROOT,
        env={**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/nobody.sock"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert served.returncode == 2, served
    (line,) = served.stderr.strip().splitlines()
    assert f"{tmp_path}/nobody.sock" in line
    assert "DOCKER_HOST" in line
    assert {path.name for path in (tmp_path / "state").iterdir()} <= {"daemon.lock"}
