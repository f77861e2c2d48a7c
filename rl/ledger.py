"""Accounts for every episode and every sampled token: trained, discarded with a reason, left over, evaluated.

Tokens are counted twice, independently: where the generator hands them out (`MeteredGenerator`) and
where an episode meets its fate (`Ledger.settle`). At the end of a run the two must agree exactly.
"""

from __future__ import annotations

import contextvars
import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.errors import LedgerError
from rl.generator import Generation, Generator, GeneratorStats, Sampling
from rl.types import TokenIds


class Fate(enum.StrEnum):
    """What became of an episode in the end."""

    TRAINED = "trained"
    DISCARDED = "discarded"
    LEFT_OVER = "left_over"
    EVALUATED = "evaluated"


@dataclass(slots=True, eq=False)
class Account:
    """One episode's tokens so far, as the generator handed them out."""

    tokens: int = 0


_current: contextvars.ContextVar[Account] = contextvars.ContextVar("account")


@dataclass(slots=True)
class Column:
    """One unit's (episodes' or tokens') totals."""

    generated: int = 0
    fates: Counter[Fate] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def settle(self, fate: Fate, reason: str, amount: int) -> None:
        self.fates[fate] += amount
        if fate is Fate.DISCARDED:
            self.reasons[reason] += amount

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        return {
            "generated": self.generated,
            "trained": self.fates[Fate.TRAINED],
            "discarded": dict(sorted(self.reasons.items())),
            "left_over": self.fates[Fate.LEFT_OVER],
            "evaluated": self.fates[Fate.EVALUATED],
        }

    @property
    def missing(self) -> int:
        return self.generated - self.fates.total()

    def move(self, reason: str, amount: int, *, to: Fate) -> None:
        """Enters as another fate what counts as left over."""
        self.fates[Fate.LEFT_OVER] -= amount
        self.settle(to, reason, amount)

    def state_dict(self) -> dict[str, Any]:
        return {"generated": self.generated, "fates": dict(self.fates), "reasons": dict(self.reasons)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Column:
        fates = Counter({Fate(name): count for name, count in state["fates"].items()})
        return cls(state["generated"], fates, Counter(state["reasons"]))


class Ledger:
    """The books of one run."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """With `state`, what `state_dict` returned, the books go on from there."""
        self.episodes = Column.from_state(state["episodes"]) if state else Column()
        self.tokens = Column.from_state(state["tokens"]) if state else Column()
        self._open: set[Account] = set()

    def open(self) -> Account:
        """Opens the account of an episode and makes it the current one of this asyncio task."""
        account = Account()
        self._open.add(account)
        self.episodes.generated += 1
        _current.set(account)
        return account

    def meter(self, count: int) -> None:
        """The generator handed out `count` tokens to the current episode."""
        self.tokens.generated += count
        _current.get().tokens += count

    def settle(self, account: Account, fate: Fate, reason: str = "") -> None:
        """Closes the account. Raises LedgerError when it is closed already."""
        if account not in self._open:
            raise LedgerError(f"an episode was settled twice, the second time as {fate} {reason}")
        self._open.remove(account)
        self.episodes.settle(fate, reason, 1)
        self.tokens.settle(fate, reason, account.tokens)

    def withdraw_tokens(self, count: int, reason: str) -> None:
        """Moves `count` tokens of trained episodes to the discarded: the loss left them out."""
        self.tokens.fates[Fate.TRAINED] -= count
        self.tokens.settle(Fate.DISCARDED, reason, count)

    def settle_open(self) -> int:
        """Closes what is still open at the end of a run as left over; returns how many there were."""
        remaining = len(self._open)
        for account in tuple(self._open):
            self.settle(account, Fate.LEFT_OVER)
        return remaining

    def state_dict(self, settled: Iterable[tuple[Account, Fate, str]] = ()) -> dict[str, Any]:
        """The books for a checkpoint, in which what is still open counts as left over, for a resumed run
        plays it again. But `settled` are accounts whose fate is known already, though not yet entered.
        """
        episodes, tokens = (Column.from_state(column.state_dict()) for column in (self.episodes, self.tokens))
        for account in self._open:
            episodes.settle(Fate.LEFT_OVER, "", 1)
            tokens.settle(Fate.LEFT_OVER, "", account.tokens)
        for account, fate, reason in settled:
            episodes.move(reason, 1, to=fate)
            tokens.move(reason, account.tokens, to=fate)
        return {"episodes": episodes.state_dict(), "tokens": tokens.state_dict()}

    def check(self) -> None:
        """Raises LedgerError unless generated = trained + discarded + left over + evaluated, twice."""
        for unit, column in (("episodes", self.episodes), ("tokens", self.tokens)):
            if column.missing:
                raise LedgerError(f"{column.missing} {unit} are unaccounted for: {column.as_dict()}")


class MeteredGenerator:
    """A generator whose tokens are entered in the ledger as they are handed out.

    Every token of the loop passes here, so `generate` raises ValueError for draws that may not be trained on.
    """

    def __init__(self, inner: Generator, ledger: Ledger) -> None:
        self.ledger = ledger
        self._inner = inner

    @property
    def version(self) -> int:
        return self._inner.version

    async def generate(self, context_ids: TokenIds, sampling: Sampling) -> Generation:
        sampling.check_trainable()
        generation = await self._inner.generate(context_ids, sampling)
        self.ledger.meter(len(generation.ids))
        return generation

    async def update_weights(self, path: Path, version: int) -> None:
        await self._inner.update_weights(path, version)

    def stats(self) -> GeneratorStats:
        return self._inner.stats()
