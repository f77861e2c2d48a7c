"""The guest without a sandbox around it, as a plain process or as the first process of bare namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxd.backends.connection import GuestConnection
from sandboxd.backends.native import guest_program
from sandboxd.types import Capabilities, Template

# An empty directory of its own, and no rights when the guest begins.
BARE = (
    "mount -t tmpfs -o mode=1777 none /mnt &&"
    ' exec setpriv --ambient-caps=-all --inh-caps=-all --bounding-set=-all "$@"'
)
NAMESPACES = (
    *("unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps", "--pid", "--fork"),
    *("--kill-child", "--mount-proc", "sh", "-c", BARE, "sh"),
)


def listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(64)
    return sock


def start_guest(path: Path, *before: str, program: Path | None = None, **env: str) -> subprocess.Popen[bytes]:
    """A guest that serves a socket at `path`, behind the words of `before`."""
    with listen(path) as sock:
        arguments = [*before, str(program or guest_program()), "serve", str(sock.fileno())]
        return subprocess.Popen(arguments, pass_fds=[sock.fileno()], env={"PATH": os.defpath, **env})


@contextlib.asynccontextmanager
async def guest(directory: Path) -> AsyncIterator[GuestConnection]:
    """A real guest as a plain process."""
    path = directory / "s"
    process = start_guest(path)
    connection = GuestConnection("plain", path, Template("t", cwd=os.fsencode(directory)))
    try:
        yield connection
    finally:
        await connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


class BareGuests:
    """A backend of guests that are PID 1 of bare namespaces: all that a guest does, and no confinement."""

    name = "guest"
    template = Template("t", cwd=b"/mnt")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    async def open(self) -> None:
        self._directory.mkdir()

    async def close(self) -> None:
        for name in list(self._processes):
            await self.destroy(name)
        self._directory.rmdir()

    def capabilities(self) -> Capabilities:
        return Capabilities("none")

    async def prepare(self, template: Template) -> None:
        """Nothing is shared."""

    async def create(self, sandbox_id: str, template: Template) -> GuestConnection:
        path = self._directory / sandbox_id
        self._processes[sandbox_id] = start_guest(path, *NAMESPACES)
        connection = GuestConnection(sandbox_id, path, template)
        await connection.ping()
        return connection

    async def destroy(self, sandbox_id: str) -> None:
        process = self._processes.pop(sandbox_id, None)
        if process is None:
            return
        # The first process of the namespaces: whoever waits for its end waits for all of them.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in children or [process.pid]:
            os.kill(int(pid), signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        (self._directory / sandbox_id).unlink()

    async def list_ids(self) -> list[str]:
        return list(self._processes)
