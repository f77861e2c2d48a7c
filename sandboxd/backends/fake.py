"""A backend without isolation, so that users can test their own masking anywhere.

Commands run for real, as plain processes of this user in a temporary directory; sandboxes start after
a scripted time, and die when told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandboxd import stopwatch
from sandboxd.backends import command_users
from sandboxd.backends.base import Execution
from sandboxd.backends.fake_commands import FakeCommands
from sandboxd.backends.host_files import HostFiles, remove_all
from sandboxd.backends.host_process import HostProcess
from sandboxd.backends.scripted import Answer, scripted
from sandboxd.clock import Clock, MonotonicClock
from sandboxd.errors import BackendUnavailable, FileFailed, InvalidRequest, Phase, SandboxLost, StartFailed
from sandboxd.lifetime import cleaned_up, in_thread
from sandboxd.types import Capabilities, Command, Event, Template


@dataclass(slots=True)
class FakeScript:
    """What goes wrong, and when.

    `start_seconds` is how long a start takes; `first_failures` are raised by the first attempts, in order.
    The next `destroy_failures` destructions and `prune_failures` removals of copies fail. While `trouble`
    says why, the backend is unavailable; while it `hangs`, it gives no answer. With an `answer` commands do
    not run: in sandboxes made from then on they take the time and end as it says. What happens by chance is
    for `FaultyBackend`, in front of any backend.
    """

    start_seconds: float = 0.0
    destroy_failures: int = 0
    prune_failures: int = 0
    first_failures: list[StartFailed] = field(default_factory=list)
    trouble: str = ""
    hangs: bool = False
    answer: Callable[[Command], Answer] | None = None


class FakeBackend:
    """Keeps its sandboxes in this process, and their files in `root` (the system's place for temporary ones);
    `script` may be changed while it runs.
    """

    name = "fake"

    def __init__(
        self, script: FakeScript | None = None, *, clock: Clock | None = None, root: Path | None = None
    ) -> None:
        self._root = root
        self.script = script or FakeScript()
        self.created_total = 0
        self.prepared: list[str] = []
        self._clock = clock or MonotonicClock()
        self._alive: dict[str, FakeConnection] = {}
        self._branches: dict[str, Path] = {}

    async def open(self) -> None:
        """Takes away the files of a daemon that was killed; its processes ended with it."""
        if self._root is not None:
            await asyncio.to_thread(remove_all, self._root)
            self._root.mkdir(mode=0o700)

    async def close(self) -> None:
        for sandbox_id in list(self._alive):
            await self.destroy(sandbox_id)
        for branch in list(self._branches):
            await self.prune(branch)
        if self._root is not None:
            await asyncio.to_thread(remove_all, self._root)

    async def let_go(self) -> None:
        """Nothing to let go of."""

    async def check(self) -> None:
        if self.script.hangs:
            await asyncio.get_running_loop().create_future()
        if self.script.trouble:
            raise BackendUnavailable(self.script.trouble)

    def capabilities(self) -> Capabilities:
        return Capabilities(isolation="none", notes=("commands run as plain processes of this user",))

    async def prepare(self, template: Template) -> None:
        if template.image and template.image not in self.prepared:
            self.prepared.append(template.image)

    async def create(self, sandbox_id: str, template: Template) -> FakeConnection:
        script = self.script
        await self.check()
        if script.start_seconds:
            stopwatch.enter(Phase.START)
            await self._clock.sleep(script.start_seconds)
        if script.first_failures:
            raise script.first_failures.pop(0)
        self.created_total += 1
        connection = FakeConnection(template, answering=self._answering(), root=self._root)
        self._alive[sandbox_id] = connection
        try:
            if template.branches:
                await connection.begin_with(self._branches[template.branches[-1]])
        except BaseException:
            del self._alive[sandbox_id]
            await cleaned_up(f"ending {sandbox_id}", connection.end())
            raise
        return connection

    async def adopt(self, sandbox_id: str, template: Template) -> FakeConnection:
        connection = self._alive.get(sandbox_id)
        if connection is None:
            raise SandboxLost(f"sandbox {sandbox_id} is gone")
        await connection.ping()
        return connection

    async def destroy(self, sandbox_id: str) -> None:
        await self.check()
        if self.script.destroy_failures:
            self.script.destroy_failures -= 1
            raise BackendUnavailable("the script says that this destruction fails")
        connection = self._alive.pop(sandbox_id, None)
        if connection is not None:
            await connection.end()

    async def reset(self, sandbox_id: str, new_id: str, template: Template) -> FakeConnection:
        connection = self._alive.get(sandbox_id)
        if connection is None:
            raise SandboxLost(f"sandbox {sandbox_id} is gone")
        await connection.end()
        del self._alive[sandbox_id]
        if connection.home is not None:
            connection.home.mkdir(mode=0o700)
        self._alive[new_id] = reset = FakeConnection(template, connection.home, self._answering(), self._root)
        return reset

    async def branch(self, sandbox_id: str, template: Template, branch: str) -> Template:
        self._branches[branch] = directory = Path(
            tempfile.mkdtemp(prefix="sandboxd-fake-branch-", dir=self._root)
        )
        try:
            source = self._alive.get(sandbox_id)
            if source is None:
                raise SandboxLost(f"sandbox {sandbox_id} is gone")
            await source.copy_to(directory)
        except BaseException:
            await cleaned_up(f"removing branch {branch}", self.prune(branch))
            raise
        return replace(template, branches=(*template.branches, branch), setup=())

    async def prune(self, branch: str) -> None:
        if self.script.prune_failures:
            self.script.prune_failures -= 1
            raise BackendUnavailable("the script says that this removal fails")
        directory = self._branches.pop(branch, None)
        if directory is not None:
            await asyncio.to_thread(remove_all, directory)

    def _answering(self) -> Answering | None:
        return None if self.script.answer is None else (self.script.answer, self._clock)

    def branches(self) -> list[str]:
        """The copies that exist."""
        return list(self._branches)

    async def list_branches(self) -> list[str]:
        return self.branches()

    async def snapshot(self, sandbox_id: str, template: Template, image: str) -> int:
        raise InvalidRequest("the fake backend keeps no images; use another", phase=Phase.CREATE)

    async def describe(self, sandbox_id: str) -> dict[str, str]:
        connection = self._alive.get(sandbox_id)
        return {} if connection is None else connection.describe()

    async def list_ids(self) -> list[str]:
        return list(self._alive)

    def kill(self, sandbox_id: str) -> None:
        """Lets a sandbox die as if the host had killed it."""
        self._alive[sandbox_id].die("killed by the test")

    def freeze(self, sandbox_id: str) -> None:
        """Lets a sandbox answer no more questions, as if the host had stopped it."""
        self._alive[sandbox_id].answers.clear()

    def thaw(self, sandbox_id: str) -> None:
        """Lets a frozen sandbox answer again."""
        self._alive[sandbox_id].answers.set()


Answering = tuple[Callable[[Command], Answer], Clock]


class FakeConnection:
    """A way into one fake sandbox."""

    def __init__(
        self,
        template: Template,
        home: Path | None = None,
        answering: Answering | None = None,
        root: Path | None = None,
    ) -> None:
        """`home` is where an earlier one's files were; made anew. Another is made in `root`."""
        self._root = root
        self._template = template
        self._answering = answering
        self.home = home
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._processes: set[HostProcess] = set()
        self.answers = asyncio.Event()
        self.answers.set()
        self._check = _alive(self._lost)
        self.commands = FakeCommands(self._check)

    @property
    def files(self) -> HostFiles:
        """As `GuestConnection.files`."""
        return HostFiles(self._place)

    def die(self, why: str) -> None:
        """Ends the sandbox under whoever uses it."""
        if not self._lost.done():
            self._lost.set_result(why)
        for process in self._processes:
            process.kill_tree()
        self.commands.kill()

    async def end(self) -> None:
        """Kills what runs and removes the sandbox's directory."""
        self.die("destroyed")
        await self.commands.end()
        if self.home is not None:
            await asyncio.to_thread(remove_all, self.home)

    @property
    def _home(self) -> Path:
        """Made at first use: most sandboxes of a pool test never run a command."""
        if self.home is None:
            self.home = Path(tempfile.mkdtemp(prefix="sandboxd-fake-", dir=self._root))
        return self.home

    def describe(self) -> dict[str, str]:
        """Its directory, once something has been put there."""
        return {} if self.home is None else {"directory": str(self.home)}

    async def begin_with(self, directory: Path) -> None:
        """Takes over a copy of a directory's files."""
        await in_thread(_copy, directory, self._home)

    async def copy_to(self, directory: Path) -> None:
        """Copies this sandbox's files there."""
        self._check()
        await in_thread(_copy, self._home, directory)
        self._check()

    @contextlib.asynccontextmanager
    async def exec(self, command: Command) -> AsyncIterator[Execution]:
        self._check()
        command_users.check(command, self._template)
        if command.terminal is not None:
            raise InvalidRequest("the fake backend has no terminals; use another", phase=Phase.EXEC)
        if self._answering is not None:
            answer, clock = self._answering
            async with scripted(answer(command), command.timeout, clock) as answered:
                yield _Checked(answered, self._check)
            return
        if command.user:
            raise InvalidRequest(
                f"user {command.user!r}: the fake backend's commands run as the daemon's own; leave it out,"
                " or use the namespace backend",
                phase=Phase.EXEC,
            )
        process = HostProcess(command, self._template.env, self._directory(command.cwd))
        if command.id:
            async with self.commands.start(command, process) as execution:
                yield execution
            return
        self._processes.add(process)
        try:
            async with process.running() as running:
                yield _Checked(running, self._check)
        finally:
            self._processes.discard(process)

    async def ping(self) -> None:
        await self.answers.wait()
        self._check()

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Nothing to let go of."""

    def _directory(self, cwd: bytes | None) -> Path:
        directory = self._path(cwd or self._template.cwd)
        if cwd is None:
            directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _place(self, path: bytes) -> bytes:
        self._check()
        return os.fsencode(self._path(path))

    def _path(self, path: bytes) -> Path:
        """Paths below the template's working directory and relative ones live in the temporary directory."""
        absolute = Path(os.fsdecode(self._template.cwd)) / os.fsdecode(path)
        return self._home / absolute.relative_to("/")


def _alive(lost: asyncio.Future[str]) -> Callable[[], None]:
    """Raises SandboxLost once it is. No method of the connection: whatever it is given to would hold that."""

    def check() -> None:
        if lost.done():
            raise SandboxLost(f"the sandbox died: {lost.result()}")

    return check


class _Checked:
    """An execution whose events come as long as the sandbox lives."""

    def __init__(self, execution: Execution, check: Callable[[], None]) -> None:
        self._events, self._check = aiter(execution), check
        self.write, self.end_input = execution.write, execution.end_input
        self.signal, self.resize = execution.signal, execution.resize

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._events)
        self._check()
        return event


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    except RecursionError:
        # What the sandbox has nested is no fault of the host.
        raise FileFailed(
            "its directories are nested deeper than the fake backend copies (about 450); another copies all"
        ) from None
