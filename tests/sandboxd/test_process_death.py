"""kill -9 of a client and of the daemon: nothing is lost to others, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd import Client, errors
from sandboxd.bench.audit import Snapshot
from sandboxd.bench.holder import holder
from sandboxd.child import child_daemon

pytestmark = pytest.mark.anyio

LEASES = 20
DAEMON = """
import asyncio, pathlib, sys
from sandboxd.bench.holder import holder
from sandboxd.child import child_daemon

async def main():
    state, config = map(pathlib.Path, sys.argv[1:])
    async with child_daemon(state, config=config) as address:
        print(address, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


def settings(directory: Path, backend: str, *, warm: int = 2) -> Path:
    path = directory / "daemon.toml"
    path.write_text(f'drain_seconds = 0.2\n[pools.python]\nbackend = "{backend}"\nwarm = {warm}\n')
    return path


@contextlib.contextmanager
def program(text: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


async def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout
    return (await asyncio.to_thread(process.stdout.readline)).decode().strip()


async def test_a_killed_clients_leases_come_back_and_others_stay(tmp_path: Path) -> None:
    config = settings(tmp_path, "namespace")
    async with child_daemon(tmp_path / "state", config=config) as address, Client(address) as client:
        mine = await client.acquire("python", ttl=4.0, timeout=60)
        async with holder(address, "python", LEASES, 4.0) as other:
            assert await other.held() == LEASES
            assert (await client.get_pool("python")).active == LEASES + 1
            other.kill()
            async with asyncio.timeout(20):
                while (await client.get_pool("python")).active > 1:
                    await asyncio.sleep(0.05)
        stats = await client.get_pool("python")
        assert stats.expired_total == LEASES
        assert (await mine.exec(["true"])).ok
        await mine.release()


@pytest.mark.parametrize("backend", ["fake", "namespace"])
async def test_a_killed_users_daemon_ends_with_it(tmp_path: Path, backend: str) -> None:
    state = tmp_path / "state"
    before = Snapshot.take(state)
    with program(DAEMON, state, settings(tmp_path, backend)) as user:
        address = await line_of(user)
        async with Client(address) as client:
            box = await client.acquire("python", timeout=60)
            assert (await box.exec(["true"])).ok
        user.kill()
        await gone(state, before)


async def test_a_killed_daemon_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    state = tmp_path / "state"
    config = settings(tmp_path, "namespace", warm=5)
    before = Snapshot.take(state)
    with pytest.raises(errors.SandboxdError):
        async with child_daemon(state, config=config) as address, Client(address) as client:
            box = await client.acquire("python", timeout=60)
            pid = int((state / "daemon.lock").read_text())
            os.kill(pid, signal.SIGKILL)
            await box.exec(["true"])
    async with child_daemon(state, config=config) as address, Client(address) as client:
        async with client.acquire("python", timeout=60) as box:
            assert (await box.exec(["true"])).ok
    await gone(state, before)


async def gone(state: Path, before: Snapshot) -> None:
    """Waits until nothing of the daemon on `state` exists any more."""
    async with asyncio.timeout(30):
        while any(Snapshot.take(state).since(before).values()):
            await asyncio.sleep(0.05)
