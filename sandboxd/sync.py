"""The client for code that does not use asyncio: the same calls, run on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sandboxd.client import Box, Client
from sandboxd.inspection_replies import SandboxFailure, SandboxReport
from sandboxd.remote_commands import DetachedCommand
from sandboxd.replies import ExecResult, PrewarmPlan
from sandboxd.sessions import Session, SessionResult
from sandboxd.types import CommandInfo, Event, FileInfo, PoolStats

Result = TypeVar("Result")


class SyncClient:
    """`with SyncClient() as client, client.acquire("python") as box: box.exec([...])`."""

    def __init__(self, address: str | None = None) -> None:
        # First: it hears at once of an address that is none.
        self._offered = Client(address)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandboxd client", daemon=True)

    def __enter__(self) -> SyncClient:
        self._thread.start()
        self._closing = asyncio.Event()
        opened: asyncio.Future[Client] = self._loop.create_future()
        self._life = asyncio.run_coroutine_threadsafe(self._live(opened), self._loop)
        try:
            self._client = self.run(_wait_for(opened))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """Raises what the client's life ended with."""
        self._loop.call_soon_threadsafe(self._closing.set)
        try:
            self._life.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _live(self, opened: asyncio.Future[Client]) -> None:
        """Holds the client open in one task, which must both enter and leave it."""
        try:
            async with self._offered as client:
                opened.set_result(client)
                await self._closing.wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)
            raise

    @contextlib.contextmanager
    def acquire(self, pool: str, **options: Any) -> Iterator[SyncBox]:
        """Leases a sandbox for the block. Options and errors as `Client.acquire`."""
        with self.within(self._client.acquire(pool, **options)) as box:
            yield SyncBox(self, box)

    @contextlib.contextmanager
    def acquire_gang(self, pool: str, count: int, **options: Any) -> Iterator[list[SyncBox]]:
        """Leases several sandboxes for the block, all or none; `on_wait` is called in the client's thread."""
        with self.within(self._client.acquire_gang(pool, count, **options)) as boxes:
            yield [SyncBox(self, box) for box in boxes]

    def get_pool(self, pool: str) -> PoolStats:
        """Counts and totals of one pool. Raises PoolNotFound."""
        return self.run(self._client.get_pool(pool))

    def prewarm(self, pool: str, count: int, **options: Any) -> PrewarmPlan:
        """Announces that sandboxes will be wanted. Options and errors as `Client.prewarm`."""
        return self.run(self._client.prewarm(pool, count, **options))

    def watch_pool(self, pool: str, **options: float) -> Iterator[PoolStats]:
        """Yields a pool's numbers as they change. Options and errors as `Client.watch_pool`."""
        return self.each(self._client.watch_pool(pool, **options))

    def each(self, values: AsyncGenerator[Result, None]) -> Iterator[Result]:
        """Yields what the asynchronous client yields."""
        try:
            while (value := self.run(_next(values))) is not None:
                yield value
        finally:
            self.run(_close(values))

    def inspect(self, sandbox: str) -> SandboxReport:
        """All that is known of a sandbox in any state."""
        return self.run(self._client.inspect(sandbox))

    def list_failures(self, pool: str | None = None) -> list[SandboxFailure]:
        """Why sandboxes failed of late, the oldest first."""
        return self.run(self._client.list_failures(pool))

    @contextlib.contextmanager
    def within(self, block: AbstractAsyncContextManager[Result]) -> Iterator[Result]:
        """Enters a block of the asynchronous client for the length of this one."""
        entered = self.run(block.__aenter__())
        try:
            yield entered
        except BaseException as error:
            self.run(block.__aexit__(type(error), error, error.__traceback__))
            raise
        self.run(block.__aexit__(None, None, None))

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Runs one call of the asynchronous client to its end."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


