"""Settings read again while the daemon runs: pools come, go and change, and no lease is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd import Client, errors
from sandboxd.backends.fake import FakeScript
from sandboxd.config import load
from sandboxd.daemon import Control, running
from sandboxd.ledger import Bounds
from sandboxd.pool import PoolOptions
from sandboxd.types import PoolState, PoolStats, Reloaded, Template
from tests.sandboxd.test_cli import run

pytestmark = pytest.mark.anyio
OpenRig = Callable[..., Any]

A = '[pools.a]\nbackend = "fake"\nwarm = 2\n'
B = '[pools.b]\nbackend = "fake"\nwarm = 1\n'


class Settings:
    """A daemon's settings file, and the daemon's client."""

    def __init__(self, path: Path, client: Client, control: Control) -> None:
        self.path, self.client, self.control = path, client, control

    async def become(self, text: str) -> Reloaded:
        self.path.write_text(text)
        return await self.client.reload_config()

    async def until(self, pool: str, there: Callable[[PoolStats], bool]) -> PoolStats:
        told = self.client.watch_pool(pool, interval=0.02)
        async with asyncio.timeout(20), contextlib.aclosing(told) as watch:
            async for stats in watch:
                if there(stats):
                    return stats
        raise AssertionError("the watch ended")


@contextlib.asynccontextmanager
async def daemon_with(tmp_path: Path, text: str) -> AsyncIterator[Settings]:
    path = tmp_path / "sandboxd.toml"
    path.write_text(text)

    def read() -> Any:
        return load(path, state_dir=tmp_path / "state")

    control = Control(read)
    async with running(read(), control=control) as addresses, Client(addresses[0]) as client:
        control.hurry.set()
        yield Settings(path, client, control)


async def test_new_pools_start_and_unchanged_ones_stay(tmp_path: Path) -> None:
    async with daemon_with(tmp_path, A) as settings:
        async with settings.client.acquire("a", timeout=10) as box:
            warm = await settings.until("a", lambda stats: stats.warm == 2)
            assert await settings.become(A + B) == Reloaded(added=("b",))
            async with settings.client.acquire("b", timeout=10) as other:
                assert (await other.exec(["true"])).ok
            assert (await box.exec(["true"])).ok
        again = await settings.client.get_pool("a")
        # Nothing was replaced.
        assert again.started_total == warm.started_total
        assert await settings.become(A + B) == Reloaded()


async def test_a_removed_pool_ends_with_its_last_lease(tmp_path: Path) -> None:
    async with daemon_with(tmp_path, A + B) as settings:
        client = settings.client
        box = await client.acquire("b", timeout=10)
        async with contextlib.aclosing(client.watch_pool("b", interval=0.02)) as watch:
            await anext(watch)
            assert await settings.become(A) == Reloaded(removed=("b",))
            with pytest.raises(errors.PoolNotFound, match="removed from the settings"):
                async with asyncio.timeout(20):
                    async for _ in watch:
                        pass
        with pytest.raises(errors.PoolNotFound):
            await client.acquire("b", timeout=10)
        with pytest.raises(errors.PoolNotFound):
            await client.get_pool("b")
        # Its lease goes on: commands, renewal, the listing.
        assert (await box.exec(["true"])).ok
        states = {info.name: info.state async for info in client.list_sandboxes()}
        assert states[box.name.removeprefix("sandboxes/")] == "ACTIVE"
        await box.release()
        async with asyncio.timeout(20):
            while await _sandboxes(client, "b"):
                await asyncio.sleep(0.01)
        with pytest.raises(errors.SandboxNotFound):
            await box.exec(["true"])
        assert (await settings.become(A + B)).added == ("b",)
        async with client.acquire("b", timeout=10):
            pass


async def test_a_removed_pool_comes_back_with_its_leases(tmp_path: Path) -> None:
    async with daemon_with(tmp_path, A + B) as settings:
        box = await settings.client.acquire("b", timeout=10)
        await settings.become(A)
        assert (await settings.become(A + B)).added == ("b",)
        stats = await settings.until("b", lambda stats: stats.warm == 1)
        assert (stats.state, stats.active) == (PoolState.OK, 1)
        assert (await box.exec(["true"])).ok
        await box.release()


async def test_who_waits_for_a_removed_pool_hears_so(tmp_path: Path) -> None:
    full = '[pools.b]\nbackend = "fake"\nwarm = 0\nsize_limit = 1\n'
    async with daemon_with(tmp_path, A + full) as settings:
        async with settings.client.acquire("b", timeout=10):
            waiting = asyncio.ensure_future(settings.client.acquire("b", timeout=60).__aenter__())
            await settings.until("b", lambda stats: stats.waiting == 1)
            await settings.become(A)
            with pytest.raises(errors.PoolNotFound, match="pool 'b' was removed from the settings"):
                await waiting


async def test_bounds_hold_at_once_and_templates_for_new_sandboxes(tmp_path: Path) -> None:
    async with daemon_with(tmp_path, A) as settings:
        client = settings.client
        async with client.acquire("a", timeout=10) as old:
            before = await settings.until("a", lambda stats: stats.warm == 2)
            told = await settings.become(A.replace("warm = 2", "warm = 4\nsize_limit = 9"))
            assert told == Reloaded(changed=("a",))
            after = await settings.until("a", lambda stats: stats.warm == 4)
            # The two that were ready still are: only bounds have changed.
            assert (after.size_limit, after.started_total - before.started_total) == (9, 2)
            await settings.become(A + 'env = {WORD = "new"}\n')
            async with client.acquire("a", timeout=10) as new:
                assert (await new.exec(["sh", "-c", "echo $WORD"])).stdout == b"new\n"
            await settings.until("a", lambda stats: stats.warm == 2 and not stats.deleting)
            assert (await old.exec(["sh", "-c", "echo $WORD"])).stdout == b"\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pools = 1\n", "nothing was changed: .*pools = 1"),
        ("[pools.a\n", "is not valid TOML"),
        ("[pools.a]\nwram = 3\n", "unknown key 'pools.a.wram' = 3; did you mean 'warm'"),
        (A + "[fake]\nstart_seconds = 1\n", "fake cannot change while the daemon runs"),
        ('listen = ["127.0.0.1:0"]\n' + A, "listen cannot change while the daemon runs"),
        ("[pools.a]\nwarm = 2\n", "pools.a.backend cannot change from 'fake' to 'namespace'"),
    ],
)
async def test_a_faulty_file_changes_nothing(tmp_path: Path, text: str, words: str) -> None:
    async with daemon_with(tmp_path, A) as settings:
        async with settings.client.acquire("a", timeout=10) as box:
            before = await settings.until("a", lambda stats: stats.warm == 2)
            with pytest.raises(errors.InvalidRequest, match=words):
                await settings.become(text)
            with pytest.raises(errors.InvalidRequest, match=words):
                await settings.become(text)
            assert (await box.exec(["true"])).ok
            assert (await settings.client.get_pool("a")).started_total == before.started_total
        assert await settings.become(A) == Reloaded()


async def test_a_daemon_without_a_file_says_so(tmp_path: Path) -> None:
    config = load(None, state_dir=tmp_path / "state", pools={"a": {"backend": "fake"}})
    async with running(config) as addresses, Client(addresses[0]) as client:
        with pytest.raises(errors.InvalidRequest, match="no settings file to read again"):
            await client.reload_config()


async def test_a_template_that_hangs_is_replaced_at_once(rig: OpenRig) -> None:
    """What is under way from the old one is withdrawn, and whoever waits gets a sandbox of the new one."""
    async with rig(size=3, starts=1, script=FakeScript(start_seconds=1e6)) as r:
        waiting = asyncio.ensure_future(r.pool.acquire())
        await r.advance(1.0)
        assert r.counts.startswith("1 starting")
        r.backend.script.start_seconds = 0.0
        r.pool.reconfigure(Template("p", env={b"A": b"1"}), PoolOptions(Bounds(1, 3, 1, 9)))
        sandbox = await waiting
        assert sandbox.origin.env == {b"A": b"1"}
        await r.advance(1.0)
        r.pool.check()
        assert (r.pool.stats().warm, r.backend.created_total) == (1, 2), r.counts
        r.pool.release(sandbox.id)


async def test_a_broken_template_that_was_mended_is_tried_at_once(rig: OpenRig) -> None:
    broken = errors.StartFailed("no such image", retryable=False)
    async with rig(warm=1, script=FakeScript(first_failures=[broken])) as r:
        assert r.pool.stats().state is PoolState.DEGRADED
        r.pool.reconfigure(Template("p", image="good"), PoolOptions(Bounds(3, 9, 9, 9)))
        await r.advance(0.0)
        assert (r.pool.stats().state, r.pool.stats().warm) == (PoolState.OK, 3)
        r.pool.check()


def test_sighup_and_the_command_line(tmp_path: Path) -> None:
    config, log = tmp_path / "sandboxd.toml", tmp_path / "log"
    config.write_text(A)
    command = [sys.executable, "-m", "sandboxd", "serve", "--config", config, "--state-dir", tmp_path / "s"]
    with (
        log.open("wb") as errors_,
        subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=errors_) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().decode().split(" serving ")[1].split(";")[0]
        config.write_text(A + B)
        assert run("reload", "--address", address).stdout == b"added b\n"
        config.write_text("[pools.a]\nwram = 3\n")
        failed = run("reload", "--address", address)
        assert (failed.returncode, len(failed.stderr.splitlines())) == (1, 1)
        assert b"did you mean 'warm'" in failed.stderr
        _hup(process.pid, log, "the settings were not read again: nothing was changed: ")
        config.write_text('log_level = "WARNING"\n' + A)
        _hup(process.pid, log, "the settings were read again: removed b")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    # The last line was said before the new level held.
    assert log.read_text().rstrip().endswith("removed b")


def _hup(pid: int, log: Path, words: str) -> None:
    """Sends SIGHUP and waits for the line that the daemon logs about it."""
    seen = log.stat().st_size
    os.kill(pid, signal.SIGHUP)
    tail = subprocess.run(
        ["sh", "-c", f'tail -c +{seen + 1} -f "$1" | grep -m 1 -F "$2"', "sh", log, words],
        capture_output=True,
        timeout=20,
        check=True,
    )
    assert tail.stdout


async def _sandboxes(client: Client, pool: str) -> list[str]:
    return [info.name async for info in client.list_sandboxes() if info.pool == pool]


async def test_a_pool_on_the_hosts_network_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warned() -> list[str]:
        return [line.message[:7] for line in caplog.records if 'network = "host"' in line.message]

    host = 'network = "host"\n'
    async with daemon_with(tmp_path, A + host + B) as settings:
        assert warned() == ["pool a:"]
        await settings.become(A + host + "size_limit = 9\n" + B + host)
        assert warned() == ["pool a:", "pool b:"]
        await settings.become(A + host + B)
        assert warned() == ["pool a:", "pool b:"]
