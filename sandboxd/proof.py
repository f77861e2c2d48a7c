"""The proof that a used sandbox was made as new: what a new one shows, and what was planted in the old one.

A reset is believed only if the sandbox then shows what the first new one of its pool showed (`portrait`), and
nothing of what was put into it just before. Any difference is an error, and the sandbox is not used again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator

from sandboxd.backends.base import Backend, Connection
from sandboxd.clock import Clock
from sandboxd.errors import FileFailed, FileNotFound, Phase, SandboxdError, StartFailed
from sandboxd.portrait import Portrait, differences, portray
from sandboxd.sandbox import Sandbox
from sandboxd.starting import Starter
from sandboxd.types import Template

logger = logging.getLogger(__name__)

PROOF_SECONDS = 10.0
CANARY_PLACES = (b"", b"/tmp", b"/var/tmp", b"/dev/shm")


class Proof:
    """Of one pool; `starter` sets its sandboxes up."""

    def __init__(self, backend: Backend, template: Template, starter: Starter, clock: Clock) -> None:
        self._backend = backend
        self.template = template
        self._starter = starter
        self._clock = clock
        self._new: Portrait | None = None

    @property
    def possible(self) -> bool:
        """Whether it is known what a new one looks like."""
        return self._new is not None

    async def look_at_new(self, sandbox_id: str, connection: Connection) -> None:
        """The first new sandbox of the pool says what all are to look like; where it cannot, none is reset.

        A cancelled call leaves nothing of the sandbox behind.
        """
        if self.possible:
            return
        try:
            async with self._clock.timeout(PROOF_SECONDS):
                self._new = await portray(connection, self.template)
        except (SandboxdError, TimeoutError) as error:
            logger.warning("pool %s: a new sandbox cannot be looked at: %s", self.template.name, error)
        except BaseException:
            await connection.close()
            await self._backend.destroy(sandbox_id)
            raise

    async def reset(self, old: Sandbox, new_id: str) -> Connection:
        """Returns the connection to what was `old` and is now as new. Raises StartFailed: it is not."""
        try:
            async with self._clock.timeout(self.template.start_timeout + PROOF_SECONDS):
                return await self._reset(old, new_id)
        except TimeoutError as error:
            raise _doubt("it took too long") from error
        except StartFailed as error:
            if error.phase is Phase.RESET:
                raise
            raise _doubt(error.message) from error
        except SandboxdError as error:
            raise _doubt(error.message) from error

    async def _reset(self, old: Sandbox, new_id: str) -> Connection:
        if old.connection is None or self._new is None:
            raise _doubt("nothing is known to compare it with")
        canaries = await _plant(old.connection, self.template)
        await old.connection.close()
        connection = await self._backend.reset(old.id, new_id, self.template)
        try:
            await self._starter.set_up(connection)
            await _check_gone(connection, canaries)
            differs = differences(self._new, await portray(connection, self.template))
            if differs:
                raise _doubt("; ".join(differs))
        except BaseException:
            await connection.close()
            raise
        return connection


async def _plant(connection: Connection, template: Template) -> list[bytes]:
    """Puts a file wherever one can be; returns where."""
    name, token = secrets.token_hex(8).encode(), secrets.token_bytes(16)

    async def content() -> AsyncIterator[bytes]:
        yield token

    planted = []
    for place in CANARY_PLACES:
        path = (place or template.cwd) + b"/.sandboxd-canary-" + name
        try:
            await connection.files.write(path, content(), 0o600)
        except (FileNotFound, FileFailed):
            continue
        planted.append(path)
    if not planted:
        raise _doubt("no file could be put into it, whose loss would show that it was reset")
    return planted


async def _check_gone(connection: Connection, canaries: list[bytes]) -> None:
    for path in canaries:
        try:
            await connection.files.stat(path)
        except FileNotFound:
            continue
        raise _doubt(f"{path.decode(errors='replace')} is still there")
    if known := await connection.commands.known():
        raise _doubt(f"it still knows the command {known[0].id!r}")


def _doubt(why: str) -> StartFailed:
    return StartFailed(f"the reset is in doubt: {why}", phase=Phase.RESET)
