"""What a pool remembers of leases that ended: enough for whoever comes late, and no more than that."""

from __future__ import annotations

import tracemalloc

import pytest

from sandboxd.endings import REMEMBERED_RELEASES, Endings
from sandboxd.errors import LeaseExpired, SandboxdError, SandboxLost, SandboxNotFound
from sandboxd.journal import REMEMBERED_ENDINGS, Ending

MEGABYTE = 1 << 20


def lost(sandbox_id: str) -> Ending:
    return Ending(sandbox_id, SandboxLost.reason, f"sandbox {sandbox_id!r} died", {"sandbox": sandbox_id})


def filled(count: int) -> Endings:
    """With so many of either kind, as a daemon makes them."""
    endings = Endings()
    for number in range(count):
        endings.remember(lost(f"pool-{number:012x}"))
        endings.released(f"pool-{number:012x}-r")
    return endings


def test_a_loss_is_told_however_many_were_released_since() -> None:
    endings = Endings()
    endings.remember(lost("a"))
    for number in range(3 * REMEMBERED_ENDINGS):
        endings.released(f"r{number}")
    told = endings.of("a")
    assert type(told) is SandboxLost
    assert (told.message, told.metadata) == ("sandbox 'a' died", {"sandbox": "a"})
    assert endings.of("a") is not told
    assert endings.of("r0") is None
    assert isinstance(endings.of(f"r{3 * REMEMBERED_ENDINGS - 1}"), SandboxNotFound)


@pytest.mark.parametrize("error", [LeaseExpired, SandboxLost])
def test_the_oldest_of_too_many_is_forgotten(error: type[SandboxdError]) -> None:
    endings = Endings()
    for number in range(REMEMBERED_ENDINGS + 1):
        endings.remember(Ending(str(number), error.reason, "over"))
    assert endings.of("0") is None
    assert type(endings.of("1")) is error


def test_it_is_full_before_it_is_large() -> None:
    tracemalloc.start()
    try:
        first = filled(REMEMBERED_ENDINGS)
        held = tracemalloc.get_traced_memory()[0]
        for number in range(REMEMBERED_RELEASES):
            first.released(f"pool-{number:012x}-s")
            first.remember(lost(f"pool-{number:012x}-s"))
        assert held < 6 * MEGABYTE
        assert tracemalloc.get_traced_memory()[0] - held < MEGABYTE
    finally:
        tracemalloc.stop()
