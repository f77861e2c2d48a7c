"""Deadlines: the earliest first, renewals win over what they replaced."""

from __future__ import annotations

from sandboxd.leases import LeaseTable


def test_expires_in_the_order_of_deadlines() -> None:
    table = LeaseTable()
    for name, expiry in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        table.put(name, expiry)
    assert table.next_expiry() == 1.0
    assert table.expire(2.0) == ["a", "b"]
    assert len(table) == 1


def test_a_renewal_moves_the_deadline_both_ways() -> None:
    table = LeaseTable()
    table.put("a", 1.0)
    table.put("a", 5.0)
    assert table.expire(4.0) == []
    table.put("a", 4.5)
    assert table.next_expiry() == 4.5
    assert table.expire(4.5) == ["a"]


def test_a_dropped_lease_never_expires() -> None:
    table = LeaseTable()
    table.put("a", 1.0)
    table.drop("a")
    table.drop("a")
    assert table.next_expiry() is None
    assert table.expire(9.0) == []


def test_what_was_released_or_renewed_behind_a_long_lease_takes_no_memory() -> None:
    table = LeaseTable()
    table.put("held", 1.0)
    for number in range(20_000):
        table.put(f"short {number}", 2.0 + number)
        table.drop(f"short {number}")
        table.put("renewed", 3.0 + number)
    assert table.entries < 1_000
    assert table.expire(2.0) == ["held"]
    assert table.expire(1e9) == ["renewed"]
