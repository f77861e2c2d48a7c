"""Process groups without a network: a sender and receivers that wait for one another as NCCL's members do."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.generators.broadcast import Rendezvous, SenderFailed


@dataclass
class _Group:
    """`ranks` have joined it, of `size`; `taken` counts the broadcasts that each has entered."""

    size: int
    ranks: set[int] = field(default_factory=set)
    taken: Counter[int] = field(default_factory=Counter)
    broken: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, holds: Callable[[], bool]) -> bool:
        """Waits for all others; False when one of them is gone."""
        while not holds() and not self.broken:
            await self.changed.wait()
        return not self.broken

    async def broadcast(self, ranks: set[int]) -> bool:
        """Ends once all members are in it; False when one of them is gone."""
        self.taken.update(ranks)
        number = max(self.taken[rank] for rank in ranks)
        self.tell()
        return await self.until(lambda: all(self.taken[rank] >= number for rank in range(self.size)))

    def tell(self) -> None:
        """Wakes all who wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


class FakeNetwork:
    """Groups by the port where they meet; `made` are the sizes of those that were made, in order."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self._groups: dict[int, _Group] = {}
        self._known: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    def found(self, meeting: Rendezvous) -> _Group:
        """A new group, of which so far only the sender knows."""
        group = self._groups[meeting.port] = _Group(meeting.size)
        self._known[meeting.port].set()
        return group

    async def find(self, port: int) -> _Group:
        """The group that meets there, once the sender waits there."""
        await self._known[port].wait()
        return self._groups[port]


class FakeSender:
    """Rank 0. `sent` are the versions that all receivers took. `failing_opens` fail, one after the other."""

    def __init__(self, network: FakeNetwork) -> None:
        self.sent: list[int] = []
        self.failing_opens = 0
        self._network = network
        self._group: _Group | None = None

    @property
    def joined(self) -> bool:
        return self._group is not None and not self._group.broken

    async def open(self, meeting: Rendezvous) -> None:
        group = self._group = self._network.found(meeting)
        if self.failing_opens:
            self.failing_opens -= 1
            raise SenderFailed("the fake sender was told to fail")
        group.ranks.add(0)
        group.tell()
        if not await group.until(lambda: len(group.ranks) == group.size):
            raise SenderFailed("the group was given up")
        self._network.made.append(group.size)

    async def send(self, path: Path, version: int) -> None:
        group = self._group
        if group is None or group.broken:
            raise SenderFailed("there is no group")
        if not await group.broadcast({0}):
            raise SenderFailed(f"the group broke under {path}")
        self.sent.append(version)

    async def close(self) -> None:
        if self._group is not None:
            self._group.broken = True
            self._group.tell()
            self._group = None


class FakeReceiver:
    """A server's workers. `parse_init` and `parse_update` raise ValueError for what vLLM would not take."""

    def __init__(
        self,
        network: FakeNetwork,
        workers: int,
        parse_init: Callable[[dict[str, Any]], Any],
        parse_update: Callable[[dict[str, Any]], Any],
    ) -> None:
        self._network = network
        self._workers = workers
        self._parse_init = parse_init
        self._parse_update = parse_update
        self._group: _Group | None = None
        self._ranks: set[int] = set()

    async def join(self, init_info: dict[str, Any]) -> bool:
        info = self._parse_init(init_info)
        group = await self._network.find(info.master_port)
        self._ranks = set(range(info.rank_offset, info.rank_offset + self._workers))
        if self._ranks & group.ranks or info.world_size != group.size or max(self._ranks) >= group.size:
            return False
        self._group = group
        group.ranks |= self._ranks
        group.tell()
        return await group.until(lambda: len(group.ranks) == group.size)

    async def receive(self, update_info: dict[str, Any]) -> bool:
        self._parse_update(update_info)
        group = self._group
        if group is None or group.broken:
            return False
        return await group.broadcast(self._ranks)

    async def leave(self) -> bool:
        self._group = None
        return True
