"""A daemon to be killed: what the chaos of rollouts and the tests of recovery do to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from sandboxd.bench.processes import daemon_pid, launcher_pid
from sandboxd.child import child_daemon

# Between two looks for a launcher that is not there yet.
LOOK_SECONDS = 0.05


class Mortal:
    """A daemon that is killed and started again on one state directory."""

    def __init__(self, state: Path, config: Path, *, log: Path | None = None) -> None:
        """`log` is as with `child_daemon`."""
        self.state = state
        self._config, self._log = config, log
        self._running = contextlib.AsyncExitStack()

    async def start(self) -> str:
        """Returns the address."""
        running = child_daemon(self.state, config=self._config, log=self._log)
        return await self._running.enter_async_context(running)

    async def kill(self) -> None:
        """Returns when the process is gone: its lock is free then."""
        os.kill(daemon_pid(self.state), signal.SIGKILL)
        await self.stop()

    async def stop(self) -> None:
        """Ends it in good order, if it lives."""
        running, self._running = self._running, contextlib.AsyncExitStack()
        await running.aclose()

    async def kill_launcher(self) -> None:
        """Waits for one where the last one's end is not over yet."""
        while True:
            pid = await asyncio.to_thread(launcher_pid, self.state)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(LOOK_SECONDS)
