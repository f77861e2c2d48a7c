"""Weights over the network: one sender, and all servers of an update in one process group with it.

A *round* brings one version to some servers at once. They say which they are, the group is made anew unless
it is theirs already, each pauses its server, and when all have, the sender broadcasts while each server's
own call takes the weights in:

    all here ─▶ group (`/init_weight_transfer_engine`, rank offsets) ─▶ pause ─▶ all paused ─▶ send ∥ update

The sender is rank 0 and vLLM's workers follow, server by server. A server that fails before the weights
change costs the others nothing but another round without it. One that fails while they travel breaks the
group, for a broadcast needs all its members: what the others hold is then as unknown as what it holds, unless
they had everything. The group is made anew for the next round in any case.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl.generator import GeneratorDead, UpdateFailed
from rl.generators.calls import Calls, Refused
from rl.segment import open_segment

BUFFER_BYTES = 256 << 20
"""Of one broadcast. A server holds two such buffers while it takes weights in; vLLM's own default is four
times as large, and a network is kept busy by less."""

BUFFERS = 2

GRACE_SECONDS = 2.0
"""When a group could not be made, the sender lets go, and those who waited for others say so by then."""


class SenderFailed(RuntimeError):
    """The sender could not make a group, or not send to it; it has left the group."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of a process group meet; `size` counts the sender, whose rank is 0."""

    address: str
    port: int
    size: int


class Sender(Protocol):
    """Rank 0 of the group."""

    @property
    def joined(self) -> bool:
        """Whether it is in the group that it made last."""
        ...

    async def open(self, meeting: Rendezvous) -> None:
        """Makes a group and waits until all have joined. Raises SenderFailed."""
        ...

    async def send(self, path: Path, version: int) -> None:
        """Broadcasts the version that the segment `path` holds, in its order. Raises SenderFailed."""
        ...

    async def close(self) -> None:
        """Leaves the group, in the middle of `open` or `send` too."""
        ...


