"""kill -9 of the daemon and a new one on the same state directory: who held a sandbox goes on with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxd import Client, errors
from sandboxd.backend_set import BackendSet
from sandboxd.backends.fake import FakeBackend
from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.bench.audit import Snapshot
from sandboxd.bench.mortal import Mortal
from sandboxd.client import Box
from sandboxd.clock import ManualClock
from sandboxd.config import Config
from sandboxd.daemon import state_directory
from sandboxd.journal import Entry, Past
from sandboxd.leasing import RENEWAL_GRACE_SECONDS
from sandboxd.ledger import Bounds, Totals
from sandboxd.pool import Pool, PoolOptions
from sandboxd.types import Stdout, Template

from .conftest import settle
from .namespace_kit import inhabited
from .test_process_death import gone, settings

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def restarts(tmp_path: Path, config: Path | None = None) -> AsyncIterator[tuple[Mortal, Client]]:
    daemon = Mortal(tmp_path / "state", config or settings(tmp_path, "namespace", warm=3))
    before = Snapshot.take(daemon.state)
    try:
        async with Client(await daemon.start()) as client:
            yield daemon, client
    finally:
        await daemon.stop()
    await gone(daemon.state, before)


async def full(client: Client, warm: int = 3) -> None:
    async with asyncio.timeout(30):
        while (await client.get_pool("python")).warm < warm:
            await asyncio.sleep(0.02)


async def names(client: Client, state: str) -> set[str]:
    return {info.name async for info in client.list_sandboxes() if info.state == state}


async def test_a_lease_outlives_the_daemon(tmp_path: Path) -> None:
    async with restarts(tmp_path) as (daemon, client):
        box = await client.acquire("python", timeout=60, ttl=100, labels={"a": "b"}, request_id="mine")
        await box.write_file("kept", b"what I wrote")
        await full(client)
        warm = await names(client, "WARM")
        await daemon.kill()
        await daemon.start()
        assert (await client.get_pool("python")).active == 1
        assert await box.read_file("kept") == b"what I wrote"
        # Those that were ready still are, and nothing was made in their place.
        await full(client)
        assert await names(client, "WARM") == warm
        again = await client.acquire("python", timeout=60, request_id="mine")
        assert again.name == box.name
        (info,) = [info async for info in client.list_sandboxes() if info.state == "ACTIVE"]
        assert dict(info.labels) == {"a": "b"}
        await box.release()
        stats = await client.get_pool("python")
        assert (stats.acquired_total, stats.released_total, stats.lost_total, stats.active) == (1, 1, 0, 0)


async def test_a_call_made_while_no_daemon_runs_waits_for_the_next(tmp_path: Path) -> None:
    async with restarts(tmp_path) as (daemon, client):
        box = await client.acquire("python", timeout=60)
        await daemon.kill()
        pool, another = (
            asyncio.ensure_future(client.get_pool("python")),
            asyncio.ensure_future(_acquired(client)),
        )
        await daemon.start()
        assert (await pool).active >= 1
        assert (await another).name != box.name
        assert (await box.exec(["true"])).ok


async def _acquired(client: Client) -> Box:
    return await client.acquire("python", timeout=60)


async def test_what_died_meanwhile_is_lost_and_what_was_released_is_gone(
    tmp_path: Path,
) -> None:
    async with restarts(tmp_path) as (daemon, client):
        dies, released = await _acquired(client), await _acquired(client)
        await released.release()
        await full(client)
        pid = await pid_of(dies)
        await daemon.kill()
        os.kill(pid, signal.SIGKILL)
        await daemon.start()
        with pytest.raises(errors.SandboxLost, match="died while no daemon ran"):
            await dies.exec(["true"])
        with pytest.raises(errors.SandboxNotFound):
            await released.exec(["true"])
        stats = await client.get_pool("python")
        assert (stats.acquired_total, stats.released_total, stats.lost_total) == (2, 1, 1)
        await daemon.kill()
        await daemon.start()
        # For ever: a third daemon says the same.
        with pytest.raises(errors.SandboxLost, match="died while no daemon ran"):
            await dies.exec(["true"])


async def pid_of(box: Box) -> int:
    """Of the first process of a sandbox, by its control group: nothing inside it can kill that one."""
    mark = f"/{box.name.rpartition('/')[2]}"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "comm").read_text() == "sandboxd-guest\n" and mark in (
                    entry / "cgroup"
                ).read_text():
                    return int(entry.name)
    raise AssertionError(f"no first process of {box}")


async def test_a_lease_that_ran_out_meanwhile_may_still_be_renewed_for_a_moment(clock: ManualClock) -> None:
    clock.advance(1000.0)
    backend, template = FakeBackend(clock=clock), Template("p")
    options = PoolOptions(Bounds(warm_target=0, size_limit=9, start_limit=9, waiting_limit=9))
    pool = Pool("p", backend=backend, template=template, options=options, clock=clock)
    past, connections = Past(totals=Totals(acquired=2)), {}
    for name in ("p-idle", "p-renewed"):
        connections[name] = await backend.create(name, template)
        past.entries.append(Entry(name, 0.0, template.digest, expiry=900.0, ttl=60.0))
    pool.restore(past, connections)
    # Others are taken over meanwhile, one of which does not answer.
    clock.advance(RENEWAL_GRACE_SECONDS)
    async with pool.run():
        clock.advance(RENEWAL_GRACE_SECONDS - 1)
        await settle()
        pool.renew("p-renewed")
        clock.advance(2)
        await settle()
        with pytest.raises(errors.LeaseExpired):
            pool.get("p-idle")
        assert pool.get("p-renewed").expiry == clock.now() - 2 + 60.0
        assert await backend.list_ids() == ["p-renewed"]


async def test_a_detached_command_runs_on_and_its_output_is_there_for_the_next_daemon(tmp_path: Path) -> None:
    async with restarts(tmp_path) as (daemon, client):
        box = await _acquired(client)
        script = "echo before; while [ ! -e go ]; do sleep 0.02; done; echo after"
        command = await box.start(["sh", "-c", script], command_id="long")
        async for event in command.attach():
            if getattr(event, "data", b""):
                break
        await daemon.kill()
        await daemon.start()
        await box.write_file("go", b"")
        result = await command.wait()
        assert (result.stdout, result.exit_code) == (b"before\nafter\n", 0)
        # Who had read so far goes on from there, byte by byte.
        rest = [event async for event in command.attach(stdout_offset=len(b"befo"))]
        output = [event for event in rest if isinstance(event, Stdout)]
        assert output[0].offset == 4
        assert b"".join(event.data for event in output) == b"re\nafter\n"


async def test_a_bounded_command_goes_on_under_the_next_daemon_and_runs_once(tmp_path: Path) -> None:
    async with restarts(tmp_path) as (daemon, client):
        box = await _acquired(client)
        script = "echo began >>runs; while [ ! -e go ]; do sleep 0.02; done; cat runs"
        running = asyncio.ensure_future(box.exec(["sh", "-c", script], output_limit=1000))
        async with asyncio.timeout(20):
            while not (await box.exec(["test", "-s", "runs"])).ok:
                await asyncio.sleep(0.02)
        await daemon.kill()
        # Made while no daemon runs: it begins under the next.
        later = asyncio.ensure_future(box.exec(["echo", "later"], output_limit=1000))
        await daemon.start()
        assert (await later).stdout == b"later\n"
        await box.write_file("go", b"")
        assert (await running).stdout == b"began\n"


async def test_a_bounded_command_that_is_given_up_is_killed(tmp_path: Path) -> None:
    async with restarts(tmp_path) as (_, client):
        box = await _acquired(client)
        running = asyncio.ensure_future(box.exec(["sh", "-c", "echo $$ >pid; sleep 1000"], output_limit=1000))
        async with asyncio.timeout(20):
            while not (await box.exec(["test", "-s", "pid"])).ok:
                await asyncio.sleep(0.02)
        running.cancel()
        gone = "while kill -0 $(cat pid) 2>/dev/null; do sleep 0.01; done"
        assert (await box.exec(["sh", "-c", gone], timeout=20)).ok
        assert await box.list_commands() == []


async def test_an_orderly_end_leaves_nothing_to_take_over(tmp_path: Path) -> None:
    async with restarts(tmp_path) as (daemon, client):
        box = await _acquired(client)
        await daemon.stop()
        assert not list(daemon.state.glob("journal*"))
        await daemon.start()
        with pytest.raises(errors.SandboxNotFound):
            await box.exec(["true"])


async def test_what_is_nobodys_is_destroyed_and_what_is_held_stays_as_it_was(tmp_path: Path) -> None:
    """A start under way at the kill, and a pool of another template: neither is handed out. A lease keeps the
    template that it began with, whatever the settings say by now.
    """
    config = settings(tmp_path, "namespace", warm=3)
    plain = config.read_text()
    config.write_text(plain + 'env = {A = "old"}\ncwd = "/tmp"\n')
    async with restarts(tmp_path, config) as (daemon, client):
        await full(client)
        old = await names(client, "WARM")
        held = await _acquired(client)
        await daemon.kill()
        config.write_text(plain + 'env = {A = "new"}\n')
        await daemon.start()
        await full(client)
        assert await names(client, "WARM") & old == set()
        async with client.acquire("python", timeout=60) as fresh:
            assert (await fresh.exec(["sh", "-c", "echo $A $PWD"])).stdout == b"new /workspace\n"
        async with held.fork(1) as (fork,):
            await daemon.kill()
            await daemon.start()
            for box in (held, fork):
                assert (await box.exec(["sh", "-c", "echo $A $PWD"])).stdout == b"old /tmp\n"
        async with asyncio.timeout(20):
            while len(inhabited(daemon.state / "namespace")) > 4:
                await asyncio.sleep(0.02)


async def test_a_journal_that_is_none_is_begun_anew(tmp_path: Path) -> None:
    async with restarts(tmp_path) as (daemon, client):
        box = await _acquired(client)
        await daemon.kill()
        for path in daemon.state.glob("journal.sqlite3*"):
            path.write_bytes(b"no database at all, but long enough to be looked at" * 100)
        await daemon.start()
        with pytest.raises(errors.SandboxNotFound):
            await box.exec(["true"])
        await full(client)
        assert "is begun anew" in (daemon.state / "daemon.log").read_text()


async def test_a_launcher_that_dies_while_a_daemon_starts_is_replaced(tmp_path: Path) -> None:
    async with restarts(tmp_path) as (daemon, client):
        box = await _acquired(client)
        backend = NamespaceBackend(daemon.state / "namespace")
        await daemon.kill()
        await backend.open()
        assert backend.launcher_pid is not None
        os.kill(backend.launcher_pid, signal.SIGKILL)
        starting = asyncio.ensure_future(daemon.start())
        # Whatever moment of its start the death falls into.
        await backend.let_go()
        await starting
        with pytest.raises(errors.SandboxLost):
            await box.exec(["true"])
        assert (await (await _acquired(client)).exec(["true"])).ok


async def test_a_daemon_that_cannot_listen_leaves_what_the_killed_one_had(tmp_path: Path) -> None:
    config = settings(tmp_path, "namespace", warm=3)
    async with restarts(tmp_path, config) as (daemon, client):
        box = await _acquired(client)
        await daemon.kill()
        as_it_was = config.read_text()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            config.write_text(f'listen = ["127.0.0.1:{taken.getsockname()[1]}"]\n{as_it_was}')
            with pytest.raises(errors.BackendUnavailable, match="Address already in use"):
                await daemon.start()
        config.write_text(as_it_was)
        await daemon.start()
        assert (await box.exec(["true"])).ok


class Unopened(FakeBackend):
    """Cannot be opened."""

    async def open(self) -> None:
        raise errors.BackendUnavailable("no engine")


@pytest.mark.parametrize("started", [False, True])
async def test_what_one_backend_had_stays_where_another_cannot_be_opened(
    tmp_path: Path, clock: ManualClock, started: bool
) -> None:
    there = FakeBackend()
    await there.create("of-the-killed-one", Template("p"))
    both: dict[str, FakeBackend] = {"docker": there, "namespace": Unopened()}
    pools = {kind: {"backend": kind, "image": "any"} for kind in both}
    config = Config.model_validate({"state_dir": tmp_path, "images_dir": tmp_path, "pools": pools})
    with pytest.raises(errors.BackendUnavailable, match="no engine"):
        async with BackendSet(config, clock, lambda kind, _: both[kind]) as backends:
            backends.own = started
            await backends.open_for(config)
    assert await there.list_ids() == ([] if started else ["of-the-killed-one"])
    await there.close()


async def test_what_a_daemon_meets_is_not_told_as_a_state_directory_in_use(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError, match="no thread"), state_directory(tmp_path):
        raise BlockingIOError(11, "no thread")
