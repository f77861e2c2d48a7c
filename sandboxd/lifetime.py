"""Who ends with whom: tasks with their block, a thread with its call, a process with who started it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from sandboxd.errors import Draining, Internal, SandboxdError

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1

Result = TypeVar("Result")


class Tasks(asyncio.TaskGroup):
    """A task group whose block may raise what it likes.

    An asyncio.TaskGroup wraps the block's own exception in an ExceptionGroup and cancels the tasks. Here
    the tasks are waited for, and the exception then comes out as itself: callers catch what they expect,
    and a teardown that runs in these tasks is finished whatever the block met. A task that fails still
    cancels the block and comes out as an ExceptionGroup.
    """

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(None, None, None)


class faults_become:  # noqa: N801 - used as the function it was; a generator costs each start three times as much
    """Raises what `error_of` makes of a fault of a backend's own code, after a traceback in the log; `known`
    passes. Without this the task would end, and take every other task of the daemon down with it.
    """

    __slots__ = ("_doing", "_error_of", "_known")

    def __init__(
        self,
        error_of: Callable[[str], SandboxdError],
        doing: str,
        *,
        known: type[SandboxdError] = SandboxdError,
    ) -> None:
        self._error_of, self._doing, self._known = error_of, doing, known

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, self._known):
            logger.error("%s", self._doing, exc_info=error)
            raise self._error_of(f"{type(error).__name__}: {error}") from error


async def in_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """As `asyncio.to_thread`, but over when it returns, also when cancelled: no thread can be stopped."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    finally:
        if not working.done():
            await asyncio.wait([working])


async def whole(work: Awaitable[Result], undo: Callable[[Result], None]) -> Result:
    """What `work` returns. When cancelled meanwhile it is finished all the same, and then undone.

    For a loop that is given a descriptor: cut off half-way uvloop closes the number, and its owner closes it
    once more, when it may be another's.
    """
    working = asyncio.ensure_future(work)

    def finished(_: asyncio.Future[Result]) -> None:
        if not working.cancelled() and working.exception() is None:
            undo(working.result())

    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        working.add_done_callback(finished)
        raise


async def cleaned_up(doing: str, work: Awaitable[object]) -> None:
    """Has a clean-up end before what called for it is raised further: `except BaseException: await …; raise`.

    It goes on whatever cancellations come, and one that came is raised at its end. Its own failure is logged:
    it must not take the place of what is under way, least of all of a cancellation.
    """
    working = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as error:
            cancelled = error
    if not working.cancelled() and (failure := working.exception()) is not None:
        logger.warning("%s: %s: %s", doing, type(failure).__name__, failure)
    if cancelled is not None:
        raise cancelled


async def ended(pid: int) -> None:
    """Returns when a child has ended, and does not reap it; asyncio's own wait also waits for its pipes."""
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # reaped already
    over = asyncio.Event()
    loop.add_reader(fd, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def first_of(*waits: Awaitable[object]) -> None:
    """Returns when one of them is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def told_later() -> asyncio.Future[Any]:
    """What a task will have to say; a failure whose caller has left is not reported as unhandled."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    done.add_done_callback(lambda future: future.cancelled() or future.exception())
    return done


def told_by(
    tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, Result], name: str
) -> tuple[asyncio.Task[None], asyncio.Future[Result]]:
    """Begins work that must go on when its caller leaves; the future has what it returns or raises."""
    done: asyncio.Future[Result] = told_later()

    async def do() -> None:
        try:
            done.set_result(await work)
        except SandboxdError as error:
            done.set_exception(error)
        except Exception as error:
            logger.exception("%s", name)
            done.set_exception(Internal(f"{type(error).__name__}: {error}"))

    def ended(_: asyncio.Task[None]) -> None:
        # Where it was cancelled before its first step.
        work.close()
        settle(done)

    task = tasks.create_task(do(), name=name)
    task.add_done_callback(ended)
    return task, done


def settle(done: asyncio.Future[Any]) -> None:
    """The task has ended; where it said nothing it was cancelled, perhaps before its first step."""
    if not done.done():
        done.set_exception(Draining("the daemon is shutting down"))


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Has the kernel send `number` to this process when its parent ends. Does nothing off Linux.

    Ends the process at once when the parent is gone already: it may have died before this call.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent or parent == 1:
        raise SystemExit(f"the parent process {parent} has ended")
