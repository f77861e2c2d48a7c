"""Pulling as a phase of its own: once for any number of callers, and what registries refuse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker.errors
import pytest

from sandboxd.backends.docker import DockerBackend
from sandboxd.errors import Phase, StartFailed
from sandboxd.types import Template
from tests.sandboxd.docker_kit import docker_backend, engine, run, sandbox, tar
from tests.sandboxd.registry import Registry, registry

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.fixture(scope="module")
def server(docker_engine: None) -> Iterator[Registry]:
    busybox = next(path for path in map(Path, ("/bin/busybox", "/usr/bin/busybox")) if path.exists())
    files = {"bin/busybox": busybox.read_bytes(), "tmp/.keep": b""}
    files |= {f"bin/{applet}": b"->busybox" for applet in ("sh", "sleep", "echo", "grep", "tr")}
    with registry(tar(files)) as running:
        yield running


@pytest.fixture
async def backend(tmp_path: Path, docker_engine: None) -> AsyncIterator[DockerBackend]:
    async with docker_backend(tmp_path / "docker") as opened:
        yield opened


async def test_one_pull_for_a_hundred_callers(backend: DockerBackend, server: Registry) -> None:
    template = Template("t", image=f"{server.host}/busybox")
    server.manifests.clear()
    try:
        await asyncio.gather(*(backend.prepare(template) for _ in range(100)))
        assert server.manifests == ["busybox"]
        async with sandbox(backend, template) as box:
            assert (await run(box, "echo", "pulled")).stdout == b"pulled\n"
        await backend.prepare(template)
        assert server.manifests == ["busybox"]
    finally:
        async with engine() as host:
            with contextlib.suppress(docker.errors.ImageNotFound):
                await host.call(lambda api: api.remove_image(f"{template.image}:latest", force=True))


async def test_an_unknown_image_is_not_retried(backend: DockerBackend, server: Registry) -> None:
    image = f"{server.host}/no-such-image"
    results = await asyncio.gather(
        *(backend.create(f"s{n}", Template("t", image=image)) for n in range(10)), return_exceptions=True
    )
    assert server.manifests.count("no-such-image") == 1
    for failure in results:
        assert isinstance(failure, StartFailed)
        assert (failure.phase, failure.retryable) == (Phase.PULL, False)
        assert failure.metadata["pull"] == "IMAGE_NOT_FOUND"
        assert image in failure.message
    assert await backend.list_ids() == []


async def test_a_rate_limit_is_named_and_may_be_retried(backend: DockerBackend, server: Registry) -> None:
    with pytest.raises(StartFailed) as caught:
        await backend.prepare(Template("t", image=f"{server.host}/limited"))
    failure = caught.value
    assert (failure.phase, failure.retryable, failure.metadata["pull"]) == (Phase.PULL, True, "RATE_LIMITED")
    assert failure.retry_after


async def test_a_pull_that_hangs_ends_with_its_own_timeout(backend: DockerBackend, server: Registry) -> None:
    template = Template("t", image=f"{server.host}/slow", pull_timeout=0.5)
    async with asyncio.timeout(20):
        with pytest.raises(StartFailed, match=r"not pulled within 0\.5 s") as caught:
            await backend.prepare(template)
    assert (caught.value.phase, caught.value.retryable) == (Phase.PULL, True)


async def test_a_cancelled_leader_hands_the_pull_on(backend: DockerBackend, server: Registry) -> None:
    template = Template("t", image=f"{server.host}/busybox")
    leader = asyncio.create_task(backend.prepare(template))
    await asyncio.sleep(0)
    follower = asyncio.create_task(backend.prepare(template))
    await asyncio.sleep(0)
    leader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leader
    await asyncio.wait_for(follower, 60)
    async with engine() as host:
        await host.call(lambda api: api.remove_image(f"{template.image}:latest", force=True))
