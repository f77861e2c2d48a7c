"""Sandboxes that were announced: begun early enough, kept until they are taken, and no longer than said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd import errors
from sandboxd.announcements import (
    ANNOUNCEMENTS,
    LEAST_SECONDS,
    MARGIN,
    Announcement,
    Announcements,
    StartSpeed,
)
from sandboxd.backends.fake import FakeScript
from tests.sandboxd.conftest import daemon_process
from tests.sandboxd.test_cli import run

pytestmark = pytest.mark.anyio
OpenDaemon = Callable[..., Any]
OpenRig = Callable[..., Any]
SPEED = StartSpeed(per_second=10.0, usual=2.0)


def announced(*entries: tuple[int, float, float]) -> Announcements:
    announcements = Announcements()
    for n, (count, due, expiry) in enumerate(entries):
        announcements.add(Announcement(str(n), count, due, expiry))
    return announcements


def test_an_announcement_is_begun_by_the_measured_speed_and_ends() -> None:
    announcements = announced((100, 60.0, 90.0))
    begin = 60.0 - LEAST_SECONDS - MARGIN * (100 / 10 + 2.0)
    assert announcements.next_change(SPEED) == begin
    assert announcements.ready(begin - 0.01, SPEED) == 0
    assert announcements.ready(begin, SPEED) == 100
    # Once begun it stays begun, though starts have become faster.
    assert announcements.ready(begin, StartSpeed(1000.0, 0.1)) == 100
    assert announcements.next_change(SPEED) == 90.0
    assert announcements.ready(89.9, SPEED) == 100
    assert announcements.ready(90.0, SPEED) == 0
    assert announcements.next_change(SPEED) is None


def test_without_a_measured_speed_all_is_begun_at_once() -> None:
    assert announced((5, 1000.0, 1001.0)).ready(0.0, None) == 5


def test_two_announcements_share_the_speed() -> None:
    """Both are due at once: the one behind leaves the other only the time before its own starts."""
    alone = announced((100, 60.0, 90.0)).begin("0", SPEED)
    both = announced((100, 60.0, 90.0), (100, 60.0, 90.0))
    assert both.begin("1", SPEED) == alone
    assert both.begin("0", SPEED) == alone - MARGIN * 10


def test_what_is_asked_for_uses_up_what_has_begun() -> None:
    announcements = announced((10, 20.0, 99.0), (10, 30.0, 99.0))
    assert announcements.take(0.0, 3, SPEED) == 3
    assert announcements.take(29.0, 13, SPEED) == 0
    assert announcements.ready(29.0, SPEED) == 7
    assert announcements.take(29.0, 50, SPEED) == 43
    assert len(announcements) == 0


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=8))
def test_all_are_begun_in_time_for_their_starts(entries: list[tuple[int, float, float]]) -> None:
    """At no time are more due than starts of that speed can have made since they were begun."""
    announcements = announced(*((count, due, due + grace) for count, due, grace in entries))
    begins = [(announcements.begin(str(n), SPEED), *entry) for n, entry in enumerate(entries)]
    for _, _, due, _ in begins:
        earlier = sorted(one for one in begins if one[2] <= due)
        free_at = -1e9
        for begin, count, _, _ in earlier:
            free_at = max(free_at, begin) + count / SPEED.per_second
        assert free_at + SPEED.usual <= due


async def test_a_pool_begins_keeps_and_lets_go(rig: OpenRig) -> None:
    async with rig(warm=1, size=50, starts=2, script=FakeScript(start_seconds=1.0)) as r:
        await r.advance(1.0)
        plan = r.pool.announce("a", 8, 60.0, 30.0)
        assert (plan.count, plan.ready, plan.expiry) == (8, 61.0, 91.0)
        # Two at a time, a second each.
        assert 61.0 - plan.begin == LEAST_SECONDS + MARGIN * (8 / 2 + 1)
        await r.advance(plan.begin - r.clock.now() - 0.1)
        assert r.counts.startswith("0 starting, 0 backing off, 0 forking, 1 warm")
        for _ in range(6):
            await r.advance(1.0)
        assert r.pool.stats().warm == 9
        await r.advance(61.0 - r.clock.now())
        # What is acquired now was announced, and is not made up for.
        held = [await r.pool.acquire() for _ in range(5)]
        for _ in range(5):
            await r.advance(1.0)
        assert (r.pool.stats().warm, r.pool.stats().announced) == (4, 3)
        await r.advance(91.0 - r.clock.now())
        assert (r.pool.stats().warm, r.pool.stats().announced) == (1, 0)
        for sandbox in held:
            r.pool.release(sandbox.id)


async def test_an_announcement_is_changed_and_withdrawn_by_its_id(rig: OpenRig) -> None:
    async with rig(warm=2, size=10, starts=50) as r:
        for count in (3, 8, 5):
            plan = r.pool.announce("a", count, 0.0, 100.0)
            assert plan.count == count
            await r.advance(0.0)
            assert r.pool.stats().warm == 2 + count
        # Beside the target and that one there is room for three.
        assert r.pool.announce("b", 10, 0.0, 100.0).count == 3
        r.pool.announce("a", 0, 0.0, 0.0)
        await r.advance(0.0)
        assert r.pool.stats().warm == 5
        with pytest.raises(errors.InvalidRequest, match="count = 11 is more than"):
            r.pool.announce("c", 11, 0.0, 1.0)


async def test_too_many_announcements_are_refused(rig: OpenRig) -> None:
    async with rig(size=2 * ANNOUNCEMENTS) as r:
        for n in range(ANNOUNCEMENTS):
            r.pool.announce(str(n), 1, 1e6, 1.0)
        with pytest.raises(errors.InvalidRequest, match="1000 announcements are kept already"):
            r.pool.announce("more", 1, 1e6, 1.0)
        r.pool.announce("7", 2, 1e6, 1.0)


async def test_prewarming_through_the_client(daemon: OpenDaemon) -> None:
    async with daemon(pools={"p": {"backend": "fake", "warm": 0, "size_limit": 20}}) as client:
        before = time.time()
        plan = await client.prewarm("p", 6, by=0.0, grace=50.0, announcement_id="mine")
        assert (plan.count, plan.ready) == (6, None)
        assert before <= plan.begins <= time.time()
        assert plan.expires - plan.begins == pytest.approx(50.0, abs=1.0)
        async with asyncio.timeout(20):
            async for stats in client.watch_pool("p", interval=0.02):
                if (stats.warm, stats.announced, stats.warm_target) == (6, 6, 6):
                    break
        async with client.acquire("p", timeout=10), asyncio.timeout(20):
            async for stats in client.watch_pool("p", interval=0.02):
                if (stats.warm, stats.announced) == (5, 5):
                    break
        for wrong, words in (
            ({"count": -1}, "count = -1 must be from 0"),
            ({"count": 1, "by": -1.0}, "within = -1 s must be from 0"),
            ({"count": 21}, "size_limit of 20"),
        ):
            with pytest.raises(errors.InvalidRequest, match=words):
                await client.prewarm("p", **wrong)


def test_prewarming_from_the_command_line(tmp_path: Path) -> None:
    with daemon_process(tmp_path, '[pools.python]\nbackend = "fake"\nwarm = 1\n') as address:
        _prewarm(address)


def _prewarm(address: str) -> None:
    done = run("prewarm", "--address", address, "python", "3", "--by", "0", "--id", "x")
    assert done.stdout.startswith(b"python: 3; starts begin in 0.0 s, ready"), done
    done = run("prewarm", "--address", address, "python", "0", "--id", "x")
    assert done.stdout == b"python: x is withdrawn\n"
    wrong = run("prewarm", "--address", address, "python", "3", "--by", "-1")
    assert (wrong.returncode, wrong.stderr) == (2, b"sandboxd: prewarm --by -1: must not be negative\n")
