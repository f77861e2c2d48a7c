"""What is left when a call ends before it was answered: a table of the phases it was in and of its ends.

Calls go through the door of daemons in processes of their own, one for each backend and fault that holds a
phase open. Each cell of the table has a pool of its own; those of one daemon are played a few at a time when
the first of them is asked for, and each is then a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from sandboxd import Box, Client
from sandboxd.images.store import ImageStore
from sandboxd.types import PoolStats

from . import copies_kit, endings_kit
from .endings_kit import MARK, Caller, Served, Target, Victim, asleep, frozen, is_settled, marked, until
from .endings_table import BACKENDS, FAULTS, PHASES, Phase, is_command
from .relay_kit import Relay
from .test_process_death import gone

pytestmark = pytest.mark.anyio

# What is not read does not end.
UNREAD = ("read", "download")
# What a cut-off upload leaves.
LEFT = {"write": [], "upload": [endings_kit.WHOLE]}
# Each is tried until the phase was reached before it was over.
DEADLINES = (0.4, 2.0, 10.0)
# Most of a cell is waiting.
CELLS_AT_ONCE = 5


def settings(directory: str, backend: str, fault: str) -> str:
    lines = [f"faults = {[fault] if fault else []}", "drain_seconds = 0.2"]
    lines.append(f'images_dir = "{directory}/images"')
    pools: dict[str, str] = {}
    for phase in PHASES:
        if phase.fault == fault and backend in phase.backends:
            pools |= {f"{phase}-{ending}": phase.pool or "warm = 0" for ending in (*ENDINGS, "terminated")}
    for name, text in pools.items():
        env = f'env = {{ {MARK} = "{directory}/{name}" }}' if "setup" in text else ""
        # A limit that is found out would go down where starts are slow.
        limit = "start_limit = 16\nstart_limit_min = 16"
        lines += [f"[pools.{name}]", f'backend = "{backend}"', limit, env, text]
    return "\n".join(lines) + "\n"


class Cell:
    """One call in one phase, and what its pool and the host had before it."""

    def __init__(self, served: Served, client: Client, phase: Phase, ending: str) -> None:
        self.served, self.phase = served, phase
        self._client = client
        self._pool = f"{phase}-{ending}"
        self._marker = f"{served.directory}/{phase}-{ending}"
        self._box: Box | None = None
        self._copies: list[int] = []
        self.relay = Relay(served.directory / f"{phase}-{ending}.sock", served.address)

    def __repr__(self) -> str:
        return f"<the cell {self._marker}>"

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Cell]:
        self.before = await self._counts()
        if self.phase.held or is_command(self.phase):
            self._box = await self._client.acquire(self._pool, timeout=30)
            await endings_kit.prepare(self.phase.call, self._box, self._marker)
            if self.phase.copying:
                await copies_kit.fill(self._box)
        async with self.relay:
            async with frozen(self._box) if self.phase.frozen and self._box else contextlib.nullcontext():
                yield self

    @property
    def target(self) -> Target:
        return Target(self._pool, self._box.name if self._box else "", self._marker)

    async def stats(self) -> PoolStats:
        return await self._client.get_pool(self._pool)

    async def _counts(self) -> tuple[int, ...]:
        stats = await self.stats()
        return stats.starting, stats.warm, stats.active, stats.waiting, stats.deleting

    async def settled(self) -> bool:
        """Nothing is in use or on its way."""
        return is_settled(await self.stats())

    async def there(self) -> bool:
        if self.phase.blind:
            return True
        if self.phase.there is not None:
            return self.phase.there(await self.stats())
        if self.phase.copying:
            assert self._box is not None
            self._copies = copies_kit.stopped_copies(self._box.name)
            return bool(self._copies)
        if self.phase.call in LEFT:
            assert self._box is not None
            return len(await endings_kit.written(self._box)) > len(LEFT[self.phase.call])
        pids = marked(self._marker)
        return bool(pids) and (self.phase.name != "printing" or asleep(pids))

    async def over(self) -> None:
        """Nothing of the call is left, and all is as before."""
        if is_command(self.phase):
            await self._command_is_gone()
        else:
            await until(self._nobody_waits)
        await self.give_back()
        if not self.phase.lasting:
            await until(self._as_before)
            assert marked(self._marker) == []

    async def give_back(self) -> None:
        if self._box is not None:
            await self._box.release()

    async def _command_is_gone(self) -> None:
        assert self._box is not None
        # A sandbox that did not run has heard of the call before it hears of this.
        assert (await self._box.exec(["true"])).ok
        if self.phase.call in LEFT:
            await until(self._only_what_is_whole)
        if self.phase.copying:
            await self._copies_end()
        if self.phase.name in ("detached", "attached"):
            assert marked(self._marker)
            known = await self._box.list_commands()
            assert known
            assert all(info.running for info in known)
            for info in known:
                await self._box.command(info.id).forget()
        await until(lambda: not marked(self._marker))

    async def _only_what_is_whole(self) -> bool:
        return self._box is not None and await endings_kit.written(self._box) == LEFT[self.phase.call]

    async def _copies_end(self) -> None:
        """That of a snapshot that nobody waits for is ended; forks are made, and released."""
        if self.phase.call == "fork":
            for pid in self._copies:
                os.kill(pid, signal.SIGCONT)
        await until(lambda: not any(map(copies_kit.exists, self._copies)))

    async def _nobody_waits(self) -> bool:
        stats = await self.stats()
        return (stats.waiting, stats.active) == (0, int(self._box is not None))

    async def _as_before(self) -> bool:
        return await self._counts() == self.before


@contextlib.asynccontextmanager
async def calling(cell: Cell, timeout: float | None = None) -> AsyncIterator[Caller]:
    async with Caller(cell.relay.address) as caller:
        if cell.phase.replies_held:
            cell.relay.hold()
        caller.begin(cell.phase.call, cell.target, timeout)
        if cell.phase.blind:
            await caller.answered()
        yield caller


async def deadline(cell: Cell) -> None:
    for seconds in DEADLINES:
        async with calling(cell, seconds) as caller:
            reached = False
            async with asyncio.timeout(30):
                while not (reached or caller.call.done()):
                    await asyncio.sleep(0.01)
                    reached = await cell.there()
                # To read a file's pieces before would bring it to its end.
                code = await caller.call.code() if cell.phase.call in UNREAD else await caller.ended()
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        if reached:
            return
    raise AssertionError(f"{cell.phase} was never reached")


async def cancelled(cell: Cell) -> None:
    async with calling(cell) as caller:
        await until(cell.there)
        assert not caller.call.done()
        caller.call.cancel()
        assert await caller.ended() is grpc.StatusCode.CANCELLED


async def broken(cell: Cell) -> None:
    async with calling(cell) as caller:
        await until(cell.there)
        assert not caller.call.done()
        cell.relay.cut()
        assert await caller.ended() in (grpc.StatusCode.UNAVAILABLE, UNSENT)


async def killed(cell: Cell) -> None:
    address = cell.relay.address if cell.phase.replies_held else cell.served.address
    async with Victim(address) as victim:
        if cell.phase.replies_held:
            cell.relay.hold()
        if cell.phase.blind:
            await victim.begin_and_hear(cell.phase.call, cell.target)
        else:
            victim.begin(cell.phase.call, cell.target)
        await until(cell.there)
        victim.kill()


# So gRPC says that a connection broke under a message that it was sending.
UNSENT = grpc.StatusCode.INTERNAL
# What the client takes for a daemon that ends, and a sandbox that was reclaimed.
GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, UNSENT, grpc.StatusCode.ABORTED)
ENDINGS = {ending.__name__: ending for ending in (deadline, cancelled, broken, killed)}

# Each backend's daemons end last: by then what went on for a while is over.
ROWS = [*((phase, ending) for phase in PHASES for ending in ENDINGS), (None, "terminated")]
CELLS = [
    pytest.param(
        backend, fault, phase, ending, id=f"{backend}-{phase or endings_kit.fault_name(fault)}-{ending}"
    )
    for backend in BACKENDS
    for phase, ending in ROWS
    for fault in FAULTS
    if phase is None or (phase.fault == fault and backend in phase.backends)
]


class Daemons:
    """One for each backend and fault, started when it is first asked for; its cells are then played."""

    def __init__(self, directories: Callable[[str], Path]) -> None:
        self._directories = directories
        self._served: dict[tuple[str, str], Served] = {}
        self._ended: dict[tuple[str, str], dict[tuple[Phase, str], BaseException | None]] = {}

    async def of(self, backend: str, fault: str) -> Served:
        if (backend, fault) not in self._served:
            directory = self._directories("e")
            # A launcher knows the store that was there before it.
            ImageStore(directory / "images").open()
            text = settings(str(directory), backend, fault)
            served = self._served[backend, fault] = Served(directory, text)
            phases = [phase for phase in PHASES if phase.fault == fault and backend in phase.backends]
            cells = [(phase, ending) for phase in phases for ending in ENDINGS]
            self._ended[backend, fault] = await played(served, cells)
        return self._served[backend, fault]

    def check(self, backend: str, fault: str, phase: Phase, ending: str) -> None:
        """Raises what that cell ended with."""
        if (error := self._ended[backend, fault][phase, ending]) is not None:
            raise error

    def close(self) -> None:
        for served in self._served.values():
            served.close()


async def played(
    served: Served, cells: Sequence[tuple[Phase, str]]
) -> dict[tuple[Phase, str], BaseException | None]:
    """How each of the cells ended."""
    room = asyncio.Semaphore(CELLS_AT_ONCE)

    async def play(phase: Phase, ending: str) -> None:
        async with room, Client(served.address) as client:
            cell = Cell(served, client, phase, ending)
            await until(cell.settled)
            try:
                async with cell.open():
                    await ENDINGS[ending](cell)
                await cell.over()
            finally:
                # Of one that failed, too: the daemon's last test waits until nothing is leased.
                await cell.give_back()

    ends = await asyncio.gather(*(play(*cell) for cell in cells), return_exceptions=True)
    return dict(zip(cells, ends, strict=True))


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path_factory.mktemp)
    yield daemons
    daemons.close()


@pytest.mark.parametrize(("backend", "fault", "phase", "ending"), CELLS)
async def test_nothing_is_left(
    daemons: Daemons, backend: str, fault: str, phase: Phase | None, ending: str
) -> None:
    served = await daemons.of(backend, fault)
    if phase is not None:
        daemons.check(backend, fault, phase, ending)
        return
    async with Client(served.address) as client:
        phases = [phase for phase in PHASES if phase.fault == fault and backend in phase.backends]
        await terminated(served, client, phases)


def kept_images(served: Served) -> list[str]:
    """What is in the image store, whole or not."""
    images = served.directory / "images"
    found = [path.name for part in ("partial", "layers") for path in (images / part).iterdir()]
    return [*found, *ImageStore(images).names()]


async def terminated(served: Served, client: Client, phases: Sequence[Phase]) -> None:
    """All that went on without its caller for a while is over; then SIGTERM with a call in every phase."""
    await until(lambda: endings_kit.all_settled(client))
    for stats in (await client.list_pools()).values():
        assert stats.acquired_total == stats.released_total + stats.expired_total
    assert kept_images(served) == []
    async with contextlib.AsyncExitStack() as stack:
        calls: list[tuple[Cell, Caller]] = []
        # Those that take long to prepare come first; last, starts and leases that soon end by themselves.
        order = sorted(phases, key=lambda each: (not each.copying, each.lasting or each.replies_held))
        for phase in order:
            cell = await stack.enter_async_context(Cell(served, client, phase, "terminated").open())
            calls.append((cell, await stack.enter_async_context(calling(cell))))
            await until(cell.there)
        served.process.terminate()
        assert await asyncio.to_thread(served.process.wait, 30) == 0
        for cell, _ in calls:
            if cell.phase.replies_held:
                cell.relay.cut()
        codes = {str(cell.phase): await caller.ended() for cell, caller in calls}
        # Who waits hears at once that the daemon goes; who has a lease, that it was reclaimed after a time.
        wrong = {phase: code for phase, code in codes.items() if code not in GONE}
        assert wrong == {}
    await gone(served.state, served.before)
    assert kept_images(served) == []
    assert [pid for cell, _ in calls for pid in marked(cell.target.marker)] == []
    # gRPC says so itself where a connection broke under a message that it was sending.
    log = served.log()
    assert log.count("Traceback") == log.count("ExecuteBatchError raised in core"), log
