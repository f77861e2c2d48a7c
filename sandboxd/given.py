"""What each request was given: makes an acquire safe to repeat, in one daemon and over the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sandboxd.errors import InvalidRequest, SandboxdError, SandboxNotFound


@dataclass(slots=True)
class Given:
    """The sandboxes of one request: how many it was given, and which of them are known."""

    count: int
    ids: list[str] = field(default_factory=list)

    def repeated(self, request_id: str, count: int) -> list[str]:
        """What a call with the same id hears. Raises InvalidRequest, SandboxNotFound."""
        if count != self.count:
            raise InvalidRequest(
                f"request_id {request_id!r} was given {self.count} sandboxes and now asks for {count}:"
                " take another id"
            )
        if len(self.ids) < self.count:
            raise SandboxNotFound(
                f"of the {self.count} sandboxes that request_id {request_id!r} was given"
                f" {self.count - len(self.ids)} were released"
            )
        return self.ids


class Requests:
    """Of one pool, by request id, for as long as one sandbox of theirs is leased."""

    def __init__(self) -> None:
        self._given: dict[str, asyncio.Future[Given]] = {}

    async def once(
        self, request_id: str, count: int, acquire: Callable[[], Awaitable[Sequence[str]]]
    ) -> Sequence[str]:
        """The ids of what `acquire` gives, or gave to an earlier call of this id; calls at once share one. An
        empty id is nobody's.

        Raises what `acquire` raises; a request that failed may be made again.
        """
        if not request_id:
            return await acquire()
        while (earlier := self._given.get(request_id)) is not None:
            await asyncio.wait({earlier})
            if not earlier.cancelled():
                return earlier.result().repeated(request_id, count)
            # The earlier call was given up before it had a sandbox; this one takes its place.
        first: asyncio.Future[Given] = asyncio.get_running_loop().create_future()
        # Retrieved here, so that a failure that no second caller waits for is not reported as unhandled.
        first.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._given[request_id] = first
        try:
            ids = await acquire()
        except SandboxdError as error:
            del self._given[request_id]
            first.set_exception(error)
            raise
        except BaseException:
            del self._given[request_id]
            first.cancel()
            raise
        first.set_result(Given(count, list(ids)))
        return ids

    def restore(self, request_id: str, count: int, sandbox_id: str) -> None:
        """One of `count` sandboxes that an earlier daemon gave to a request."""
        if request_id not in self._given:
            self._given[request_id] = asyncio.get_running_loop().create_future()
            self._given[request_id].set_result(Given(count))
        self._given[request_id].result().ids.append(sandbox_id)

    def whenever(self, request_id: str, act: Callable[[str], None]) -> None:
        """Acts on each sandbox of a request, once it has them; on none where it gets none."""

        def on(given: asyncio.Future[Given]) -> None:
            if not given.cancelled() and given.exception() is None:
                for sandbox_id in list(given.result().ids):
                    act(sandbox_id)

        given = self._given.get(request_id)
        if given is not None and given.done():
            on(given)
        elif given is not None:
            given.add_done_callback(on)

    def forget_ended(self, leased: Callable[[str], bool], request_id: str | None = None) -> None:
        """Forgets a request (None: every one) when none of its sandboxes is leased: its id is free again."""
        for name in list(self._given) if request_id is None else [request_id]:
            given = self._given.get(name)
            if given is not None and given.done() and not any(map(leased, given.result().ids)):
                del self._given[name]
