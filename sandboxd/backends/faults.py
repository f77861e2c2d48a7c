"""Faults on purpose, in front of any backend: for rehearsals, and for users who test what they make of them.

A fault is written as its kind, the phase it strikes where there is a choice, its chance, and its length:

    fail start 0.2        one start attempt in five fails; phases: pull, create, start, ready, reset, destroy
    hang ready 0.05       one in twenty never ends, after the sandbox was made; a pull ends with its time
                          limit, a destroy after 30 s
    slow create 0.1 2.5   one in ten takes 2.5 s longer
    die 0.02              one command in fifty has its sandbox die under it, after its first event
    lie 0.01              one sandbox in a hundred says that it is ready and runs nothing
    garble 0.01           one command in a hundred ends in what is no protocol
    stain 0.01            one reset in a hundred leaves a file behind
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from sandboxd import stopwatch
from sandboxd.backends.base import Backend, Commands, Connection, Execution, Files
from sandboxd.clock import Clock, MonotonicClock
from sandboxd.errors import BackendUnavailable, Phase, SandboxLost, StartFailed
from sandboxd.types import Capabilities, Command, Event, Template

PHASED, PLAIN = ("fail", "hang", "slow"), ("die", "lie", "garble", "stain")
# Whoever destroys has no time limit of its own.
DESTROY_HANGS_SECONDS = 30.0
PHASES = (Phase.PULL, Phase.CREATE, Phase.START, Phase.READY, Phase.RESET, Phase.DESTROY)


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of trouble. `rate` is its chance in [0, 1], `seconds` how long a slow one lasts."""

    kind: str
    rate: float
    phase: Phase | None = None
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises ValueError with one line that says what is allowed."""
        kind, *rest = text.split() or [""]
        if kind not in (*PHASED, *PLAIN):
            raise ValueError(f"fault {text!r} begins with none of {', '.join((*PHASED, *PLAIN))}")
        phase = None
        if kind in PHASED:
            name = rest.pop(0) if rest else ""
            if name not in PHASES:
                raise ValueError(f"fault {text!r} needs one of {', '.join(PHASES)} after {kind}")
            phase = Phase(name)
        numbers = [_number(word, text) for word in rest]
        if len(numbers) != (2 if kind == "slow" else 1) or not 0 <= numbers[0] <= 1:
            also = " and the seconds that it lasts" if kind == "slow" else ""
            raise ValueError(f"fault {text!r} needs its chance from 0 to 1{also}")
        return cls(kind, numbers[0], phase, *numbers[1:])


def _number(word: str, text: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} in fault {text!r} is not a number") from None


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


class FaultyBackend:
    """Implements `base.Backend` by another one, with faults drawn from one seed; `faults` may be changed."""

    def __init__(
        self, inner: Backend, faults: Sequence[Fault], *, seed: int = 0, clock: Clock | None = None
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.faults = tuple(faults)
        self._random = random.Random(seed)
        self._clock = clock or MonotonicClock()

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    async def let_go(self) -> None:
        await self.inner.let_go()

    async def check(self) -> None:
        await self.inner.check()

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    async def prepare(self, template: Template) -> None:
        if self.drawn("hang", Phase.PULL):
            # A backend ends its pulls itself, for callers share them.
            await self._clock.sleep(template.pull_timeout)
            raise StartFailed("a fault was asked for: hang pull", phase=Phase.PULL)
        await self._strike(Phase.PULL)
        await self.inner.prepare(template)

    async def create(self, sandbox_id: str, template: Template) -> Connection:
        await self._strike(Phase.CREATE)
        await self._strike(Phase.START)
        connection = await self.inner.create(sandbox_id, template)
        try:
            await self._strike(Phase.READY)
        except BaseException:
            await asyncio.shield(self._undo(sandbox_id, connection))
            raise
        return self._connection(sandbox_id, connection, lies=self.drawn("lie") is not None)

    async def _undo(self, sandbox_id: str, connection: Connection) -> None:
        await connection.close()
        await self.inner.destroy(sandbox_id)

    async def adopt(self, sandbox_id: str, template: Template) -> Connection:
        return self._connection(sandbox_id, await self.inner.adopt(sandbox_id, template), lies=False)

    def _connection(self, sandbox_id: str, connection: Connection, *, lies: bool) -> Connection:
        async def kill() -> None:
            # Where its backend is away, the pool removes it later: dead it is for its holder all the same.
            with contextlib.suppress(BackendUnavailable):
                await self.inner.destroy(sandbox_id)

        return _FaultyConnection(connection, self.drawn, kill, lies=lies)

    async def destroy(self, sandbox_id: str) -> None:
        """Raises BackendUnavailable; one that hangs does so when a real backend's calls would have ended."""
        if self.drawn("hang", Phase.DESTROY):
            await self._clock.sleep(DESTROY_HANGS_SECONDS)
            raise BackendUnavailable("a fault was asked for: hang destroy", phase=Phase.DESTROY)
        try:
            await self._strike(Phase.DESTROY)
        except StartFailed as error:
            raise BackendUnavailable(error.message, phase=Phase.DESTROY) from None
        await self.inner.destroy(sandbox_id)

    async def reset(self, sandbox_id: str, new_id: str, template: Template) -> Connection:
        await self._strike(Phase.RESET)
        inner = await self.inner.reset(sandbox_id, new_id, template)
        if self.drawn("stain"):
            await inner.files.write(b"/tmp/stain", _once(b"left by another"), 0o644)
        return self._connection(new_id, inner, lies=False)

    async def branch(self, sandbox_id: str, template: Template, branch: str) -> Template:
        return await self.inner.branch(sandbox_id, template, branch)

    async def prune(self, branch: str) -> None:
        await self.inner.prune(branch)

    async def list_branches(self) -> list[str]:
        return await self.inner.list_branches()

    async def snapshot(self, sandbox_id: str, template: Template, image: str) -> int:
        return await self.inner.snapshot(sandbox_id, template, image)

    async def describe(self, sandbox_id: str) -> dict[str, str]:
        return await self.inner.describe(sandbox_id)

    async def list_ids(self) -> list[str]:
        return await self.inner.list_ids()

    def drawn(self, kind: str, phase: Phase | None = None) -> Fault | None:
        """The fault that strikes now, if one does."""
        for fault in self.faults:
            if (fault.kind, fault.phase) == (kind, phase) and self._random.random() < fault.rate:
                return fault
        return None

    async def _strike(self, phase: Phase) -> None:
        if (slow := self.drawn("slow", phase)) is not None:
            stopwatch.enter(phase)
            await self._clock.sleep(slow.seconds)
        if self.drawn("hang", phase):
            await asyncio.get_running_loop().create_future()
        if self.drawn("fail", phase):
            raise StartFailed(f"a fault was asked for: fail {phase}", phase=phase)


