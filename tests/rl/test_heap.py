"""The collector leaves alone what was there before, and finds what came later."""

from __future__ import annotations

import gc
import weakref

from rl.heap import settled


class Ring:
    def __init__(self) -> None:
        self.own = self


def ring() -> weakref.ref[Ring]:
    """Garbage that only the collector finds."""
    return weakref.ref(Ring())


def test_what_was_there_is_not_looked_through_and_what_comes_is() -> None:
    gc.disable()  # none but those that are asked for here
    try:
        before = ring()
        with settled():
            after = ring()
            gc.collect()
            assert (before() is None, after() is None) == (False, True)
        gc.collect()
        assert before() is None
    finally:
        gc.enable()
