"""Runs the asynchronous code of tasks on an event loop of their own, in a thread: there it may even block.

What blocks it keeps other tasks' code waiting, never the episodes on the main loop. A loop on which a call
has outlasted its time is not used for new ones, and ends with the last that it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from rl.boxes import Box, ExecResult
from rl.threads import CallFailed

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class AfarBox:
    """A sandbox as seen from another thread: its calls are made on the loop `home`, that of its client."""

    def __init__(self, box: Box, home: asyncio.AbstractEventLoop) -> None:
        self._box = box
        self._home = home

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        """As `Box.exec`; so are the others."""
        return await self._at_home(lambda: self._box.exec(argv, **options))

    async def read_file(self, path: str) -> bytes:
        return await self._at_home(lambda: self._box.read_file(path))

    async def write_file(self, path: str, data: bytes) -> int:
        return await self._at_home(lambda: self._box.write_file(path, data))

    async def _at_home(self, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        work = call()
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._home)
        except RuntimeError:
            # That loop has ended before this code did.
            work.close()
            raise
        return await asyncio.wrap_future(future)


class _Side:
    """One loop in its thread, which ends with the last call once it is retired."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls = 0
        self._retired = False
        self.ended = False
        """Also without being retired: an exit in a task that the code started goes through the loop."""
        threading.Thread(target=self._run, name="task code", daemon=True).start()

    async def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        self._calls += 1
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_sealed(work), self._loop))
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise CallFailed("its loop has ended") from RuntimeError("an exit in a task of it ended its loop")
        finally:
            self._calls -= 1
            self._end_when_idle()

    def retire(self) -> None:
        """Takes no new call."""
        self._retired = True
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self._retired and not self._calls:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            log.warning("an exit in a task that the code of a task started ended its loop", exc_info=True)
        finally:
            self.ended = True
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.close()


class TaskLoop(Protocol):
    """Where a task's code that works on a sandbox runs."""

    async def call(self, make: Callable[[Box], Awaitable[Result]], box: Box) -> Result: ...

    def renew(self) -> None: ...


class SameLoop:
    """The caller's own loop: for simulated time, which passes in no other."""

    async def call(self, make: Callable[[Box], Awaitable[Result]], box: Box) -> Result:
        """What the coroutine made of a sandbox returns. Raises CallFailed with its error as the cause."""
        return await _sealed(make(box))

    def renew(self) -> None:
        """The code was cancelled: nothing is left of it."""


class SideLoop:
    """Of one referee; its thread starts with the first call, and ends with the program at the latest."""

    def __init__(self) -> None:
        self._side: _Side | None = None

    async def call(self, make: Callable[[Box], Awaitable[Result]], box: Box) -> Result:
        """What the coroutine made of a sandbox returns. Raises CallFailed with its error as the cause."""
        side = self._open()
        afar = AfarBox(box, asyncio.get_running_loop())

        async def work() -> Result:
            # Made there: what `make` does before its first wait is the task's code, too.
            return await make(afar)

        return await side.call(work())

    def renew(self) -> None:
        """A call outlasted its time, so it may block for good: the next one is made on another loop."""
        if self._side is not None:
            self._side.retire()
            self._side = None

    def _open(self) -> _Side:
        if self._side is None or self._side.ended:
            self._side = _Side()
            weakref.finalize(self, self._side.retire)
        return self._side


async def _sealed(work: Awaitable[Result]) -> Result:
    """An exit or an interrupt in a task's code must not end the loop that it runs on, and a cancellation of
    its own, as of something that it waited for, not look like one of the episode."""
    try:
        return await work
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        raise CallFailed(f"{type(error).__name__}: {error}") from error


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task that asks."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
