"""Why sandboxes are no longer their holders', for whoever still asks."""

from __future__ import annotations

from collections import OrderedDict

from sandboxd.errors import LeaseExpired, SandboxdError, SandboxLost, SandboxNotFound
from sandboxd.journal import REMEMBERED_ENDINGS, Ending

CLASSES: dict[str, type[SandboxdError]] = {error.reason: error for error in (LeaseExpired, SandboxLost)}
# Names alone: what was released is NOT_FOUND when it is forgotten, too, in other words.
REMEMBERED_RELEASES = 4_000


class Endings:
    """The latest of one pool. Releases, which are the most, do not push out what a holder must hear of.

    Kept small: 300 bytes for an ending, 130 for a release; an exception would be twice that.
    """

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Ending] = OrderedDict()
        self._released: OrderedDict[str, None] = OrderedDict()

    def remember(self, ending: Ending) -> None:
        """This is what whoever asks for the sandbox is to hear. `ending.reason` is one of `CLASSES`."""
        self._by_id[ending.id] = ending
        if len(self._by_id) > REMEMBERED_ENDINGS:
            self._by_id.popitem(last=False)

    def released(self, sandbox_id: str) -> None:
        """Its holder has given it back."""
        self._released[sandbox_id] = None
        if len(self._released) > REMEMBERED_RELEASES:
            self._released.popitem(last=False)

    def of(self, sandbox_id: str) -> SandboxdError | None:
        """What is remembered, to be raised: a new exception, which carries the traceback of who raises it."""
        ending = self._by_id.get(sandbox_id)
        if ending is not None:
            return CLASSES[ending.reason](ending.message, metadata=ending.metadata)
        if sandbox_id in self._released:
            return SandboxNotFound(f"sandbox {sandbox_id!r} was released")
        return None


def again(error: SandboxdError) -> SandboxdError:
    """The same for one more caller: an exception carries the traceback of who raised it."""
    return type(error)(error.message, retry_after=error.retry_after, metadata=error.metadata)
