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

import pytest

from sandboxd.backends.connection import GuestConnection
from sandboxd.backends.native import guest_program
from sandboxd.guest import wire
from sandboxd.types import Capabilities, Template

ROOT = Path(__file__).parents[2]
SANITIZED = ROOT / "sandboxd" / "native" / "sandboxd-guest-sanitized"
OPTIONS = {"ASAN_OPTIONS": "abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}
# A root of its own, which holds the host's programs and can change nothing of the host, and no rights in it.
BARE = """
set -e
program=$1; shift
mount -t tmpfs -o mode=755 none /mnt
cd /mnt
mkdir -m 1777 tmp workspace
mkdir proc dev dev/pts
mount -t proc none proc
mount -t devpts -o newinstance,ptmxmode=666 none dev/pts
ln -s pts/ptmx dev/ptmx
for name in null zero full random urandom tty; do : >dev/$name; mount --bind /dev/$name dev/$name; done
for name in usr bin sbin lib lib64; do
    if [ -L /$name ]; then
        cp -P /$name .
    elif [ -d /$name ]; then
        mkdir $name
        mount --rbind /$name $name
        mount -o remount,bind,ro $name
    fi
done
: >guest
mount --bind "$program" guest
exec chroot . setpriv --ambient-caps=-all --inh-caps=-all --bounding-set=-all /guest "$@"
"""
NAMESPACES = (
    *("unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps", "--pid", "--fork"),
    *("--mount", "sh", "-c", BARE, "sh"),
)


@pytest.fixture(scope="session")
def sanitized() -> Path:
    """Built here when it is missing or older than its sources; skips where the compiler has no sanitizers."""
    sources = [path.stat().st_mtime for path in SANITIZED.parent.glob("*.[ch]")]
    if SANITIZED.exists() and SANITIZED.stat().st_mtime >= max(sources):
        return SANITIZED
    done = subprocess.run(["scripts/guest.sh", "--sanitize"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 2:
        pytest.skip(f"the sanitizers are not there: {done.stderr.splitlines()[-1]}")
    assert (done.returncode, done.stderr) == (0, "")
    return SANITIZED


def listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(64)
    return sock


class Started:
    """A guest that serves a socket at `path`, behind the words of `before`; `end` has its lifeline end."""

    def __init__(self, path: Path, *before: str, program: Path | None = None, **env: str) -> None:
        lifeline, self._alive = os.pipe()
        with listen(path) as sock:
            descriptors = (sock.fileno(), lifeline)
            self.process = subprocess.Popen(
                [*before, str(program or guest_program()), "serve", *map(str, descriptors)],
                pass_fds=descriptors,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env},
            )
        os.close(lifeline)

    def end(self) -> int:
        """Returns the exit code."""
        os.close(self._alive)
        return self.process.wait(20)


class Raw:
    """A connection on which anything may be sent."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(str(path))
        self._received = bytearray()

    def send(self, *frames: bytes) -> None:
        """What the guest no longer takes falls: it may have ended the connection."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(b"".join(frames))

    def frame(self) -> tuple[int, bytes] | None:
        """The next one; None at the end of the connection."""
        while (found := wire.split(self._received, wire.MAX_REPLY)) is None:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._received += data
        return found

    def frames(self) -> list[tuple[int, bytes]]:
        """Those up to the one that ends an operation, or to the end of the connection."""
        found = []
        while (each := self.frame()) is not None:
            found.append(each)
            if each[0] in (wire.EXITED, wire.DONE, wire.ERROR) or each == (wire.DATA, b""):
                break
        return found

    def close(self) -> None:
        self.sock.close()


@contextlib.asynccontextmanager
async def guest(directory: Path) -> AsyncIterator[GuestConnection]:
    """A real guest as a plain process."""
    path = directory / "s"
    started = Started(path)
    connection = GuestConnection("plain", path, Template("t", cwd=os.fsencode(directory)))
    try:
        yield connection
    finally:
        await connection.close()
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == 0


class BareGuests:
    """A backend of guests that are PID 1 of bare namespaces: all that a guest does, and no confinement."""

    name = "guest"
    template = Template("t")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._guests: dict[str, Started] = {}

    async def open(self) -> None:
        self._directory.mkdir()

    async def close(self) -> None:
        for name in list(self._guests):
            await self.destroy(name)
        self._directory.rmdir()

    async def let_go(self) -> None:
        """Nothing to let go of."""

    def capabilities(self) -> Capabilities:
        return Capabilities("none")

    async def prepare(self, template: Template) -> None:
        """Nothing is shared."""

    async def create(self, sandbox_id: str, template: Template) -> GuestConnection:
        path = self._directory / sandbox_id
        self._guests[sandbox_id] = Started(path, *NAMESPACES)
        connection = GuestConnection(sandbox_id, path, template)
        try:
            await connection.ping()
        except BaseException:
            await asyncio.shield(self.destroy(sandbox_id))
            raise
        return connection

    async def destroy(self, sandbox_id: str) -> None:
        if (started := self._guests.pop(sandbox_id, None)) is not None:
            await asyncio.to_thread(started.end)
            (self._directory / sandbox_id).unlink()

    async def describe(self, sandbox_id: str) -> dict[str, str]:
        there = sandbox_id in self._guests
        return {"directory": str(self._directory / sandbox_id)} if there else {}

    async def list_ids(self) -> list[str]:
        return list(self._guests)
