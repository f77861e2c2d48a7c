"""Calls of the namespace backend that are cancelled at any moment, and daemons that come one upon another:
no descriptor stays open, nothing is left on the host, and the backend goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import io
import os
import signal
import sys
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from sandboxd.backends.launching import end_of
from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions
from sandboxd.errors import FileNotFound
from sandboxd.images.store import ImageStore
from sandboxd.types import Template
from tests.sandboxd.backend_kit import pieces, shell
from tests.sandboxd.namespace_kit import inhabited, leftovers, opened
from tests.sandboxd.test_descriptors import LOOPS, run, turns

pytestmark = pytest.mark.anyio

TEMPLATE = Template("t")
TURNS = range(25)
# What starts a sandbox or copies one costs more than the rest.
FEW_TURNS = (*range(8), 11, 15, 20)


def descriptors() -> Counter[str]:
    """What this process has open, by what it is."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            found[str(Path(f"/proc/self/fd/{name}").readlink()).partition(":")[0]] += 1
    return found


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not there():
            gc.collect()
            await asyncio.sleep(0.005)


async def cancelled(call: Awaitable[object], after: int = 0) -> None:
    """Cancels it after so many turns; what else becomes of it is raised."""
    task = asyncio.ensure_future(call)
    await turns(after)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def works(backend: NamespaceBackend, name: str = "again") -> None:
    connection = await backend.create(name, TEMPLATE)
    assert (await shell(connection, "echo on")).stdout == b"on\n"
    await connection.close()
    await backend.destroy(name)


def archive() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo("file")
        info.size = 100_000
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    return file.getvalue()


async def drained(stream: AsyncIterator[object]) -> None:
    async with contextlib.aclosing(stream) as each:  # type: ignore[type-var]
        async for _ in each:
            await asyncio.sleep(0)


