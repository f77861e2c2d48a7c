"""Docker sandboxes under gVisor: the runtime is the template's, and nothing else differs for their users."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import docker
import pytest

from sandboxd.backends.docker import DockerBackend
from sandboxd.errors import SandboxLost
from sandboxd.types import Command, ExitReason, Template

from .backend_kit import Case, execute, pieces, read, shell

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.fixture(scope="module")
def runsc(docker_engine: None) -> str:
    """The runtime's name; skips where this Engine has none that runs."""
    client = docker.from_env()
    try:
        offered = client.info()["Runtimes"]
    finally:
        client.close()
    if os.environ.get("SANDBOXD_TEST_RUNSC") or "runsc" in offered:
        return "runsc"
    pytest.skip(
        "this Docker Engine offers no runtime runsc: install gVisor and name it in the Engine's settings"
    )


@pytest.fixture(params=["docker_python_image", "docker_busybox_image"])
async def case(request: pytest.FixtureRequest, runsc: str, tmp_path: Path) -> AsyncIterator[Case]:
    template = Template("t", image=request.getfixturevalue(request.param), runtime=runsc)
    backend = DockerBackend(tmp_path / "state")
    await backend.open()
    try:
        yield Case(backend, template, by_engine=True)
    finally:
        await backend.close()


async def test_commands_run_on_gvisors_kernel(case: Case) -> None:
    async with case.sandbox() as box:
        done = await shell(box, "dmesg | head -1; echo err >&2; exit 7")
        assert b"gVisor" in done.stdout
        assert (done.stderr, done.code) == (b"err\n", 7)
        assert (await shell(box, "id -u; ls /sys/class/net 2>/dev/null | grep -v lo")).stdout == b"65534\n"


async def test_files_and_time_limits(case: Case) -> None:
    async with case.sandbox() as box:
        await box.files.write(b"data", pieces(b"x" * 100_000), 0o600)
        assert await read(box, b"data") == b"x" * 100_000
        late = await execute(box, Command((b"sh", b"-c", b"sleep 1000 & wait"), timeout=0.5))
        assert late.exited.reason is ExitReason.TIMED_OUT
        assert (await shell(box, "echo alive")).stdout == b"alive\n"


async def test_what_is_forked_and_what_is_killed(case: Case) -> None:
    async with case.sandbox() as box:
        await shell(box, "echo first > file")
        forks = await case.backend.branch(_only(await case.backend.list_ids()), case.template, "b")
        fork = await case.backend.create("fork", forks)
        assert (await shell(fork, "cat file")).stdout == b"first\n"
        client = docker.from_env()
        for container in client.containers.list(filters={"label": "sandboxd.sandbox=fork"}):
            container.kill(signal.SIGKILL)
        client.close()
        assert await fork.wait_lost()
        with pytest.raises(SandboxLost):
            await shell(fork, "true")
        await case.backend.destroy("fork")
        await case.backend.prune("b")


def _only(names: list[str]) -> str:
    (name,) = names
    return name
