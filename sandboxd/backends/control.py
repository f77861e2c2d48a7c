"""A daemon's control connection, as the launcher hears it: a request a line, and each fails alone."""

from __future__ import annotations

import json
import sys as python

from sandboxd.backends.line_socket import Lines

# What a request that makes no sense, or one that meets a full host, may raise.
FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any, Protocol

    from sandboxd.backends.loop import Loop

    Reply = Callable[[dict[str, Any]], None]

    class Asked(Protocol):
        """Who answers, see `launcher.Launcher`."""

        def greeted_by(self, daemon: Daemon) -> bool: ...
        def is_anothers(self, daemon: Daemon) -> bool: ...
        def asked(self, message: dict[str, Any], reply: Reply) -> None: ...
        def left(self, daemon: Daemon) -> None: ...


class Daemon:
    """One control connection."""

    def __init__(self, asked: Asked, loop: Loop, sock: socket.socket) -> None:
        self._asked = asked
        self._lines = Lines(loop, sock, self._heard, lambda: asked.left(self))

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message; a daemon that is gone misses it."""
        self._lines.send(json.dumps(message).encode())

    def _heard(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            answer = self._answer(message["n"])
        except FAULTS:
            python.excepthook(*python.exc_info())
            self.dismiss()  # Nothing could be answered.
            return
        try:
            if message["do"] == "hello" and not self._asked.greeted_by(self):
                self.dismiss()
                return
            if message["do"] == "close" and self._asked.is_anothers(self):
                answer({"taken": True})
                return
            self._asked.asked(message, answer)
        except FAULTS as error:
            python.excepthook(*python.exc_info())
            answer({"error": f"the launcher failed at this request: {error!r}"[:4096]})

    def dismiss(self) -> None:
        """Hears no more of it: what it asked for and was not read yet is not done."""
        self._lines.close()

    def _answer(self, number: int) -> Reply:
        return lambda reply: self.send({**reply, "n": number})
