"""Sandboxes made of Linux namespaces by a launcher process: no daemon beside ours, no root needed.

`open` starts the launcher or finds the one that an earlier daemon left. It is best called before gRPC is
used: the start is a plain fork and exec, after which this process never forks again.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sandboxd.backends.channel import dial
from sandboxd.backends.connection import GuestConnection
from sandboxd.errors import BackendUnavailable, Phase, SandboxLost, StartFailed
from sandboxd.types import Capabilities, Network, Template

# A launcher without a daemon keeps its sandboxes for this long.
GRACE_SECONDS = 60.0
START_SECONDS = 20.0
# A start with less room than this on the disk would only fail later, inside the sandbox.
ROOM_BYTES = 64 << 20
# The first number of the users that sandboxes get when root starts them: a range that systemd and the
# tools of useradd leave free.
UID_BASE = 1_879_048_192
CONTROL_LINE_BYTES = 4 << 20
VERSION = 2
LOCK_FILE, LOG_FILE = "launcher.lock", "launcher.log"
# Stands for the packages, whose __init__ would load what a launcher must not carry, gRPC above all.
BOOTSTRAP = """
import sys, types
for name, path in (("sandboxd", sys.argv[1]), ("sandboxd.backends", sys.argv[1] + "/backends")):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [path]
from sandboxd.backends.keeper import main
main()
"""


@dataclass(frozen=True, slots=True)
class NamespaceOptions:
    """What can be set; the defaults fit.

    `read_only_paths` are host directories that sandboxes of the default image see besides the system's.
    `python` runs the launcher.
    """

    read_only_paths: tuple[Path, ...] = ()
    python: str = sys.executable
    uid_base: int = UID_BASE
    grace_seconds: float = GRACE_SECONDS
    cgroup_root: Path = Path("/sys/fs/cgroup")


class Link:
    """The control connection: requests with answers, and the losses that the launcher tells of."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._count = 0
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.lost: dict[str, asyncio.Future[str]] = {}
        self.broken = ""
        self.task = asyncio.create_task(self._listen(), name="launcher link")

    async def ask(self, what: str, **arguments: object) -> dict[str, Any]:
        """Raises BackendUnavailable when the launcher is gone."""
        if self.broken:
            raise BackendUnavailable(self.broken)
        self._count += 1
        answer = self._asked[self._count] = asyncio.get_running_loop().create_future()
        message = {"n": self._count, "do": what, **arguments}
        self._writer.write(json.dumps(message).encode() + b"\n")
        result: dict[str, Any] = await answer
        return result

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                self._heard(json.loads(line))
        except ConnectionError:
            pass
        finally:
            self._break("the launcher of the namespace sandboxes died")

    def _heard(self, message: dict[str, Any]) -> None:
        if "lost" in message:
            future = self.lost.get(message["lost"])
            if future is not None and not future.done():
                future.set_result(message["why"])
            return
        answer = self._asked.pop(message["n"])
        if not answer.done():
            answer.set_result(message)

    def _break(self, why: str) -> None:
        self.broken = why
        self._writer.close()
        for future in self.lost.values():
            if not future.done():
                future.set_result(why)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(BackendUnavailable(why))

    async def close(self) -> None:
        """Lets go of the launcher, which lives on."""
        self.task.cancel()
        await asyncio.wait([self.task])


