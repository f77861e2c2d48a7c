"""Starting slots that pools share: never more than there are, an equal part for each, turns when they are
few.
"""

from __future__ import annotations

import random
from collections import Counter

from sandboxd.pacing import Pace
from sandboxd.slots import Share, Slots


class Starter:
    """Somebody who wants to start `left` sandboxes, and starts as many as it may when it is woken."""

    def __init__(self, slots: Slots, left: int) -> None:
        self.left, self.served, self.woken = left, 0, False
        self.share = slots.share(self.wake)

    def wake(self) -> None:
        self.woken = True

    def go(self) -> None:
        self.woken = False
        count = min(self.share.room, self.left)
        self.left -= count
        self.served += count
        self.share.hold(self.share.taken + count, wants=self.left)

    def end(self, count: int = 1) -> None:
        self.share.taken -= count
        self.go()


def fixed(limit: int) -> Slots:
    return Slots(Pace(floor=limit, ceiling=limit))


def held(*starters: Starter) -> list[int]:
    return [starter.share.taken for starter in starters]


def test_one_alone_has_them_all() -> None:
    slots = fixed(8)
    slots.share(lambda: None)
    one = Starter(slots, 20)
    one.go()
    assert (held(one), slots.free) == ([8], 0)


def test_who_comes_later_gets_its_part_as_slots_become_free() -> None:
    slots = fixed(8)
    first, second = Starter(slots, 100), Starter(slots, 100)
    first.go()
    second.go()
    assert held(first, second) == [8, 0]
    for _ in range(8):
        first.end()
        if second.woken:
            second.go()
    assert held(first, second) == [4, 4]


def test_what_one_leaves_is_the_others() -> None:
    slots = fixed(8)
    few, many = Starter(slots, 2), Starter(slots, 100)
    few.go()
    many.go()
    assert held(few, many) == [2, 6]
    few.end(2)
    assert many.woken
    many.go()
    assert held(few, many) == [0, 8]


def test_one_slot_goes_round() -> None:
    slots = fixed(1)
    starters = [Starter(slots, 100) for _ in range(3)]
    for starter in starters:
        starter.go()
    for _ in range(30):
        next(starter for starter in starters if starter.share.taken).end()
        while woken := [starter for starter in starters if starter.woken]:
            woken[0].go()
    assert max(starter.served for starter in starters) - min(starter.served for starter in starters) <= 1


def test_a_limit_that_falls_takes_nothing_away_and_gives_nothing() -> None:
    slots = Slots(Pace(ceiling=8))
    one = Starter(slots, 100)
    one.go()
    slots.pace.limit = 4
    one.end(3)
    assert (held(one), slots.free) == ([5], -1)
    one.end(2)
    assert held(one) == [4]


def test_any_order_of_ends_keeps_the_limit_and_starves_nobody() -> None:
    draw = random.Random(1)
    for limit in (1, 2, 3, 7):
        slots = fixed(limit)
        starters = [Starter(slots, 400) for _ in range(4)]
        for starter in starters:
            starter.go()
        for _ in range(400):
            draw.choice([starter for starter in starters if starter.share.taken]).end()
            while woken := [starter for starter in starters if starter.woken]:
                draw.choice(woken).go()
            assert sum(held(*starters)) == limit, "a slot is used twice, or not at all"
        served = Counter({n: starter.served for n, starter in enumerate(starters)})
        assert min(served.values()) >= 50, served


def test_a_share_knows_the_pace() -> None:
    slots = fixed(3)
    share: Share = slots.share(lambda: None)
    assert (share.pace.limit, share.room) == (3, 3)
