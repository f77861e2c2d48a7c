"""A process of the bench's own, so that one event loop does not hold up the other."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def child_process(module: str, *arguments: str) -> AsyncIterator[subprocess.Popen[str]]:
    """Runs a module with pipes for its input and output; it is killed, if need be, when the block ends."""
    process = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the bench, which ends it.
        process_group=0,
    )
    try:
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
