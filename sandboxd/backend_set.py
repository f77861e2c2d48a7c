"""The backends of a daemon: each is opened when the first pool needs it, looked at, and closed at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from sandboxd.availability import Availability
from sandboxd.backends import open_backend
from sandboxd.backends.base import Backend
from sandboxd.clock import Clock
from sandboxd.config import Config
from sandboxd.errors import BackendUnavailable
from sandboxd.lifetime import Tasks


@dataclass(frozen=True, slots=True)
class OpenBackend:
    """A backend, and whether it answers."""

    backend: Backend
    availability: Availability


class BackendSet:
    """Use `async with`; what is left on the host is swept at its end, once it is `own`.

    Until then it may be what a killed daemon left, and whoever cannot start leaves it to the next. `opener`
    makes a backend that is not yet open.
    """

    def __init__(
        self, config: Config, clock: Clock, opener: Callable[[str, Config], Backend] = open_backend
    ) -> None:
        self.own = False
        self._opener = opener
        self._config = config
        self._clock = clock
        self._stack = contextlib.AsyncExitStack()
        self._open: dict[str, OpenBackend] = {}

    async def __aenter__(self) -> BackendSet:
        self._tasks = await self._stack.enter_async_context(Tasks())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def open_for(self, config: Config) -> None:
        """Opens what the pools of these settings need and is not open.

        Raises BackendUnavailable, and then leaves nothing behind of the one that failed.
        """
        kinds = sorted({settings.backend for settings in config.pools.values()} - self._open.keys())
        for kind in kinds:
            await self._open_one(kind)

    async def _open_one(self, kind: str) -> None:
        backend = self._opener(kind, self._config)
        try:
            await backend.open()
        except BaseException:
            await backend.let_go()
            raise
        self._stack.push_async_callback(self._end, backend)
        availability = Availability(backend, self._clock)
        looking = self._tasks.create_task(availability.run(), name=f"looks at {kind}")
        self._stack.callback(looking.cancel)
        self._open[kind] = OpenBackend(backend, availability)

    async def _end(self, backend: Backend) -> None:
        if self.own or await _is_empty(backend):
            await backend.close()
        else:
            await backend.let_go()

    def __getitem__(self, kind: str) -> OpenBackend:
        return self._open[kind]

    def __iter__(self) -> Iterator[tuple[str, OpenBackend]]:
        return iter(self._open.items())


async def _is_empty(backend: Backend) -> bool:
    try:
        return not await backend.list_ids()
    except BackendUnavailable:
        return False