class _FaultyConnection:
    """Implements `base.Connection`; what strikes its sandbox is also told by `wait_lost`."""

    def __init__(
        self,
        inner: Connection,
        drawn: Callable[[str], Fault | None],
        kill: Callable[[], Awaitable[None]],
        *,
        lies: bool,
    ) -> None:
        self._inner = inner
        self._drawn = drawn
        self._kill = kill
        self._lies = lies
        self._struck: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def exec(self, command: Command) -> AsyncIterator[Execution]:
        self._check()
        strikes = next((kind for kind in ("die", "garble") if self._drawn(kind)), "")
        async with self._inner.exec(command) as execution:
            yield _Struck(execution, strikes, self._end) if strikes else execution

    async def _end(self, kind: str) -> None:
        if kind == "die":
            await self._kill()
        raise self._loss(f"a fault was asked for: {kind}")

    async def ping(self) -> None:
        self._check()
        await self._inner.ping()

    @property
    def files(self) -> Files:
        self._check()
        return self._inner.files

    @property
    def commands(self) -> Commands:
        self._check()
        return self._inner.commands

    async def wait_lost(self) -> str:
        inner = asyncio.ensure_future(self._inner.wait_lost())
        try:
            await asyncio.wait({inner, self._struck}, return_when=asyncio.FIRST_COMPLETED)
            return self._struck.result() if self._struck.done() else inner.result()
        finally:
            inner.cancel()

    async def close(self) -> None:
        await self._inner.close()

    def _check(self) -> None:
        if self._lies:
            raise self._loss("a fault was asked for: it said that it was ready and runs nothing")
        if self._struck.done():
            raise self._loss(self._struck.result())

    def _loss(self, why: str) -> SandboxLost:
        if not self._struck.done():
            self._struck.set_result(why)
        return SandboxLost(f"the sandbox died: {why}")


class _Struck:
    """An execution whose sandbox is struck after the first event."""

    def __init__(self, inner: Execution, kind: str, end: Callable[[str], Awaitable[None]]) -> None:
        self._events, self._kind, self._end = aiter(inner), kind, end
        self._seen = False
        self.write, self.end_input = inner.write, inner.end_input
        self.signal, self.resize = inner.signal, inner.resize

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._seen:
            await self._end(self._kind)
        self._seen = True
        return await anext(self._events)
