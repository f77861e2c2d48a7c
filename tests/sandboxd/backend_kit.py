"""The backends under one list of tests, and what those tests run commands with."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sandboxd.backends.base import Backend, Connection, Execution
from sandboxd.images.importing import import_image
from sandboxd.images.store import ImageStore
from sandboxd.types import Command, Event, Exited, ExitReason, Started, Stderr, Stdout, Template

NOT_IN_CONTAINERS = "users = true is for the namespace backend"


@dataclass
class Case:
    """A backend under test, open, with the template that its sandboxes are made from."""

    backend: Backend
    template: Template
    by_engine: bool = False
    """Commands go through the Engine's exec API, which takes text only and tells no signals."""
    without_terminals: bool = False
    without_python: bool = False
    without_forks: bool = False
    no_users: str = ""
    """Why no command of it may name a user; empty where one may."""

    @contextlib.asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Connection]:
        name = f"t{uuid.uuid4().hex[:12]}"
        connection = await self.backend.create(name, self.template)
        try:
            yield connection
        finally:
            await connection.close()
            await self.backend.destroy(name)


@pytest.fixture(
    params=[
        "fake",
        "guest",
        "namespace",
        pytest.param("namespace-image", marks=pytest.mark.docker),
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("docker-image", marks=pytest.mark.docker),
        pytest.param("docker-exec", marks=pytest.mark.docker),
    ]
)
def unopened(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """Imports only the backend that is asked for."""
    if request.param == "fake":
        from sandboxd.backends.fake import FakeBackend

        no_users = "fake backend's commands run as the daemon's own"
        return Case(FakeBackend(), Template("t"), without_terminals=True, no_users=no_users)
    if request.param == "guest":
        from .guest_kit import BareGuests

        guests: Any = BareGuests(tmp_path / "state")  # It has no more of a backend than the cases ask for.
        return Case(guests, BareGuests.template, without_forks=True, no_users="could not become that user")
    if request.param == "namespace":
        from sandboxd.backends.namespace import NamespaceBackend

        return Case(NamespaceBackend(tmp_path / "state"), Template("t"))
    if request.param == "namespace-image":
        from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions

        options = NamespaceOptions(images_dir=request.getfixturevalue("busybox_store"))
        template = Template("t", image="busybox")
        return Case(NamespaceBackend(tmp_path / "state", options), template, without_python=True)
    fixture = "docker_python_image" if request.param == "docker" else "docker_busybox_image"
    image = request.getfixturevalue(fixture)
    from sandboxd.backends.docker import DockerBackend

    template = Template("t", image=image)
    if request.param == "docker-exec":
        backend = DockerBackend(tmp_path / "state", guest=tmp_path / "not-built")
        return Case(
            backend,
            template,
            by_engine=True,
            without_terminals=True,
            without_python=True,
            no_users=NOT_IN_CONTAINERS,
        )
    without_python = request.param == "docker-image"
    backend = DockerBackend(tmp_path / "state")
    return Case(backend, template, without_python=without_python, no_users=NOT_IN_CONTAINERS)


@pytest.fixture(scope="session")
def busybox_store(docker_busybox_image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image store with `busybox`: an image without Python, imported from the Docker Engine."""
    store = ImageStore(tmp_path_factory.mktemp("images"))
    # In a thread: a test's own loop may be running by the time it asks.
    work = import_image(store, f"docker:{docker_busybox_image}", "busybox", print)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()
    return store.root


@pytest.fixture
async def case(unopened: Case, tmp_path: Path) -> AsyncIterator[Case]:
    await unopened.backend.open()
    try:
        yield unopened
    finally:
        await unopened.backend.close()
    assert not (tmp_path / "state").exists()


@pytest.fixture
async def box(case: Case) -> AsyncIterator[Connection]:
    async with case.sandbox() as connection:
        yield connection


@dataclass
class Outcome:
    """A command's events, joined."""

    events: list[Event] = field(default_factory=list)
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def exited(self) -> Exited:
        last = self.events[-1]
        assert isinstance(last, Exited)
        return last

    @property
    def code(self) -> int:
        assert self.exited.reason is ExitReason.EXITED
        return self.exited.exit_code


async def execute(box: Connection, command: Command) -> Outcome:
    """Runs the command to its end and checks what holds for every stream of events."""
    outcome = Outcome()
    async with box.exec(command) as events:
        async for event in events:
            outcome.events.append(event)
            if isinstance(event, Stdout):
                assert event.offset == len(outcome.stdout)
                outcome.stdout += event.data
            elif isinstance(event, Stderr):
                assert event.offset == len(outcome.stderr)
                outcome.stderr += event.data
    assert sum(isinstance(event, Exited) for event in outcome.events) == 1
    if outcome.exited.reason is not ExitReason.NOT_STARTED:
        assert isinstance(outcome.events[0], Started)
        assert sum(isinstance(event, Started) for event in outcome.events) == 1
    return outcome


class Talk:
    """The events of a command that is talked to, read a line at a time."""

    def __init__(self, running: Execution) -> None:
        self._events = aiter(running)
        self._rest = b""
        self._end: Exited | None = None

    async def started(self) -> None:
        assert isinstance(await anext(self._events), Started)

    async def line(self) -> bytes:
        """The next line of standard output, without its end."""
        while b"\n" not in self._rest:
            event = await anext(self._events)
            assert isinstance(event, Stdout), event
            self._rest += event.data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.rstrip(b"\r")

    async def end(self) -> tuple[bytes, Exited]:
        """What is left of standard output, and the exit."""
        async for event in self._events:
            if isinstance(event, Stdout):
                self._rest += event.data
            elif isinstance(event, Exited):
                self._end = event
        assert self._end is not None
        return self._rest, self._end


async def shell(box: Connection, script: str, **options: object) -> Outcome:
    return await execute(box, Command(argv=(b"sh", b"-c", script.encode()), **options))  # type: ignore[arg-type]


async def output(box: Connection, script: str) -> str:
    """What a script prints, which must end well."""
    done = await shell(box, script)
    assert done.code == 0, done.stderr
    return done.stdout.decode()


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def read(box: Connection, path: bytes, **options: int) -> bytes:
    return b"".join([piece async for piece in box.files.read(path, **options)])


async def processes_with(box: Connection, marker: str) -> list[bytes]:
    """Command lines inside the sandbox that hold the marker; the looking shell's own does not."""
    script = 'for f in /proc/[0-9]*/cmdline; do tr "\\000" " " < $f 2>/dev/null; echo; done'
    return [line for line in (await shell(box, script)).stdout.splitlines() if marker.encode() in line]
