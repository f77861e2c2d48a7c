"""Runs something beside a block, and ends it with the block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs `work` as a task for the length of the block, and then cancels it. Raises at the block's end what
    ended it earlier.
    """
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        try:
            # Not `await task`: there the caller's own cancellation looks like that of the task, and is lost.
            await asyncio.wait((task,))
        finally:
            if task.done() and not task.cancelled():
                task.result()
