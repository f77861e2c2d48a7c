"""Sandboxes that begin where another one is, on every backend, and images made of sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import docker
import pytest

from sandboxd import errors
from sandboxd.backends.base import Connection
from sandboxd.backends.docker import DockerBackend
from sandboxd.backends.fake import FakeScript
from sandboxd.backends.faults import Fault
from sandboxd.errors import PoolFull, SandboxNotFound, StartFailed
from sandboxd.images.store import ImageStore
from sandboxd.leases import Lease
from sandboxd.starting import RetryPolicy
from sandboxd.types import Template
from tests.sandboxd.backend_kit import Case, output
from tests.sandboxd.conftest import LASTING, settle
from tests.sandboxd.namespace_kit import inhabited

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]
OpenRig = Callable[..., Any]


async def until(there: Callable[[], bool]) -> None:
    """Lets other tasks and processes go on until something is so."""
    async with asyncio.timeout(30):
        while not there():
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def made(case: Case, template: Template, name: str) -> AsyncIterator[Connection]:
    connection = await case.backend.create(name, template)
    try:
        yield connection
    finally:
        await connection.close()
        await case.backend.destroy(name)


async def test_forks_begin_alike_and_then_differ(case: Case) -> None:
    if case.without_forks:
        return
    async with made(case, case.template, "source") as source:
        await output(source, "mkdir -p deep/er; echo first > deep/er/file; chmod 600 deep/er/file")
        template = await case.backend.branch("source", case.template, "b1")
        await output(source, "echo later > deep/er/file")
        async with made(case, template, "one") as one, made(case, template, "two") as two:
            assert await output(one, "cat deep/er/file; stat -c %a deep/er/file") == "first\n600\n"
            await output(one, "echo one > deep/er/file; rm -rf none; echo new > new")
            assert await output(two, "cat deep/er/file; ls") == "first\ndeep\n"
            assert await output(one, "cat deep/er/file new") == "one\nnew\n"
    await case.backend.prune("b1")
    await case.backend.prune("b1")


async def test_a_fork_is_forked_in_its_turn(case: Case) -> None:
    if case.without_forks:
        return
    async with made(case, case.template, "source") as source:
        await output(source, "echo a > a; echo gone > gone")
        first = await case.backend.branch("source", case.template, "b1")
        async with made(case, first, "fork") as fork:
            await output(fork, "echo b > b; rm gone")
            second = await case.backend.branch("fork", first, "b2")
            assert second.branches == ("b1", "b2")
            assert sorted(await case.backend.list_branches()) == ["b1", "b2"]
            async with made(case, second, "forks-fork") as last:
                assert await output(last, "cat a b; ls") == "a\nb\na\nb\n"
    await case.backend.prune("b2")
    await case.backend.prune("b1")


# -- through a pool, on the fake backend


async def test_forks_are_leased_all_or_none(rig: OpenRig) -> None:
    async with rig(size=4) as r:
        source = await r.pool.acquire()
        forks = await r.pool.fork(source.id, 3, Lease(ttl=7.0, labels={"a": "b"}))
        assert [fork.labels for fork in forks] == [{"a": "b"}] * 3
        assert "4 active" in r.counts
        with pytest.raises(PoolFull, match="4 are leased; release some"):
            await r.pool.fork(source.id, 1, Lease())
        await r.advance(7.0)
        assert "1 active" in r.counts
        with pytest.raises(SandboxNotFound):
            await r.pool.fork("none", 1, Lease())


async def test_warm_ones_give_way_to_forks_and_are_gone_before_these_begin(rig: OpenRig) -> None:
    script = FakeScript()
    async with rig(warm=3, size=4, script=script) as r:
        source = await r.pool.acquire(LASTING)
        await r.until(lambda: "3 warm" in r.counts)
        script.destroy_failures = 1
        forking = asyncio.create_task(r.pool.fork(source.id, 3, LASTING))
        await r.until(lambda: not script.destroy_failures)
        await r.until(lambda: len(r.pool.sandboxes()) == 5)
        assert r.backend.created_total == 4
        async with asyncio.timeout(30):
            while not forking.done():
                await r.advance(1.0)
        forks = await forking
        assert "0 warm, 4 active, 0 deleting" in r.counts
        with pytest.raises(PoolFull, match="4 are leased; release some"):
            await r.pool.fork(source.id, 1, Lease())
        # As soon as some are released, though they are not gone yet.
        for fork in forks:
            r.pool.release(fork.id)
        again = await r.pool.fork(source.id, 3, LASTING)
        assert {fork.id for fork in again}.isdisjoint(fork.id for fork in forks)


async def test_one_that_is_being_started_for_nobody_gives_way_to_a_fork(rig: OpenRig) -> None:
    script = FakeScript()
    async with rig(size=2, script=script) as r:
        source = await r.pool.acquire(LASTING)
        script.start_seconds = 1.0
        r.pool.resize(warm_target=1)
        await r.until(lambda: "1 starting" in r.counts)
        forking = asyncio.create_task(r.pool.fork(source.id, 1, LASTING))
        async with asyncio.timeout(30):
            while not forking.done():
                await r.advance(1.0)
        (fork,) = await forking
        assert sorted(await r.backend.list_ids()) == sorted([source.id, fork.id])


async def test_one_fork_that_fails_takes_the_others_with_it(rig: OpenRig) -> None:
    script = FakeScript(start_seconds=1.0)
    async with rig(script=script, retry=RetryPolicy(attempts=1)) as r:
        acquiring = asyncio.create_task(r.pool.acquire(LASTING))
        await r.advance(1.0)
        source = await acquiring
        script.first_failures = [StartFailed("no")]
        forking = asyncio.create_task(r.pool.fork(source.id, 3, LASTING))
        while not forking.done():
            await r.advance(1.0)
        with pytest.raises(StartFailed, match="no"):
            await forking
        assert await r.backend.list_ids() == [source.id]
        assert r.pool.stats().acquired_total == 1
        assert len(r.pool.sandboxes()) == 1


async def test_forks_that_nobody_waits_for_are_released(rig: OpenRig) -> None:
    script = FakeScript()
    async with rig(script=script) as r:
        source = await r.pool.acquire(LASTING)
        script.start_seconds = 1.0
        forking = asyncio.create_task(r.pool.fork(source.id, 2, LASTING))
        await settle()
        forking.cancel()
        while r.pool.stats().released_total < 2:
            await r.advance(1.0)
        await r.until(lambda: len(r.pool.sandboxes()) == 1)
        assert forking.cancelled()


async def test_forks_and_waiters_do_not_keep_each_other_waiting(rig: OpenRig) -> None:
    async with rig(starts=2) as r:
        source = await r.pool.acquire()
        async with asyncio.timeout(30):
            forking = asyncio.create_task(r.pool.fork(source.id, 5, Lease()))
            await settle()
            await r.pool.acquire()
            await forking
            await r.pool.acquire()


async def test_what_fails_to_be_removed_is_tried_again(rig: OpenRig) -> None:
    script = FakeScript()
    async with rig(script=script) as r:
        source = await r.pool.acquire(LASTING)
        (fork,) = await r.pool.fork(source.id, 1, LASTING)
        (forks_fork,) = await r.pool.fork(fork.id, 1, LASTING)
        script.prune_failures = script.destroy_failures = 2
        r.pool.release(forks_fork.id)
        async with asyncio.timeout(30):
            while len(r.backend.branches()) > 1:
                await r.advance(1.0)
        assert script.prune_failures == script.destroy_failures == 0
        assert await output(r.pool.connection(fork.id), "echo alive") == "alive\n"
        r.pool.release(fork.id)
        await r.until(lambda: not r.backend.branches())


async def test_a_failed_fork_whose_removal_fails_is_removed_all_the_same(rig: OpenRig) -> None:
    async with rig(script=FakeScript(), retry=RetryPolicy(attempts=1)) as r:
        source = await r.pool.acquire(LASTING)
        r.backend.script.first_failures = [StartFailed("no")]
        r.backend.script.destroy_failures = 2
        with pytest.raises(StartFailed, match="no"):
            await r.pool.fork(source.id, 3, LASTING)
        async with asyncio.timeout(30):
            while len(r.pool.sandboxes()) > 1:
                await r.advance(1.0)
        assert await r.backend.list_ids() == [source.id]
        await r.until(lambda: not r.backend.branches())


async def test_a_pool_that_ends_ends_its_forks(rig: OpenRig) -> None:
    async with rig() as r:
        source = await r.pool.acquire()
        r.faulty.faults = (Fault.parse("hang start 1"),)
        forking = asyncio.create_task(r.pool.fork(source.id, 2, Lease()))
        await r.until(lambda: "2 forking" in r.counts)
    with pytest.raises(errors.Draining):
        await forking


# -- through a daemon


async def test_the_client_forks_and_releases(daemon: OpenDaemon, tmp_path: Path) -> None:
    pools = {"python": {"backend": "namespace", "warm": 0, "size_limit": 6}}
    state = tmp_path / "state" / "namespace"
    async with daemon(pools=pools) as client, client.acquire("python", timeout=10) as box:
        await box.write_file("state", b"before")
        async with box.fork(3, ttl=30, labels={"branch": "yes"}) as forks:
            assert [await fork.read_file("state") for fork in forks] == [b"before"] * 3
            await asyncio.gather(*(fork.write_file("state", str(n).encode()) for n, fork in enumerate(forks)))
            assert [await fork.read_file("state") for fork in forks] == [b"0", b"1", b"2"]
            assert await box.read_file("state") == b"before"
            async with forks[0].fork(1) as deeper:
                assert await deeper[0].read_file("state") == b"0"
            with pytest.raises(errors.PoolFull):
                async with box.fork(6):
                    pass
        stats = await client.get_pool("python")
        assert (stats.acquired_total, stats.released_total) == (5, 4)
        with pytest.raises(errors.InvalidRequest, match="count = 0"):
            async with box.fork(0):
                pass
        left = [box.name.removeprefix("sandboxes/")]
        await until(lambda: inhabited(state) == left)


async def test_a_snapshot_is_an_image_of_its_own(daemon: OpenDaemon, tmp_path: Path) -> None:
    images = tmp_path / "images"
    ImageStore(images).open()
    pools: dict[str, dict[str, object]] = {"python": {"backend": "namespace", "warm": 0}}
    async with daemon(pools=pools, images_dir=images) as client:
        async with client.acquire("python", timeout=10) as box:
            await box.write_file("model/data", b"x" * 1000)
            await box.exec(["ln", "model/data", "linked"])
            assert await box.snapshot("ready") == 1000
            with pytest.raises(errors.InvalidRequest, match="image name"):
                await box.snapshot("not a name")
    pools["python"]["image"] = "ready"
    async with daemon(pools=pools, images_dir=images) as client:
        async with client.acquire("python", timeout=10) as box:
            assert await box.read_file("model/data") == b"x" * 1000
            done = await box.exec(["python3", "-c", "import os; print(os.stat('linked').st_nlink)"])
            assert done.stdout == b"2\n"
            await box.write_file("more", b"y")
            async with box.fork(1) as forks:
                assert await forks[0].snapshot("readier") == 1
                assert await forks[0].read_file("more") == b"y"
    store = ImageStore(images)
    assert [len(store.find(name).layers) for name in ("ready", "readier")] == [1, 3]
    assert store.collect() == 0
    store.forget("ready")
    store.forget("readier")
    assert store.collect() == 3


# -- images of the Docker Engine


@pytest.mark.docker
async def test_a_docker_snapshot_is_the_engines_and_outlives_the_daemon(
    docker_busybox_image: str, tmp_path: Path
) -> None:
    name = f"sandboxd-test-snapshot:{tmp_path.name.lower()}"
    engine = docker.from_env()
    try:
        backend = DockerBackend(tmp_path / "state")
        await backend.open()
        template = Template("t", image=docker_busybox_image)
        box = await backend.create("one", template)
        await output(box, "echo kept > file")
        assert await backend.snapshot("one", template, name) > 0
        await backend.close()
        backend = DockerBackend(tmp_path / "state")
        await backend.open()
        again = await backend.create("two", Template("t", image=name))
        assert await output(again, "cat file") == "kept\n"
        await backend.close()
        assert [tag for image in engine.images.list() for tag in image.tags if "branch" in tag] == []
    finally:
        engine.images.remove(name, force=True)
        engine.close()
