"""Faults on purpose: what they do on a real backend and on the fake one, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd import Client, errors
from sandboxd.backends.base import Backend
from sandboxd.backends.fake import FakeBackend
from sandboxd.backends.faults import Fault, FaultyBackend
from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.config import ConfigError, load
from sandboxd.errors import BackendUnavailable, SandboxLost, StartFailed
from sandboxd.types import Template

from .backend_kit import Case, shell

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]


def faulty(case: Case, *faults: str) -> FaultyBackend:
    return FaultyBackend(case.backend, [Fault.parse(fault) for fault in faults])


@contextlib.asynccontextmanager
async def nothing_left(backend: Backend) -> AsyncIterator[None]:
    yield
    assert await backend.list_ids() == []


async def test_a_start_fails_in_its_phase_and_leaves_nothing(case: Case) -> None:
    for phase in ("create", "start", "ready"):
        backend = faulty(case, f"fail {phase} 1")
        async with nothing_left(backend):
            with pytest.raises(StartFailed, match="asked for") as raised:
                await backend.create("s", case.template)
            assert raised.value.phase == phase


def descriptors(pids: list[int]) -> list[int]:
    return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]


async def test_failed_starts_leave_no_descriptors(backend: NamespaceBackend) -> None:
    """In the daemon, the launcher and the starter; some failed before there was a sandbox, some after."""
    faulty = FaultyBackend(backend, [Fault.parse("fail ready 1")])

    async def fail(number: int) -> None:
        template = Template("t", cwd=b"/proc/none") if number % 2 else Template("t")
        with pytest.raises(StartFailed):
            await faulty.create(f"s{number}", template)

    for number in range(8):
        await fail(number)
    launcher = backend.launcher_pid
    assert launcher is not None
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    pids = [os.getpid(), launcher, *map(int, children)]
    before = descriptors(pids)
    for batch in range(10):
        await asyncio.gather(*(fail(8 + 10 * batch + number) for number in range(10)))
    async with asyncio.timeout(20):
        # What is given back is closed a moment later.
        while any(now > then for now, then in zip(descriptors(pids), before, strict=True)):
            await asyncio.sleep(0.02)
    assert await backend.list_ids() == []


async def test_a_hung_start_that_is_given_up_leaves_nothing(case: Case) -> None:
    backend = faulty(case, "hang ready 1")
    async with nothing_left(backend):
        starting = asyncio.ensure_future(backend.create("s", case.template))
        async with asyncio.timeout(30):
            while not await backend.list_ids():
                await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


@pytest.mark.parametrize("fault", ["die 1", "garble 1", "lie 1"])
async def test_a_sandbox_that_is_struck_is_lost_and_stays_so(case: Case, fault: str) -> None:
    backend = faulty(case, fault)
    async with nothing_left(backend):
        connection = await backend.create("s", case.template)
        watching = asyncio.ensure_future(connection.wait_lost())
        for _ in range(2):
            with pytest.raises(SandboxLost):
                await shell(connection, "echo a; sleep 10")
        assert await asyncio.wait_for(watching, 20)
        await connection.close()
        await backend.destroy("s")


async def test_a_destruction_fails(case: Case) -> None:
    backend = faulty(case, "fail destroy 1")
    connection = await backend.create("s", case.template)
    with pytest.raises(BackendUnavailable, match="asked for"):
        await backend.destroy("s")
    backend.faults = ()
    assert (await shell(connection, "true")).code == 0
    await connection.close()
    await backend.destroy("s")


async def test_one_seed_gives_one_course() -> None:
    async def course(seed: int) -> list[bool]:
        backend = FaultyBackend(FakeBackend(), [Fault.parse("fail start 0.5")], seed=seed)
        outcomes = []
        for n in range(40):
            try:
                await backend.create(f"s{n}", Template("t"))
                outcomes.append(True)
            except StartFailed:
                outcomes.append(False)
        await backend.close()
        return outcomes

    assert await course(7) == await course(7) != await course(8)
    assert 5 < sum(await course(7)) < 35


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with none of fail, hang"),
        ("fali start 0.1", "begins with none of fail, hang"),
        ("fail 0.1", "needs one of pull, create, start, ready, reset, destroy after fail"),
        ("fail start", "needs its chance"),
        ("fail start 1.5", "needs its chance from 0 to 1"),
        ("slow start 0.5", "and the seconds that it lasts"),
        ("die often", "'often' in fault 'die often' is not a number"),
    ],
)
def test_a_fault_that_is_none_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(None, faults=[text])


async def test_a_daemon_with_faults_tells_them_from_the_callers(daemon: OpenDaemon, tmp_path: Path) -> None:
    pools = {"p": {"backend": "fake", "warm": 0, "retry": {"attempts": 1}}}
    async with daemon(pools=pools, faults=["fail start 0.5"], fault_seed=3) as client:
        outcomes = [await outcome(client) for _ in range(20)]
    assert set(outcomes) == {"ran", "START_FAILED"}


async def outcome(client: Client) -> str:
    try:
        async with client.acquire("p", timeout=20) as box:
            assert (await box.exec(["true"])).ok
    except errors.SandboxdError as error:
        return error.reason if error.mask else f"{error.reason}, unmasked"
    return "ran"
