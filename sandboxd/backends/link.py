"""The daemon's end of a launcher's control socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from sandboxd.backends.connection import BackendEnded
from sandboxd.errors import BackendUnavailable
from sandboxd.gate import Gate

# The launcher answers in milliseconds, after what was asked before; a copy takes as long as its files.
ASK_SECONDS, COPY_SECONDS = 30.0, 3600.0
DIED = "the launcher of the namespace sandboxes died"


class Link:
    """The control connection: requests with answers, and the losses that the launcher tells of."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        answer_seconds: float = ASK_SECONDS,
        listener: int = 0,
    ) -> None:
        """`listener` is the process that began to listen: the keeper, also where that has died since."""
        self.listener = listener
        self._answer_seconds = answer_seconds
        self._reader = reader
        self._writer = writer
        self._gate = Gate()
        self._count = 0
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.lost: dict[str, asyncio.Future[str]] = {}
        self.broken = ""
        self.task = asyncio.create_task(self._listen(), name="launcher link")

    async def ask(self, what: str, *, within: float | None = None, **arguments: object) -> dict[str, Any]:
        """The answer. Raises BackendUnavailable when the launcher is gone, or silent for so many seconds."""
        within = within or self._answer_seconds
        answer = self.order(what, **arguments)
        # Less than what a task's own timeout costs.
        timer = asyncio.get_running_loop().call_later(within, _give_up, answer, what, within)
        try:
            return await answer
        finally:
            timer.cancel()

    def order(self, what: str, **arguments: object) -> asyncio.Future[dict[str, Any]]:
        """What the launcher will answer, in the order of the orders. Raises BackendUnavailable."""
        if self._writer.is_closing() and not self.broken:
            # A write has failed, and the listener hears of it only in its next turn.
            self._break(DIED)
        if self.broken:
            raise BackendUnavailable(self.broken)
        self._count += 1
        answer = self._asked[self._count] = asyncio.get_running_loop().create_future()
        message = {"n": self._count, "do": what, **arguments}
        self._writer.write(json.dumps(message).encode() + b"\n")
        return answer

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                # What has come at once is there without waiting, and each answer wakes a sandbox's start.
                await self._gate.passed()
                self._heard(json.loads(line))
        except (OSError, ValueError):
            pass  # Also where it died in the midst of a line.
        finally:
            self._break(DIED)

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
                future.set_result(BackendEnded(why))
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(BackendUnavailable(why))
                answer.exception()  # Nobody may wait for it.

    async def close(self) -> None:
        """Lets go of the launcher, which lives on."""
        self._writer.close()  # Here: the task has perhaps not begun, and this may be cancelled.
        self.task.cancel()
        await asyncio.wait([self.task])


def _give_up(answer: asyncio.Future[dict[str, Any]], what: str, within: float) -> None:
    if not answer.done():
        words = f"the launcher of the namespace sandboxes gave no answer to {what!r} within {within:g} s"
        answer.set_exception(BackendUnavailable(words))
