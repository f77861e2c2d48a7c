"""What the page's tests share: a port to serve on, and what the stream of events says."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp

# Below those that the kernel gives to whoever asks for any port: it stays free while a daemon restarts.
_PORTS = itertools.cycle(range(20_000 + os.getpid() % 100 * 100, 30_000))

# A message is one line, whatever the daemon has to tell.
LONGEST_BYTES = 64 << 20


def free_port() -> int:
    """A port of this process's own, as far as can be seen."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports never end")


class State:
    """What a page knows after the messages that it was told."""

    def __init__(self) -> None:
        self.rows: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self.points: dict[str, list[Any]] = {}
        self.messages = 0
        self.begin: dict[str, Any] = {}

    def take(self, message: dict[str, Any]) -> None:
        self.messages += 1
        self.begin = message.pop("begin", self.begin)
        for pool, points in message.pop("points", {}).items():
            self.points.setdefault(pool, []).extend(points)
        for section, change in message.items():
            if isinstance(change, dict):
                rows = self.rows[section]
                rows.update(change.get("set", {}))
                for key in change.get("gone", ()):
                    del rows[key]


@contextlib.asynccontextmanager
async def stream(session: aiohttp.ClientSession) -> AsyncIterator[AsyncIterator[State]]:
    """What is known after each message of `/events`."""
    async with session.get("/events", read_bufsize=LONGEST_BYTES) as reply:
        assert reply.status == 200

        async def states() -> AsyncGenerator[State, None]:
            state = State()
            async for line in reply.content:
                if line.startswith(b"data: "):
                    state.take(json.loads(line[6:]))
                    yield state

        async with contextlib.aclosing(states()) as told:
            yield told