class _Round:
    """One version and the servers that it goes to."""

    def __init__(self, expected: Iterable[Calls], path: Path | None, version: int) -> None:
        self.path = path
        self.version = version
        self.expected = set(expected)
        self.here: list[Calls] = []
        self.paused: set[Calls] = set()
        self.failed: set[Calls] = set()
        self.left: set[Calls] = set()
        self.guilty: dict[Calls, str] = {}
        self.fault: str | None = None
        self.has_group = self.goes = False
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Wakes all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something is so."""
        while not holds():
            await self._changed.wait()

    async def reach(self, calls: Calls, holds: Callable[[], bool]) -> None:
        """Waits until something is so. Raises UpdateFailed, or GeneratorDead, when it will not be."""
        await self.until(lambda: holds() or self.fault is not None)
        if calls in self.guilty:
            raise GeneratorDead(f"{calls.url} did not join: {self.guilty[calls]}")
        if self.fault is not None and not holds():
            raise UpdateFailed(f"{calls.url} did not take part in weights {self.version}: {self.fault}")

    def leave(self, calls: Calls, *, failed: bool) -> None:
        """A member has its weights, or will not get them."""
        self.expected.discard(calls)
        if calls in self.here:
            self.left.add(calls)
            if failed:
                self.failed.add(calls)
        self.tell()


class Broadcast:
    """A channel for several servers. `address` is where they find the sender, on this host; `seconds` bounds
    each part of a round. Made by `open_broadcast`."""

    def __init__(self, sender: Sender, address: str, seconds: float) -> None:
        self._sender = sender
        self._address = address
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._group: tuple[Calls, ...] = ()
        self._rounds: list[_Round] = []

    def announce(self, members: Sequence[Calls], version: int) -> None:
        """These servers will ask for this version, each by itself, and are to get it together."""
        if members:
            self._rounds.append(_Round(members, None, version))

    def forget(self, calls: Calls) -> None:
        """It is not waited for any longer, and the group that it was in is no more."""
        for round_ in self._rounds:
            round_.leave(calls, failed=True)
        self._rounds = [each for each in self._rounds if each.expected or each.here]

    @asynccontextmanager
    async def delivery(self, calls: Calls, path: Path, version: int) -> AsyncIterator[_Part]:
        round_ = self._join(calls, path, version)
        try:
            await round_.reach(calls, lambda: round_.has_group)
            yield _Part(round_, calls)
        except BaseException:
            round_.leave(calls, failed=True)
            raise
        round_.leave(calls, failed=False)

    async def close(self) -> None:
        """Ends what is under way; for whoever opened it."""
        tasks = [each.task for each in self._rounds if each.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._sender.close()

    def _join(self, calls: Calls, path: Path, version: int) -> _Round:
        """The round that this server was announced for, or one for it alone."""
        fitting = [each for each in self._rounds if calls in each.expected and each.version == version]
        round_ = fitting[0] if fitting else _Round([calls], path, version)
        if not fitting:
            self._rounds.append(round_)
        round_.path = path
        round_.expected.discard(calls)
        round_.here.append(calls)
        if round_.task is None:
            round_.task = asyncio.create_task(self._run(round_), name=f"weights {version}")
        round_.tell()
        return round_

    async def _run(self, round_: _Round) -> None:
        """From the first member's arrival until the last one has left."""
        try:
            async with self._turn:
                await self._gather(round_)
                await self._assemble(round_)
                await self._pass_on(round_)
                await round_.until(lambda: set(round_.here) <= round_.left)
                if round_.failed:
                    await self._disband()
        except SenderFailed as error:
            round_.fault = str(error)
        except OSError as error:
            round_.fault = f"nobody can meet at {self._address}, generator.address: {error.strerror}"
        finally:
            round_.fault = round_.fault or "it was broken off"
            if round_ in self._rounds:
                self._rounds.remove(round_)
            round_.tell()

    async def _gather(self, round_: _Round) -> None:
        """Waits for those announced; who has not come in time is left out."""
        try:
            async with asyncio.timeout(self._seconds):
                await round_.until(lambda: not round_.expected)
        except TimeoutError:
            round_.expected.clear()

    async def _assemble(self, round_: _Round) -> None:
        """Makes the group of those who are here, if it is not theirs yet. Raises SenderFailed."""
        members = tuple(each for each in round_.here if each not in round_.left)
        if not members:
            raise SenderFailed("no server is left")
        if set(members) != set(self._group) or not self._sender.joined:
            await self._disband()
            try:
                offsets, size = await self._ranks(round_, members)
                meeting = Rendezvous(self._address, free_port(self._address), size)
                await self._meet(round_, meeting, offsets)
            except SenderFailed:
                await self._sender.close()
                raise
            self._group = members
        round_.has_group = True
        round_.tell()

    async def _ranks(self, round_: _Round, members: Sequence[Calls]) -> tuple[dict[Calls, int], int]:
        """Each server's first rank, and the size of the group. A server may have any number of workers."""

        async def ask(calls: Calls) -> int:
            return int((await calls.persist("GET", "/get_world_size"))["world_size"])

        sizes = await self._all(round_, {calls: ask(calls) for calls in members})
        offsets, size = {}, 1
        for calls in members:
            offsets[calls], size = size, size + sizes[calls]
        return offsets, size

    async def _meet(self, round_: _Round, meeting: Rendezvous, offsets: dict[Calls, int]) -> None:
        """The servers' workers and the sender wait for one another."""

        async def invite(calls: Calls, offset: int) -> None:
            info = {
                "master_address": meeting.address,
                "master_port": meeting.port,
                "rank_offset": offset,
                "world_size": meeting.size,
                "packed": True,
                "packed_buffer_size_bytes": BUFFER_BYTES,
                "packed_num_buffers": BUFFERS,
            }
            await _dismiss(calls)
            # Not repeated: what did not join this group would meet nobody in it.
            await calls.call("POST", "/init_weight_transfer_engine", {"init_info": info})

        opening = _begin(self._sender.open(meeting))
        try:
            invited = {calls: invite(calls, offset) for calls, offset in offsets.items()}
            await self._all(round_, invited, opening)
        finally:
            opening.cancel()
            await asyncio.wait((opening,))

    async def _all(
        self,
        round_: _Round,
        asked: dict[Calls, Coroutine[Any, Any, Any]],
        beside: asyncio.Task[None] | None = None,
    ) -> dict[Calls, Any]:
        """What the servers answer. Raises SenderFailed at the first failure; who failed, or still does not
        answer when the sender has let go, is guilty of it."""
        tasks = {calls: _begin(_refusal(each)) for calls, each in asked.items()}
        waiting: set[asyncio.Task[Any]] = {*tasks.values()} | ({beside} if beside else set())
        try:
            done, pending = await asyncio.wait(
                waiting, timeout=self._seconds, return_when=asyncio.FIRST_EXCEPTION
            )
            failures = {task: str(task.exception()) for task in done if task.exception() is not None}
            if not failures and not pending:
                return {calls: task.result() for calls, task in tasks.items()}
            late = f"no answer within {self._seconds:g} s"
            round_.guilty = {calls: failures[task] for calls, task in tasks.items() if task in failures}
            await self._sender.close()
            if pending:
                await asyncio.wait(pending, timeout=GRACE_SECONDS)
            round_.guilty |= {calls: late for calls, task in tasks.items() if not task.done()}
            raise SenderFailed(f"no group could be made: {next(iter(failures.values()), late)}")
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.wait(tasks.values())

    async def _pass_on(self, round_: _Round) -> None:
        """Sends once all are paused. Raises SenderFailed, before anything was sent."""
        await round_.until(lambda: bool(round_.failed) or round_.paused >= set(round_.here) - round_.left)
        if round_.failed:
            await self._disband()
            raise SenderFailed("a server of the group fell out before the weights were sent")
        round_.goes = True
        round_.tell()
        assert round_.path is not None
        sending = _begin(self._sender.send(round_.path, round_.version))
        falling_out = asyncio.create_task(round_.until(lambda: bool(round_.failed)))
        try:
            await asyncio.wait(
                (sending, falling_out), timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not sending.done() or sending.exception() is not None:
                await self._disband()
        finally:
            for task in (sending, falling_out):
                task.cancel()
            await asyncio.wait((sending, falling_out))

    async def _disband(self) -> None:
        """The sender leaves, and whoever waits in the group finds out."""
        self._group = ()
        await self._sender.close()


class _Part:
    """A server's part in a round."""

    def __init__(self, round_: _Round, calls: Calls) -> None:
        self._round = round_
        self._calls = calls

    async def begin(self) -> dict[str, Any]:
        """Waits until all servers are paused. Raises UpdateFailed when one of them will not be."""
        round_ = self._round
        round_.paused.add(self._calls)
        round_.tell()
        await round_.reach(self._calls, lambda: round_.goes)
        assert round_.path is not None
        return await asyncio.to_thread(update_info, round_.path)


async def _dismiss(calls: Calls) -> None:
    """A group that a server had, with this sender or with the one of a run before, would keep its memory.

    If it does not let go, the next one replaces it all the same.
    """
    with suppress(Refused):
        await calls.call("POST", "/shutdown_weight_transfer_engine", None, GRACE_SECONDS)


async def _refusal(asked: Coroutine[Any, Any, Any]) -> Any:
    """What a server answers; SenderFailed when it refuses."""
    try:
        return await asked
    except Refused as error:
        raise SenderFailed(str(error)) from error


def _begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task whose failure counts as heard of: another's may have ended the round before it."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


def update_info(path: Path) -> dict[str, Any]:
    """What a segment holds, as vLLM's update is told of it. Raises NotInSegment."""
    segment = open_segment(path)
    try:
        places = segment.places.values()
        return {
            "names": [place.name for place in places],
            "dtype_names": [place.dtype for place in places],
            "shapes": [list(place.shape) for place in places],
        }
    finally:
        segment.close()


def free_port(address: str) -> int:
    """A port of this host where nobody listens now."""
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def open_broadcast(sender: Sender, address: str, seconds: float = 60.0) -> AsyncIterator[Broadcast]:
    """A broadcast for the length of the block; no round outlives it."""
    broadcast = Broadcast(sender, address, seconds)
    try:
        yield broadcast
    finally:
        await broadcast.close()