class SyncBox:
    """A leased sandbox; see `Box` for what each call does and raises."""

    def __init__(self, client: SyncClient, box: Box) -> None:
        self._client, self._box = client, box
        self.name = box.name

    def exec(self, argv: list[Any], **options: Any) -> ExecResult:
        """Runs a command to its end and returns all it printed."""
        return self._client.run(self._box.exec(argv, **options))

    def start(self, argv: list[Any], **options: Any) -> SyncCommand:
        """Starts a command that goes on by itself."""
        return SyncCommand(self._client, self._client.run(self._box.start(argv, **options)))

    def command(self, command_id: str) -> SyncCommand:
        """The command of an id."""
        return SyncCommand(self._client, self._box.command(command_id))

    def attach(self, command_id: str, **offsets: int) -> Iterator[Event]:
        """Yields what the command of an id told and will tell."""
        return self.command(command_id).attach(**offsets)

    def list_commands(self) -> list[CommandInfo]:
        """The commands with an id that run or are kept."""
        return self._client.run(self._box.list_commands())

    @contextlib.contextmanager
    def fork(self, count: int, **options: Any) -> Iterator[list[SyncBox]]:
        """Sandboxes that begin with this one's files, for the block."""
        with self._client.within(self._box.fork(count, **options)) as forks:
            yield [SyncBox(self._client, fork) for fork in forks]

    def snapshot(self, image: str) -> int:
        """Stores the sandbox's files as an image; returns the bytes copied."""
        return self._client.run(self._box.snapshot(image))

    @contextlib.contextmanager
    def shell(self, **options: Any) -> Iterator[SyncSession]:
        """A bash that stays, for the block."""
        with self._client.within(self._box.shell(**options)) as session:
            yield SyncSession(self._client, session)

    @contextlib.contextmanager
    def python(self, **options: Any) -> Iterator[SyncSession]:
        """A Python that stays, for the block."""
        with self._client.within(self._box.python(**options)) as session:
            yield SyncSession(self._client, session)

    def write_file(self, path: str, data: bytes, **options: Any) -> int:
        """Replaces a file atomically; returns its size."""
        return self._client.run(self._box.write_file(path, data, **options))

    def read_file(self, path: str, **options: Any) -> bytes:
        """Reads a file."""
        return self._client.run(self._box.read_file(path, **options))

    def stat_file(self, path: str) -> FileInfo:
        """What is at a path."""
        return self._client.run(self._box.stat_file(path))

    def list_files(self, path: str = ".") -> list[FileInfo]:
        """What a directory holds."""
        return self._client.run(self._box.list_files(path))

    def remove_file(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file, a symbolic link or a directory."""
        self._client.run(self._box.remove_file(path, recursive=recursive))

    def upload_tree(self, source: Path, path: str = ".") -> int:
        """Copies a directory of this host into the sandbox."""
        return self._client.run(self._box.upload_tree(source, path))

    def download_tree(self, path: str, target: Path) -> None:
        """Copies a directory of the sandbox to this host."""
        self._client.run(self._box.download_tree(path, target))


class SyncCommand:
    """A command by its id; see `DetachedCommand`."""

    def __init__(self, client: SyncClient, command: DetachedCommand) -> None:
        self._client, self._command = client, command
        self.id = command.id

    def attach(self, **offsets: int) -> Iterator[Event]:
        """Yields what it told and will tell, `Exited` last."""
        return self._client.each(self._command.attach(**offsets))

    def wait(self) -> ExecResult:
        """Waits for its end."""
        return self._client.run(self._command.wait())

    def signal(self, number: int) -> None:
        """Signals its process group."""
        self._client.run(self._command.signal(number))

    def forget(self) -> None:
        """Frees its id; ends it if it still runs."""
        self._client.run(self._command.forget())


class SyncSession:
    """An interpreter that stays; see `Session`."""

    def __init__(self, client: SyncClient, session: Session) -> None:
        self._client, self._session = client, session

    def run(self, code: str | bytes, *, timeout: float | None = None) -> SessionResult:
        """Runs a piece of code in it."""
        return self._client.run(self._session.run(code, timeout=timeout))


async def _wait_for(future: asyncio.Future[Result]) -> Result:
    return await future


async def _next(values: AsyncGenerator[Result, None]) -> Result | None:
    return await anext(values, None)


async def _close(values: AsyncGenerator[Any, None]) -> None:
    await values.aclose()
