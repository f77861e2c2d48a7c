"""Enters what became of each group: its episodes in the ledger, its task among those that are dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rl.buffer import Ready
from rl.checkpoint import LoopState
from rl.ledger import Account, Fate, Ledger
from rl.length_bias import LengthBias
from rl.metrics import fate_of
from rl.player import Played
from rl.types import Task


class Settling:
    """Of one run. `observed`: keys of unsettled tasks that the curriculum has heard about. `lengths`: of what
    was trained on and of what was given up for being late."""

    def __init__(self, ledger: Ledger, resumed: LoopState | None) -> None:
        self.observed = set(resumed.observed if resumed else ())
        self.dropped = dict(resumed.dropped if resumed else {})
        """Tasks that were dropped since they were last told, and why."""
        self.lengths = LengthBias(resumed.ledger.get("lengths") if resumed else None)
        self._ledger = ledger
        self._members: dict[int, list[Played]] = {}
        self._in_step: list[tuple[Account, Fate, str]] = []
        """What becomes of the episodes of the step under way when it succeeds."""

    def played(self, ticket: int, members: list[Played]) -> None:
        """A group has ended, and has not met its fate yet."""
        self._members[ticket] = members

    def begin_step(self, batch: Sequence[Ready], why_untrained: Callable[[Ready], str | None]) -> None:
        """These groups are being trained on; a checkpoint may find that done before the loop hears of it."""
        self._in_step = [
            (member.account, *fate_of(member, why_untrained(ready)))
            for ready in batch
            for member in self._members[ready.ticket]
        ]

    def settle(self, ticket: int, task: Task, reason: str | None) -> None:
        """Enters every member of a group in the ledger: trained (None), or dropped for `reason`."""
        self.observed.discard(task.key)
        if reason is not None:
            self.dropped[task.key] = reason
        for member in self._members.pop(ticket):
            fate, why = fate_of(member, reason)
            self.lengths.note(member.account.tokens, fate, why)
            self._ledger.settle(member.account, fate, why)

    def take_dropped(self) -> dict[str, str]:
        """Tasks that were dropped since the last call, and why."""
        dropped, self.dropped = self.dropped, {}
        return dropped

    def state_dict(self, *, ahead: bool) -> dict[str, Any]:
        """The books for a checkpoint; `ahead` when the step under way has succeeded."""
        in_step = self._in_step if ahead else []
        return self._ledger.state_dict(in_step) | {"lengths": self.lengths.state_dict(in_step)}

    def close(self) -> None:
        """The end of the loop: what is still open is left over."""
        self._members.clear()
        self._ledger.settle_open()