class NamespaceBackend:
    """See `base.Backend`. Everything it makes lives under one state directory of its own."""

    name = "namespace"

    def __init__(self, state_dir: Path, options: NamespaceOptions | None = None) -> None:
        self._state = state_dir
        self._options = options or NamespaceOptions()
        self._link: Link | None = None
        self._linking = asyncio.Lock()
        self._enforced: frozenset[str] = frozenset()
        self._keeper_end: asyncio.Future[None] | None = None
        self.launcher_pid: int | None = None

    @property
    def instance(self) -> str:
        """What this backend's control groups are called."""
        return "sandboxd-" + hashlib.sha256(os.fsencode(self._state.resolve())).hexdigest()[:12]

    async def open(self) -> None:
        """Starts the launcher, or takes over one that runs. Raises BackendUnavailable."""
        try:
            self._state.mkdir(mode=0o711, parents=True, exist_ok=True)
        except OSError as error:
            raise BackendUnavailable(f"{self._state} cannot be made: {error.strerror}") from error
        await self._connected()

    async def close(self) -> None:
        """See `base.Backend.close`; the launcher ends, too, and with it all that it made."""
        async with self._linking:
            link, self._link = self._link, None
            if link is None:
                self._remove_state()
                return
            try:
                await link.ask("close")
            except BackendUnavailable:
                pass  # It died; its keeper removes what was left.
            finally:
                await link.close()
            await self.keeper_ended()
            self._remove_state()

    def _watch_keeper(self, pid: int) -> None:
        """Lets the keeper's end resolve a future; it ends when nothing is left of the launcher."""
        loop = asyncio.get_running_loop()
        end = self._keeper_end = loop.create_future()
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            end.set_result(None)
            return

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            if not end.done():
                end.set_result(None)

        loop.add_reader(fd, ended)

    async def keeper_ended(self) -> None:
        """Returns when a launcher that let go or died has left nothing. Raises BackendUnavailable."""
        if self._keeper_end is None:
            return
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(self._keeper_end)
        except TimeoutError as error:
            raise BackendUnavailable(
                f"the keeper of {self._state} did not end; its log is {self._state / LOG_FILE}"
            ) from error

    def _remove_state(self) -> None:
        """Takes the directory away unless a launcher that is not ours uses it."""
        try:
            with (self._state / LOCK_FILE).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in (LOG_FILE, LOCK_FILE):
                    (self._state / name).unlink(missing_ok=True)
            self._state.rmdir()
        except OSError:
            return

    def capabilities(self) -> Capabilities:
        notes = []
        missing = {"memory", "pids", "cpu"} - self._enforced
        if missing:
            notes.append(
                f"no control group for {', '.join(sorted(missing))}: memory is bounded for each process"
                " alone (RLIMIT_AS), processes by RLIMIT_NPROC, processor time not at all"
            )
        limits = {"disk", "open_files", "pids", *self._enforced}
        return Capabilities("linux namespaces", frozenset(limits), tuple(notes))

    async def prepare(self, template: Template) -> None:
        """Refuses what this backend cannot make. Raises StartFailed."""
        if template.image is not None:
            raise StartFailed(
                f"image {template.image!r}: the namespace backend runs on the host's system directories;"
                " leave `image` out, or use the docker backend",
                phase=Phase.PULL,
                retryable=False,
            )
        if template.runtime is not None:
            raise StartFailed(
                f"runtime {template.runtime!r} is for the docker backend", phase=Phase.CREATE, retryable=False
            )

    async def create(self, sandbox_id: str, template: Template) -> GuestConnection:
        """See `base.Backend.create`."""
        await self.prepare(template)
        self._check_room()
        link = await self._connected()
        if sandbox_id in link.lost:
            raise StartFailed(f"the name {sandbox_id!r} is taken", phase=Phase.CREATE, retryable=False)
        lost = link.lost[sandbox_id] = asyncio.get_running_loop().create_future()
        try:
            await self._order(link, sandbox_id, template)
            socket_path = self._state / "sandboxes" / sandbox_id / "guest.sock"
            connection = GuestConnection(sandbox_id, socket_path, template, lost=lost)
            await connection.ping()
        except SandboxLost as error:
            await self.destroy(sandbox_id)
            raise StartFailed(error.message, phase=Phase.START) from error
        except BackendUnavailable as error:
            raise StartFailed(error.message, phase=Phase.CREATE) from error
        except BaseException:
            await asyncio.shield(self.destroy(sandbox_id))
            raise
        return connection

    def _check_room(self) -> None:
        """Raises StartFailed; retryable, for others may end and give room back."""
        disk = os.statvfs(self._state)
        left = disk.f_bavail * disk.f_frsize
        if left < ROOM_BYTES:
            raise StartFailed(
                f"DISK_FULL: {left >> 20} MiB are left for {self._state}, a start needs {ROOM_BYTES >> 20};"
                " free some space or name another state_dir",
                phase=Phase.CREATE,
                metadata={"host": "DISK_FULL"},
            )

    @staticmethod
    async def _order(link: Link, sandbox_id: str, template: Template) -> None:
        answer = await link.ask(
            "create",
            id=sandbox_id,
            cwd=os.fsdecode(template.cwd),
            limits={key: value for key, value in asdict(template.limits).items() if value is not None},
            host_network=template.network is Network.HOST,
        )
        if "error" in answer:
            raise StartFailed(f"the launcher cannot make it: {answer['error']}", phase=Phase.CREATE)

    async def destroy(self, sandbox_id: str) -> None:
        """See `base.Backend.destroy`. Raises BackendUnavailable when something stays behind."""
        link = self._link
        if link is None:
            return
        if link.broken:
            # What the launcher made died with it, and its keeper removes the rest.
            await self.keeper_ended()
            return
        answer = await link.ask("destroy", id=sandbox_id)
        lost = link.lost.pop(sandbox_id, None)
        if lost is not None and not lost.done():
            lost.set_result("it was destroyed")
        if "error" in answer:
            raise BackendUnavailable(
                f"sandbox {sandbox_id} could not be removed: {answer['error']}", phase=Phase.DESTROY
            )

    async def list_ids(self) -> list[str]:
        """See `base.Backend.list_ids`."""
        link = await self._connected()
        answer = await link.ask("hello")
        return list(answer["pids"])

    async def pid_of(self, sandbox_id: str) -> int:
        """The host's number of the sandbox's first process. Raises KeyError."""
        link = await self._connected()
        pid: int = (await link.ask("hello"))["pids"][sandbox_id]
        return pid

    async def let_go(self) -> None:
        """Closes the connection to the launcher as a daemon's death would: it keeps all for its grace."""
        async with self._linking:
            link, self._link = self._link, None
            if link is not None:
                await link.close()

    # -- the launcher

    async def _connected(self) -> Link:
        async with self._linking:
            if self._link is not None and not self._link.broken:
                return self._link
            if self._link is not None:
                await self._link.close()
            link = await self._find()
            if link is None:
                await self._start()
                link = await self._find()
            if link is None:
                raise BackendUnavailable(f"the launcher in {self._state} does not answer")
            hello = await link.ask("hello")
            if hello["version"] != VERSION:
                await link.close()
                raise BackendUnavailable(
                    f"the launcher in {self._state} speaks version {hello['version']}, this daemon"
                    f" {VERSION}; stop it (pid {hello['pid']}) and start again"
                )
            self._link = link
            self._watch_keeper(hello["keeper"])
            self._enforced = frozenset(hello["enforced"])
            self.launcher_pid = hello["pid"]
            return link

    async def _find(self) -> Link | None:
        try:
            sock = await dial(self._state / "launcher.sock")
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise BackendUnavailable(f"{self._state / 'launcher.sock'}: {error.strerror}") from error
        return Link(*await asyncio.open_unix_connection(sock=sock, limit=CONTROL_LINE_BYTES))

    async def _start(self) -> None:
        options = self._options
        state = self._state.resolve()
        spec = {
            "state": str(state),
            "name": self.instance,
            "cgroup_root": str(options.cgroup_root),
            "read_only_paths": [str(path) for path in options.read_only_paths],
            "uid_base": options.uid_base,
            "grace": options.grace_seconds,
        }
        package = str(Path(__file__).parent.parent)
        argv = [options.python, "-I", "-S", "-c", BOOTSTRAP, package]
        try:
            done = await asyncio.to_thread(_answered, argv, json.dumps(spec).encode())
        except subprocess.TimeoutExpired as error:
            raise BackendUnavailable(f"the launcher did not start within {START_SECONDS:g} s") from error
        answer = done.stdout.decode(errors="replace").strip()
        if answer != "ready":
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise BackendUnavailable(
                f"namespace sandboxes cannot be made here: {answer or last or 'no answer'}"
            )


def _answered(argv: list[str], given: bytes) -> subprocess.CompletedProcess[bytes]:
    """Not by the event loop: some hand their own descriptors down, and a launcher would hold them."""
    return subprocess.run(
        argv,
        input=given,
        capture_output=True,
        env={},
        cwd="/",
        start_new_session=True,
        timeout=START_SECONDS,
        check=False,
    )
