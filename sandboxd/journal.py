"""What outlives a killed daemon: the ready sandboxes, who holds them, how leases ended, what was counted.

A change is noted when it is decided and written by `commit`, before anybody hears of it: a client knows of no
lease that the next daemon would not know of. What exists without being noted is nobody's, and is destroyed.

Written for a kill, not for a power cut, which no sandbox outlives either: nothing waits for the disk, and a
journal of another boot is thrown away.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

from sandboxd.ledger import Totals
from sandboxd.types import Template

# Ended leases are remembered so that a late call hears LEASE_EXPIRED or SANDBOX_LOST, not NOT_FOUND.
REMEMBERED_ENDINGS = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A ready sandbox. Times are of the monotonic clock, which goes on while no daemon runs.

    `expiry` is None while nobody holds it. `made_from` tells one template from another; `image` and
    `branches` are a fork's own. `gang` says how many its request was given, `uses` how often it was leased.
    `origin` is the pool's template when it was made; None where an older daemon wrote the journal.
    """

    id: str
    created: float
    made_from: str
    expiry: float | None = None
    ttl: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    gang: int = 1
    uses: int = 0
    image: str | None = None
    branches: tuple[str, ...] = ()
    origin: Template | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sandbox is no longer its holder's: the name of an error class, and what it says."""

    id: str
    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Past:
    """All that a journal knows of one pool; endings are the oldest first."""

    entries: list[Entry] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)


class Journal(Protocol):
    """Of one pool. `keep`, `forget` and `ended` note; `commit` writes what was noted, all of it or nothing.

    None of them raises: a pool goes on without a journal that cannot be written, and says so.
    """

    def past(self) -> Past:
        """What the last daemon committed."""
        ...

    def keep(self, entry: Entry) -> None:
        """The sandbox is ready, or its lease has changed."""
        ...

    def forget(self, sandbox_id: str) -> None:
        """The sandbox is to be destroyed."""
        ...

    def ended(self, ending: Ending) -> None:
        """What whoever still asks for it is to be told."""
        ...

    def commit(self, totals: Totals) -> None:
        """Nothing to do when nothing was noted."""
        ...


class MemoryJournal:
    """Forgets with its process: for pools that nobody restarts, and to play a restart with."""

    def __init__(self) -> None:
        self.committed = Past()
        self._noted: list[Entry | Ending | str] = []

    def past(self) -> Past:
        self._noted = []
        return dataclasses.replace(self.committed, totals=dataclasses.replace(self.committed.totals))

    def keep(self, entry: Entry) -> None:
        self._noted.append(entry)

    def forget(self, sandbox_id: str) -> None:
        self._noted.append(sandbox_id)

    def ended(self, ending: Ending) -> None:
        self._noted.append(ending)

    def commit(self, totals: Totals) -> None:
        entries = {entry.id: entry for entry in self.committed.entries}
        endings = list(self.committed.endings)
        for noted in self._noted:
            match noted:
                case Entry():
                    entries[noted.id] = noted
                case Ending():
                    endings.append(noted)
                case _:
                    entries.pop(noted, None)
        self._noted = []
        self.committed = Past(
            list(entries.values()), endings[-REMEMBERED_ENDINGS:], dataclasses.replace(totals)
        )
