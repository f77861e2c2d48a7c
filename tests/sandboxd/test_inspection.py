"""What a person is told of a sandbox: over the wire, by the client and by the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.cli import main
from sandboxd.errors import PoolNotFound, SandboxNotFound, StartFailed
from sandboxd.types import Template

from .backend_kit import Case, shell

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]
FAILING = {"backend": "fake", "warm": 0, "setup": ["sh", "-c", "echo '[red]because' >&2; exit 3"]}


async def test_a_leased_sandbox_is_described(daemon: OpenDaemon) -> None:
    async with daemon() as client, client.acquire("python", labels={"episode": "7"}) as box:
        await box.exec(["touch", "x"])
        report = await client.inspect(box.name)
    assert (report.info.state, report.info.pool, report.info.labels) == ("ACTIVE", "python", {"episode": "7"})
    assert report.info.expires is not None
    assert (report.uses, report.failure) == (1, None)
    assert report.start_seconds is not None
    assert report.answered is not None
    assert abs(report.answered - time.time()) < 60
    assert Path(report.place["directory"]).name.startswith("sandboxd-fake-")


async def test_a_failure_is_told_when_the_sandbox_is_gone(daemon: OpenDaemon) -> None:
    async with daemon(pools={"bad": FAILING, "good": {"backend": "fake", "warm": 0}}) as client:
        with pytest.raises(StartFailed):
            await client.acquire("bad")
        (failure,) = await client.list_failures()
        assert (failure.phase, failure.cause, failure.log) == ("setup", "INFRASTRUCTURE", "[red]because\n")
        assert abs(failure.when - time.time()) < 60
        report = await client.inspect(f"sandboxes/{failure.sandbox}")
        assert (report.info.state, report.info.pool, report.failure) == ("GONE", "bad", failure)
        assert await client.list_failures("good") == []
        assert await client.list_failures("bad") == [failure]
        with pytest.raises(PoolNotFound):
            await client.list_failures("none")
        with pytest.raises(SandboxNotFound, match="no sandbox 'good-1' in pool 'good'"):
            await client.inspect("good-1")


async def test_a_sandbox_in_quarantine_is_listed_counted_and_described(daemon: OpenDaemon) -> None:
    async with daemon(pools={"bad": {**FAILING, "quarantine_limit": 1}}) as client:
        with pytest.raises(StartFailed):
            await client.acquire("bad")
        (listed,) = [each async for each in client.list_sandboxes()]
        assert listed.state == "QUARANTINED"
        assert (await client.get_pool("bad")).quarantined == 1
        report = await client.inspect(listed.name)
        assert (report.info.name, report.info.state) == (listed.name, "QUARANTINED")
        assert report.failure is not None


def test_the_command_prints_reports_and_failures(
    daemon: OpenDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play() -> None:
        async with daemon(pools={"bad": {**FAILING, "quarantine_limit": 1}}) as client:
            with pytest.raises(StartFailed):
                await client.acquire("bad")
            (listed,) = [each async for each in client.list_sandboxes()]
            ask = ["inspect", "--address", client.address]
            for more in (
                [listed.name],
                [listed.name, "--json"],
                ["--failures"],
                ["--failures", "bad", "--json"],
            ):
                assert await asyncio.to_thread(main, [*ask, *more]) == 0
            assert await asyncio.to_thread(main, ask) == 2

    asyncio.run(play())
    told = capsys.readouterr()
    text, objects = told.out, [json.loads(line) for line in told.out.splitlines() if line.startswith("{")]
    assert "QUARANTINED" in text
    assert "[red]because" in text
    assert objects[0]["failure"] == objects[1]
    assert "name a sandbox" in told.err


async def test_each_backend_says_where_a_sandbox_is(case: Case) -> None:
    backend = case.backend
    connection = await backend.create("t-1", case.template)
    await shell(connection, "touch x")
    place = await backend.describe("t-1")
    assert set(place) & {"directory", "container"}
    if "pid" in place:
        os.kill(int(place["pid"]), 0)
    await connection.close()
    await backend.destroy("t-1")
    assert await backend.describe("t-1") == {}
    assert await backend.describe("t-2") == {}


async def test_a_guest_that_was_stopped_is_found(backend: NamespaceBackend) -> None:
    """For real: the first process lives on, its socket takes connections, and nothing answers."""
    connection = await backend.create("t-1", Template("t"))
    place = await backend.describe("t-1")
    os.kill(int(place["pid"]), signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await connection.ping()
    os.kill(int(place["pid"]), signal.SIGCONT)
    async with asyncio.timeout(30):
        await connection.ping()
    assert (await shell(connection, "true")).code == 0
    await connection.close()
    await backend.destroy("t-1")
