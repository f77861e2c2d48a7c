"""Who hears of what becomes of a pool's sandboxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sandboxd.errors import SandboxdError, SandboxLost
from sandboxd.leases import Lease
from sandboxd.sandbox import Sandbox


class Listener(Protocol):
    """Who waits for sandboxes. All methods are synchronous: the ledger has already moved on."""

    def granted(self, ticket: int, sandboxes: Sequence[Sandbox]) -> None: ...

    def forked(self, sandbox: Sandbox, lease: Lease) -> None: ...

    def refused(self, ticket: int, error: SandboxdError) -> None: ...

    def died(self, sandbox: Sandbox, error: SandboxLost) -> None:
        """A leased sandbox ended by itself."""
        ...
