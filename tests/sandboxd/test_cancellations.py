"""A cancellation outlives the clean-up that it calls for, and the clean-up a second cancellation."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from sandboxd.backends.fake import FakeBackend, FakeConnection
from sandboxd.backends.link import Link
from sandboxd.backends.snapshots import Snapshots
from sandboxd.clock import ManualClock
from sandboxd.errors import SandboxLost, StartFailed
from sandboxd.forking import Forks
from sandboxd.lifetime import cleaned_up
from sandboxd.pacing import Bucket, Pace
from sandboxd.slots import Slots
from sandboxd.starting import RetryPolicy, Starter
from sandboxd.turns import Turns
from sandboxd.types import Template

pytestmark = pytest.mark.anyio


async def test_a_clean_up_ends_whatever_cancellations_come(caplog: pytest.LogCaptureFixture) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def clean_up() -> None:
        begun.set()
        await may_end.wait()
        raise ValueError("a reason")

    cleaning = asyncio.create_task(cleaned_up("cleaning", clean_up()))
    async with asyncio.timeout(20):
        await begun.wait()
        for _ in range(2):
            cleaning.cancel()
            await asyncio.sleep(0)
            assert not cleaning.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await cleaning
    assert "cleaning: ValueError: a reason" in caplog.text


async def test_a_branch_that_fails_says_why_where_its_removal_fails_too() -> None:
    backend = FakeBackend()
    backend.script.prune_failures = 1
    with pytest.raises(SandboxLost, match="gone"):
        await backend.branch("none", Template("p"), "b")
    await backend.close()


async def test_a_copy_whose_end_cannot_be_asked_for_is_cancelled_all_the_same() -> None:
    ours, theirs = socket.socketpair()
    link = Link(*await asyncio.open_unix_connection(sock=ours))
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    branching = asyncio.create_task(Snapshots(link, 0).branch("s", "b"))
    async with asyncio.timeout(20):
        assert json.loads(await reader.readline())["do"] == "copy"
        branching.cancel()
        assert json.loads(await reader.readline())["do"] == "give up"
        writer.close()
        await asyncio.wait([branching])
    assert branching.cancelled()
    await link.close()
    await writer.wait_closed()


class Hanging(FakeBackend):
    """Gives no answer to a destruction."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.made, self.asked = asyncio.Event(), asyncio.Event()

    async def create(self, sandbox_id: str, template: Template) -> FakeConnection:
        connection = await super().create(sandbox_id, template)
        self.made.set()
        return connection

    async def destroy(self, sandbox_id: str) -> None:
        self.asked.set()
        if self.made.is_set():
            await asyncio.get_running_loop().create_future()
        await super().destroy(sandbox_id)


async def test_a_start_cancelled_again_in_its_clean_up_says_that_something_is_left(
    clock: ManualClock,
) -> None:
    backend, left = Hanging(clock), list[bool]()
    template = Template("p", setup=(b"sleep", b"1000"))
    starter = Starter(backend, template, RetryPolicy(), clock, Pace(ceiling=1))
    starting = asyncio.create_task(starter.start("s", between=clock.sleep, left=lambda: left.append(True)))
    async with asyncio.timeout(20):
        await backend.made.wait()
        starting.cancel()
        await backend.asked.wait()
        starting.cancel()
        await asyncio.wait([starting])
    assert starting.cancelled()
    assert left == [True]
    backend.made.clear()
    await backend.close()


class Noted(FakeConnection):
    """Says when it is closed."""

    def __init__(self, template: Template) -> None:
        super().__init__(template)
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class HalfStarted(FakeBackend):
    """The first sandbox is there at once, the second is being made for ever and does not end by itself when
    it is cancelled, the third fails once the second is being made.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.first = Noted(Template("p"))
        self.making, self.ending = asyncio.Event(), asyncio.Event()

    async def create(self, sandbox_id: str, template: Template) -> FakeConnection:
        if sandbox_id == "first":
            return self.first
        if sandbox_id == "third":
            await self.making.wait()
            raise StartFailed("no", retryable=False)
        forever: asyncio.Future[FakeConnection] = asyncio.get_running_loop().create_future()
        self.making.set()
        try:
            return await forever
        finally:
            self.ending.set()
            await asyncio.get_running_loop().create_future()


def forks_of(backend: FakeBackend, clock: ManualClock) -> Forks:
    turns = Turns(Slots(Pace(floor=3, ceiling=3)), Bucket(), clock, lambda: 3)
    return Forks(backend, RetryPolicy(), clock, turns)


async def test_forks_that_are_cancelled_while_they_are_undone_close_what_they_opened(
    clock: ManualClock,
) -> None:
    """And wait for no backend that hangs."""
    backend = HalfStarted(clock)
    names = ["first", "second", "third"]
    starting = asyncio.create_task(forks_of(backend, clock).start(Template("p"), names))
    async with asyncio.timeout(20):
        await backend.ending.wait()
        assert not starting.done()
        starting.cancel()
        await asyncio.wait([starting])
    assert starting.cancelled()
    assert backend.first.closed


async def test_a_copy_whose_removal_failed_is_removed_later(clock: ManualClock) -> None:
    backend = FakeBackend(clock=clock)
    forks = forks_of(backend, clock)
    backend.script.prune_failures = 1
    with pytest.raises(SandboxLost, match="gone"):
        await forks.branch("none", Template("p"), 1)
    assert set(backend.branches()) == forks.unused
    assert len(forks.unused) == 1
    await forks.prune()
    assert backend.branches() == []
    assert forks.unused == set()
    await backend.close()
