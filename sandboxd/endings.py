"""Why sandboxes are no longer their holders', for whoever still asks."""

from __future__ import annotations

from collections import OrderedDict

from sandboxd.errors import LeaseExpired, SandboxdError, SandboxLost
from sandboxd.journal import REMEMBERED_ENDINGS, Ending

CLASSES: dict[str, type[SandboxdError]] = {error.reason: error for error in (LeaseExpired, SandboxLost)}


class Endings:
    """The latest of one pool."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, SandboxdError] = OrderedDict()

    def remember(self, sandbox_id: str, ending: SandboxdError) -> None:
        """This is what whoever asks for it is to hear."""
        self._by_id[sandbox_id] = ending
        if len(self._by_id) > REMEMBERED_ENDINGS:
            self._by_id.popitem(last=False)

    def restore(self, ending: Ending) -> None:
        """One that an earlier daemon has noted."""
        error = CLASSES[ending.reason](ending.message, metadata=ending.metadata)
        self.remember(ending.id, error)

    def of(self, sandbox_id: str) -> SandboxdError | None:
        """What is remembered, to be raised."""
        ending = self._by_id.get(sandbox_id)
        return None if ending is None else again(ending)


def again(error: SandboxdError) -> SandboxdError:
    """The same for one more caller: an exception carries the traceback of who raised it."""
    return type(error)(error.message, retry_after=error.retry_after, metadata=error.metadata)
