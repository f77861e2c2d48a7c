"""The contract between the pool and whatever makes sandboxes; every backend passes one conformance list."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from sandboxd.types import Capabilities, Command, Event, Template


class Connection(Protocol):
    """A way into one running sandbox. Any number of commands may run through it at once."""

    def exec(self, command: Command) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Starts the command; the iterator ends after `Exited`.

        Leaving the context before that kills the command's whole process tree. A reader that does not
        read delays this command alone. Raises SandboxLost when the sandbox is gone.
        """
        ...

    async def ping(self) -> None:
        """Returns when the sandbox answers. Raises SandboxLost when it is gone."""
        ...

    async def write_file(self, path: bytes, data: AsyncIterator[bytes], mode: int) -> int:
        """Replaces the file at `path` atomically and returns its size in bytes.

        Missing parent directories are made. A relative path starts at the template's `cwd`. Raises
        FileNotFound, FileFailed, SandboxLost; after an error the old file is as it was.
        """
        ...

    def read_file(self, path: bytes, *, offset: int = 0, limit: int | None = None) -> AsyncIterator[bytes]:
        """Yields the file's bytes from `offset`, at most `limit` of them, in pieces of up to 256 KiB.

        Raises FileNotFound, FileFailed, SandboxLost.
        """
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

    def capabilities(self) -> Capabilities:
        """What this host really enforces; known after `open`."""
        ...

    async def prepare(self, template: Template) -> None:
        """Does once what all sandboxes of a template share (pulls its image, say).

        Raises StartFailed with phase PULL; concurrent calls for one image do the work once.
        """
        ...

    async def create(self, sandbox_id: str, template: Template) -> Connection:
        """Starts a sandbox and returns when it answers.

        A failed or cancelled call leaves nothing behind. Raises StartFailed with the phase, and
        `retryable` as far as the backend can tell.
        """
        ...

    async def destroy(self, sandbox_id: str) -> None:
        """Ends the sandbox and removes all it had. Idempotent; a name never created is no error."""
        ...

    async def list_ids(self) -> list[str]:
        """The sandboxes that exist on the host under this instance, whoever created them."""
        ...
