"""Runs a task's own code in a thread, where it may block for as long as it likes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


class CallFailed(Exception):
    """The call raised what `__cause__` holds, be it an exit or a StopIteration."""


async def in_own_thread(call: Callable[[], Result]) -> Result:
    """What `call` returns; the event loop goes on meanwhile. Raises CallFailed.

    A thread for each call, not a pool: nothing can end a call that hangs, and so it holds neither a worker
    that others wait for nor the end of the process. Cancelled, it is left to itself and its result dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        def on_the_loop() -> None:
            if not done.done():
                act()

        # A loop that has ended before the call did has nobody who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(on_the_loop)

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - sent to whoever waits, whatever it is
            failed = CallFailed(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            settle(lambda: done.set_exception(failed))
        else:
            settle(lambda: done.set_result(result))

    threading.Thread(target=run, name="task code", daemon=True).start()
    return await done
