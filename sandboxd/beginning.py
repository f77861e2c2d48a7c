"""The first moments of a command, in which its modules are loaded: whoever stops it wants no traceback."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""What a shell says of a program that Ctrl-C ended."""


def quiet() -> None:
    """From now on Ctrl-C ends this process at once, with INTERRUPTED and not a word. For main threads, before
    anything else is imported; nothing where Ctrl-C is ignored or handled already.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def over() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again, where `quiet` had changed that."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    # Nothing has begun that would need an end.
    os._exit(INTERRUPTED)