class Calls:
    """Each public method, as a call that may be cancelled; what it makes has the number in its name."""

    def __init__(self, backend: NamespaceBackend) -> None:
        self.backend = backend

    async def begin(self) -> None:
        self.box = await self.backend.create("base", TEMPLATE)
        await shell(self.box, "mkdir d; head -c 500000 /dev/zero >d/big")

    async def cheap(self, number: int) -> list[Awaitable[object]]:
        box, files = self.box, self.box.files
        return [
            self.backend.list_ids(),
            self.backend.list_branches(),
            self.backend.describe("base"),
            self.backend.check(),
            self.backend.prune("none"),
            shell(box, "cat d/big"),
            shell(box, "cat", stdin=bytes(1 << 20)),
            shell(box, "sleep 0.01", id=f"c{number}"),
            box.commands.known(),
            box.wait_lost(),
            drained(files.read(b"d/big")),
            drained(files.pack(b"d")),
            drained(files.list_directory(b"d")),
            files.stat(b"d/big"),
            files.write(b"d/new", pieces(bytes(100_000), bytes(100_000)), 0o644),
            files.unpack(b"u", pieces(archive())),
            files.remove(b"u", recursive=True),
        ]

    async def create(self, number: int) -> Awaitable[object]:
        return self.backend.create(f"s{number}", TEMPLATE)

    async def destroy(self, number: int) -> Awaitable[object]:
        await (await self.backend.create(f"s{number}", TEMPLATE)).close()
        return self.backend.destroy(f"s{number}")

    async def reset(self, number: int) -> Awaitable[object]:
        await (await self.backend.create(f"s{number}", TEMPLATE)).close()
        return self.backend.reset(f"s{number}", f"r{number}", TEMPLATE)

    async def branch(self, number: int) -> Awaitable[object]:
        return self.backend.branch("base", TEMPLATE, f"b{number}")

    async def prune(self, number: int) -> Awaitable[object]:
        await self.backend.branch("base", TEMPLATE, f"b{number}")
        return self.backend.prune(f"b{number}")

    async def snapshot(self, number: int) -> Awaitable[object]:
        return self.backend.snapshot("base", TEMPLATE, f"i{number}")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_call_that_is_cancelled_at_any_moment(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    store = ImageStore(tmp_path / "images")

    async def body() -> None:
        async with opened(tmp_path / "state", NamespaceOptions(images_dir=store.root)) as backend:
            calls = Calls(backend)
            await calls.begin()
            before = descriptors()
            for number in TURNS:
                for call in await calls.cheap(number):
                    with contextlib.suppress(FileNotFound):
                        await cancelled(call, number)
            await works(backend)
            for each in (calls.create, calls.destroy, calls.reset, calls.branch, calls.prune, calls.snapshot):
                for number in FEW_TURNS:
                    await cancelled(await each(number), number)
                    for name in (f"s{number}", f"r{number}"):
                        await backend.destroy(name)
                    await backend.prune(f"b{number}")
            await works(backend)
            # One connection is kept for the next command.
            await until(lambda: not descriptors() - before - Counter(socket=1))
            assert await backend.list_ids() == ["base"]
            assert await backend.list_branches() == []
            assert inhabited(tmp_path / "state") == ["base"]
            await calls.box.close()
            for name in store.names():
                store.forget(name)

    run(loop, body())
    assert leftovers(tmp_path / "state") == []


SLOW_PYTHON = """#!/bin/sh
echo >>{begun}
read go <{gate}
exec {python} "$@"
"""


class Gate:
    """A launcher that starts no further until it is let on."""

    def __init__(self, directory: Path) -> None:
        self.python, self.begun, self._gate = (directory / name for name in ("python", "begun", "gate"))
        os.mkfifo(self._gate)
        paths = {"begun": self.begun, "gate": self._gate, "python": sys.executable}
        self.python.write_text(SLOW_PYTHON.format(**paths))
        self.python.chmod(0o755)

    async def until_begun(self) -> None:
        await until(self.begun.exists)

    def open(self) -> None:
        """For all that come."""
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        with self._gate.open("w") as gate:
            gate.write("on\n")


async def close(first: NamespaceBackend, _: NamespaceBackend) -> None:
    await first.close()


async def let_go(first: NamespaceBackend, second: NamespaceBackend) -> None:
    await first.let_go()
    await works_and_closes(second)


async def go_on(first: NamespaceBackend, _: NamespaceBackend) -> None:
    await works_and_closes(first)


async def works_and_closes(backend: NamespaceBackend) -> None:
    await backend.open()
    await works(backend)
    await backend.close()


@pytest.mark.parametrize("then", [close, let_go, go_on])
async def test_a_launcher_whose_opener_was_cancelled_is_not_left_alone(
    then: Callable[[NamespaceBackend, NamespaceBackend], Coroutine[Any, Any, None]], tmp_path: Path
) -> None:
    gate, state = Gate(tmp_path), tmp_path / "state"
    first, second = (NamespaceBackend(state, NamespaceOptions(python=str(gate.python))) for _ in range(2))
    before = descriptors()
    async with asyncio.timeout(40):
        opening = asyncio.create_task(first.open())
        await gate.until_begun()
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        following = asyncio.create_task(then(first, second))
        await turns(10)
        await asyncio.to_thread(gate.open)
        await following
        await until(lambda: not descriptors() - before)
    assert not state.exists()
    assert leftovers(state) == []


@pytest.mark.parametrize("after", range(4))
async def test_an_end_that_is_cancelled_goes_on_when_it_is_called_again(after: int, tmp_path: Path) -> None:
    """Also where another daemon has taken the launcher over."""
    state = tmp_path / "state"
    first, second = NamespaceBackend(state), NamespaceBackend(state)
    async with asyncio.timeout(15):
        await first.open()
        await (await first.create("one", TEMPLATE)).close()
        await second.open()
        await until(is_dismissed(first))
        await cancelled(first.close(), after)
        await first.close()
        await first.close()
        await works(second)
        await second.close()
    assert not state.exists()
    assert leftovers(state) == []


def is_dismissed(backend: NamespaceBackend) -> Callable[[], bool]:
    link = backend._linking.link
    assert link is not None
    return lambda: bool(link.broken)


async def test_what_was_let_go_of_is_watched_no_more(tmp_path: Path) -> None:
    before = descriptors()
    async with asyncio.timeout(20), opened(tmp_path / "state") as first:
        one = descriptors()
        second = NamespaceBackend(tmp_path / "state")
        for _ in range(3):
            await second.open()
            # It hears that another one is heard, and comes back.
            await until(is_dismissed(first))
            await first.list_ids()
            await until(is_dismissed(second))
            await second.let_go()
        await until(lambda: not descriptors() - one)
    await until(lambda: not descriptors() - before)


async def test_a_daemon_removes_what_it_has_also_when_another_was_heard(tmp_path: Path) -> None:
    async with asyncio.timeout(15), opened(tmp_path / "state") as first:
        await (await first.create("one", TEMPLATE)).close()
        await first.branch("one", TEMPLATE, "b")
        second = NamespaceBackend(tmp_path / "state")
        for remove, name in ((first.destroy, "one"), (first.prune, "b")):
            await second.open()
            await until(is_dismissed(first))
            await remove(name)
            await second.let_go()
        assert await first.list_ids() == []
        assert await first.list_branches() == []


async def test_daemons_that_come_and_go_at_once(tmp_path: Path) -> None:
    """As after a kill in the midst of a launcher's start, and where one starts as the other ends."""
    state = tmp_path / "state"
    first, second, third = (NamespaceBackend(state) for _ in range(3))
    async with asyncio.timeout(15):
        await asyncio.gather(first.open(), second.open())
        assert first.launcher_pid == second.launcher_pid
        await first.let_go()
        await asyncio.gather(second.close(), third.open())
        await works(third)
        await third.close()
    assert not state.exists()
    assert leftovers(state) == []


async def test_a_launcher_that_ends_takes_no_daemon_any_more(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first, second = NamespaceBackend(state), NamespaceBackend(state)
    async with asyncio.timeout(20):
        await first.open()
        await (await first.create("one", TEMPLATE)).close()
        sweeper, before = helper_of(first, b"sandboxd-sweeper"), first.launcher_pid
        os.kill(sweeper, signal.SIGSTOP)
        closing = asyncio.create_task(first.close())
        opening = asyncio.create_task(second.open())
        try:
            await asyncio.wait([opening], timeout=0.3)
        finally:
            os.kill(sweeper, signal.SIGCONT)
        await asyncio.gather(closing, opening)
        assert second.launcher_pid != before
        await works(second)
        await second.close()
    assert not state.exists()
    assert leftovers(state) == []


def helper_of(backend: NamespaceBackend, title: bytes) -> int:
    pid = backend.launcher_pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    titles = {Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]: int(child) for child in children}
    return titles[title]


async def test_a_daemon_ends_no_launcher_that_another_began_since_its_own_died(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = NamespaceBackend(state)
    async with asyncio.timeout(20):
        await first.open()
        await killed(first)
        async with opened(state) as second:
            connection = await second.create("one", TEMPLATE)
            await first.close()
            assert (await shell(connection, "echo on")).stdout == b"on\n"
            await connection.close()
    assert leftovers(state) == []


async def killed(backend: NamespaceBackend) -> None:
    assert backend.launcher_pid is not None
    end = end_of(backend.launcher_pid)
    os.kill(backend.launcher_pid, signal.SIGKILL)
    await end


async def test_what_is_there_is_asked_of_the_next_where_the_launcher_was_killed(tmp_path: Path) -> None:
    async with asyncio.timeout(20), opened(tmp_path / "state") as backend:
        for ask in (backend.list_ids, backend.list_branches):
            assert backend.launcher_pid is not None
            # The connection does not know of it yet.
            os.kill(backend.launcher_pid, signal.SIGKILL)
            assert await ask() == []


@pytest.mark.parametrize("which", ["importing", "lock"])
async def test_a_snapshot_that_is_cancelled_while_another_process_has_the_store(
    which: str, tmp_path: Path
) -> None:
    """It holds no lock afterwards, and no layer of it is left."""
    store, state = ImageStore(tmp_path / "images"), tmp_path / "state"
    async with asyncio.timeout(30), opened(state, NamespaceOptions(images_dir=store.root)) as backend:
        await (await backend.create("one", TEMPLATE)).close()
        with store._locked(which, fcntl.LOCK_EX):
            storing = asyncio.create_task(backend.snapshot("one", TEMPLATE, "image"))
            await until(lambda: descriptors()[str(store.root / which)] == 2)
            storing.cancel()
            await turns(10)
        await asyncio.wait([storing])
        assert storing.cancelled()
        await until(lambda: descriptors()[str(store.root / "importing")] == 0)
        assert store.collect() == 0
        assert store.names() == {}
