"""A process of the bench's own, so that one event loop does not hold up the other."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def child_process(
    module: str, *arguments: str, own_session: bool = False
) -> AsyncIterator[subprocess.Popen[str]]:
    """Runs a module with pipes for its input and output; it is killed, if need be, when the block ends. With
    `own_session` it does not share the processors that this session is given.
    """
    process = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the bench, which ends it.
        process_group=None if own_session else 0,
        start_new_session=own_session,
    )
    try:
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
