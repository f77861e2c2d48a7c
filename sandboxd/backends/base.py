"""The contract between the pool and whatever makes sandboxes; every backend passes one conformance list."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sandboxd.types import Capabilities, Command, CommandInfo, Event, FileInfo, Template


class Execution(Protocol):
    """A command that runs: its events, and what its caller tells it meanwhile, one call after the other.

    What is told after the end is dropped. A sandbox that is gone is raised by the events alone.
    """

    def __aiter__(self) -> AsyncIterator[Event]:
        """`Started`, output, `Exited`; or `Exited` alone when it could not be started."""
        ...

    async def write(self, data: bytes) -> None:
        """More input, for an interactive command; waits while the command does not read."""
        ...

    async def end_input(self) -> None:
        """The end of an interactive command's input."""
        ...

    async def signal(self, number: int) -> None:
        """Signals the group in the terminal's foreground, or the command's own group.

        Raises InvalidRequest where the backend cannot.
        """
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Changes the size of the command's terminal; nothing where there is none."""
        ...


class Files(Protocol):
    """The files of one sandbox, touched with its own rights. Relative paths start at the template's `cwd`.

    All raise FileNotFound, FileFailed (the message names the fault) and SandboxLost.
    """

    async def write(self, path: bytes, data: AsyncIterator[bytes], mode: int) -> int:
        """Replaces the file at `path` atomically and returns its size in bytes.

        Missing parent directories are made. After an error the old file is as it was.
        """
        ...

    def read(self, path: bytes, *, offset: int = 0, limit: int | None = None) -> AsyncIterator[bytes]:
        """Yields the file's bytes from `offset`, at most `limit` of them, in pieces of up to 256 KiB."""
        ...

    async def stat(self, path: bytes) -> FileInfo:
        """What is at `path`."""
        ...

    def list_directory(self, path: bytes) -> AsyncIterator[FileInfo]:
        """What the directory at `path` holds, sorted by name."""
        ...

    async def remove(self, path: bytes, *, recursive: bool) -> None:
        """Removes a file, a link, an empty directory, or any directory if `recursive`."""
        ...

    async def unpack(self, path: bytes, archive: AsyncIterator[bytes]) -> int:
        """Unpacks a tar archive into the directory at `path`, made if missing; returns the number of entries.

        What came before an error stays.
        """
        ...

    def pack(self, path: bytes) -> AsyncIterator[bytes]:
        """Yields a tar archive of the directory at `path`, names relative to it, sorted."""
        ...


class Commands(Protocol):
    """The named commands of one sandbox: those that were started with a `Command.id`.

    All raise SandboxLost; those that take an id CommandNotFound; InvalidRequest where the backend has none.
    """

    def attach(
        self, command_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AbstractAsyncContextManager[AsyncIterable[Event]]:
        """What `exec` told and will tell, output from these offsets on or the oldest that is kept.

        Leaving the context leaves the command as it is. A reader that does not read delays nobody.
        """
        ...

    async def signal(self, command_id: str, number: int) -> None:
        """As `Execution.signal`; nothing once the command has ended."""
        ...

    async def known(self) -> list[CommandInfo]:
        """Those that run or are kept, the ended ones in the order of their ends."""
        ...

    async def forget(self, command_id: str) -> None:
        """Frees the id and what is kept; a command that runs is killed with its whole process tree."""
        ...


class Connection(Protocol):
    """A way into one running sandbox. Any number of commands may run through it at once."""

    def exec(self, command: Command) -> AbstractAsyncContextManager[Execution]:
        """Starts the command; its events end after `Exited`.

        Leaving the context before that kills the command's whole process tree. A reader that does not
        read delays this command alone. Raises SandboxLost when the sandbox is gone, InvalidRequest for
        a terminal or a named command where the backend has none; the events raise CommandExists.

        A named command waits for no reader, and one that is `detached` is not killed.
        """
        ...

    async def ping(self) -> None:
        """Returns when the sandbox answers. Raises SandboxLost when it is gone."""
        ...

    @property
    def files(self) -> Files:
        """Its files."""
        ...

    @property
    def commands(self) -> Commands:
        """Its named commands."""
        ...

    async def wait_lost(self) -> str:
        """Returns, with the cause in words, when the sandbox has died by itself."""
        ...

    async def close(self) -> None:
        """Lets go of the connection; the sandbox lives on until it is destroyed."""
        ...


class Backend(Protocol):
    """Makes and destroys sandboxes. Names are the caller's, so that both are idempotent."""

    name: str

    async def open(self) -> None:
        """Prepares the host. Raises BackendUnavailable with the way out when it cannot."""
        ...

    async def close(self) -> None:
        """Destroys every sandbox of this backend's instance and lets go of the host."""
        ...

    async def let_go(self) -> None:
        """Lets go of the host as the death of this process would: what is there stays for the next daemon.

        Also after an `open` that failed.
        """
        ...

    async def check(self) -> None:
        """Returns when it answers, and is then ready to make sandboxes. Raises BackendUnavailable."""
        ...

    def capabilities(self) -> Capabilities:
        """What this host really enforces; known after `open`."""
        ...

    async def prepare(self, template: Template) -> None:
        """Does once what all sandboxes of a template share (pulls its image, say).

        Concurrent calls for one image do the work once. Its time is none of a sandbox's own. Raises
        StartFailed with phase PULL, BackendUnavailable.
        """
        ...

    async def create(self, sandbox_id: str, template: Template) -> Connection:
        """Starts a sandbox and returns when it answers.

        A failed or cancelled call leaves nothing behind. Raises StartFailed with the phase, and `retryable`
        as far as the backend can tell; one whose cause is BackendUnavailable uses up no attempt.
        """
        ...

    async def adopt(self, sandbox_id: str, template: Template) -> Connection:
        """Connects to a sandbox that an earlier daemon made from this template, and returns when it answers.

        Raises SandboxLost; StartFailed where what it was made from is not known any more.
        """
        ...

    async def reset(self, sandbox_id: str, new_id: str, template: Template) -> Connection:
        """Makes of a used sandbox one that is as `create` would make it, under a new name; the old one means
        nothing any more, and connections to it are dead.

        After an error either name may still be there, and both can be destroyed. Raises as `create`, and
        InvalidRequest where the backend cannot.
        """
        ...

    async def branch(self, sandbox_id: str, template: Template, branch: str) -> Template:
        """Keeps a copy of what the sandbox has written, under the caller's name for it, and returns the
        template of sandboxes that begin with it.

        Files that are written to meanwhile are copied as they are found. A failed or cancelled call leaves
        nothing behind. Raises StartFailed, SandboxLost, InvalidRequest where the backend cannot.
        """
        ...

    async def prune(self, branch: str) -> None:
        """Removes the copy, on which nothing runs any more. Idempotent."""
        ...

    async def list_branches(self) -> list[str]:
        """The copies that exist on the host under this instance, whoever made them.

        Raises BackendUnavailable.
        """
        ...

    async def snapshot(self, sandbox_id: str, template: Template, image: str) -> int:
        """Stores the sandbox's file system as an image of that name; returns the bytes copied.

        As `branch` otherwise.
        """
        ...

    async def destroy(self, sandbox_id: str) -> None:
        """Ends the sandbox and removes all it had. Idempotent; a name never created is no error."""
        ...

    async def describe(self, sandbox_id: str) -> dict[str, str]:
        """Where a person on this host finds the sandbox: `pid`, `container`, `directory`.

        Empty when it is gone. Raises BackendUnavailable.
        """
        ...

    async def list_ids(self) -> list[str]:
        """The sandboxes that exist on the host under this instance, whoever created them."""
        ...
