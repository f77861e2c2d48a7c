"""What a leased sandbox offers to an episode, and where one comes from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class ExecResult(Protocol):
    """How one command ended. `reason` is EXITED, SIGNALED, TIMED_OUT, OOM_KILLED, …"""

    @property
    def reason(self) -> str: ...

    @property
    def exit_code(self) -> int | None: ...

    @property
    def stdout(self) -> bytes: ...

    @property
    def stderr(self) -> bytes: ...


class Box(Protocol):
    """A leased sandbox. Relative paths start where its commands start. `timeout` in seconds, `output_limit`
    in bytes. Every call may raise SandboxdError; the file calls raise FileNotFound where nothing is."""

    async def exec(self, argv: Sequence[str], *, timeout: float, output_limit: int) -> ExecResult: ...

    async def read_file(self, path: str) -> bytes: ...

    async def write_file(self, path: str, data: bytes) -> int: ...


class Sandboxes(Protocol):
    """Where sandboxes come from; leaving the context releases the lease."""

    def acquire(self) -> AbstractAsyncContextManager[Box]: ...
