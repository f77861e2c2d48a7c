"""The backends of a daemon: each is opened when the first pool needs it, and closed with the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from sandboxd.backends import open_backend
from sandboxd.backends.base import Backend
from sandboxd.config import Config


class BackendSet:
    """Use `async with`; what is left on the host is swept at its end."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stack = contextlib.AsyncExitStack()
        self._open: dict[str, Backend] = {}

    async def __aenter__(self) -> BackendSet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def need(self, kind: str) -> Backend:
        """The backend of this kind, opened if it was not.

        Raises BackendUnavailable, and then leaves nothing behind.
        """
        if kind not in self._open:
            backend = open_backend(kind, self._config)
            try:
                await backend.open()
            except BaseException:
                await backend.close()
                raise
            self._stack.push_async_callback(backend.close)
            self._open[kind] = backend
        return self._open[kind]

    def __getitem__(self, kind: str) -> Backend:
        return self._open[kind]

    def __iter__(self) -> Iterator[tuple[str, Backend]]:
        return iter(self._open.items())
