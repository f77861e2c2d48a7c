"""How long a client waits for the next daemon: counted from the first failure of the call, by its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from sandboxd import errors
from sandboxd.clock import ManualClock
from sandboxd.patience import PAUSE_LIMIT_SECONDS, Patience

from .conftest import settle

pytestmark = pytest.mark.anyio


def away() -> AioRpcError:
    return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "nobody listens")


class Daemon:
    """One that is called at the clock's times, which it notes; away unless told otherwise."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.there, self.lasts = clock, True, 0.0
        self.times: list[float] = []

    async def call(self) -> str:
        self.times.append(self.clock.now())
        if self.lasts:
            await self.clock.sleep(self.lasts)
        if not self.there:
            raise away()
        return "reply"


async def met(clock: ManualClock, seconds: float) -> tuple[Patience, Daemon]:
    patience, daemon = Patience(seconds, clock), Daemon(clock)
    assert await patience.call(daemon.call) == "reply"
    daemon.there = False
    daemon.times.clear()
    return patience, daemon


async def advanced(clock: ManualClock, ends: Awaitable[object], step: float = 0.01) -> None:
    """Moves the clock until it has ended."""
    waited = asyncio.ensure_future(ends)
    async with asyncio.timeout(20):
        while not waited.done():
            await settle()
            if not waited.done():
                clock.advance(step)
    await asyncio.wait([waited])


async def test_it_counts_from_the_first_failure_and_the_last_attempt_begins_at_its_end(
    clock: ManualClock,
) -> None:
    patience, daemon = await met(clock, 5.0)
    clock.advance(1000.0)
    call = asyncio.ensure_future(patience.call(daemon.call))
    await advanced(clock, asyncio.wait([call]))
    with pytest.raises(errors.BackendUnavailable, match="nobody listens"):
        await call
    # At once, then after pauses; the clock moves in steps of 0.01 s.
    assert daemon.times[:2] == [1000.0, 1000.0]
    assert daemon.times[-1] == pytest.approx(1005.0, abs=0.011)
    pauses = [later - earlier for earlier, later in zip(daemon.times, daemon.times[1:], strict=False)]
    assert max(pauses) <= PAUSE_LIMIT_SECONDS + 0.011


async def test_what_the_attempts_themselves_take_counts(clock: ManualClock) -> None:
    patience, daemon = await met(clock, 5.0)
    daemon.lasts = 2.0
    call = asyncio.ensure_future(patience.call(daemon.call))
    await advanced(clock, asyncio.wait([call]))
    with pytest.raises(errors.BackendUnavailable):
        await call
    # The first fails at 2; what begins by 7 is not cut short.
    assert daemon.times[0] == 0.0
    assert daemon.times[1] == pytest.approx(2.0, abs=0.011)
    assert daemon.times[-1] <= 7.011
    assert clock.now() == pytest.approx(daemon.times[-1] + 2.0, abs=0.03)


@pytest.mark.parametrize(("seconds", "at_most"), [(0.0, 9.0), (9.0, 0.0)])
async def test_none_is_made_again_without_patience(
    clock: ManualClock, seconds: float, at_most: float
) -> None:
    patience, daemon = await met(clock, seconds)
    with pytest.raises(errors.BackendUnavailable):
        await patience.call(daemon.call, at_most=at_most)
    assert daemon.times == [0.0]


async def test_a_daemon_that_comes_back_is_found(clock: ManualClock) -> None:
    patience, daemon = await met(clock, 5.0)
    call = asyncio.ensure_future(patience.call(daemon.call))
    await settle()
    clock.advance(4.0)
    await settle()
    assert not call.done()
    daemon.there = True
    await advanced(clock, asyncio.wait([call]))
    assert await call == "reply"
    assert clock.now() <= 5.0


async def test_a_daemon_that_was_never_there_is_not_waited_for(clock: ManualClock) -> None:
    daemon = Daemon(clock)
    daemon.there = False
    with pytest.raises(errors.BackendUnavailable):
        await Patience(5.0, clock).call(daemon.call)
    assert daemon.times == [0.0]


async def test_each_daemon_that_goes_away_under_a_call_is_waited_for(clock: ManualClock) -> None:
    """A command of an hour, whose daemon is restarted every ten minutes."""
    patience, daemon = await met(clock, 5.0)
    said = iter([True, True, False])
    daemon.lasts = 600.0
    call = asyncio.ensure_future(patience.call(daemon.call, answered=lambda: next(said)))
    await advanced(clock, asyncio.wait([call]), step=1.0)
    with pytest.raises(errors.BackendUnavailable):
        await call
    # The first, the one after it, which heard, and one more, which did not.
    assert len(daemon.times) == 3
