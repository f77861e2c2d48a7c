"""What fits into the end of a call: peers drop one whose metadata is longer than 8 KiB, status and all."""

from __future__ import annotations

import re
from collections.abc import Mapping

# In bytes as they are sent. What is left to 8 KiB is for the rest of the status, and for gRPC's own.
STATUS_BYTES = 7000
MESSAGE_BYTES = 1000
CUT = " … "
# Whose end says more than its beginning.
LOG = "log"
# What moves a terminal's cursor or colours what follows, begins a line, or ends one.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def one_line(text: str) -> str:
    """The text with control characters as Python writes them: a sandbox's file may be called anything."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def fitted(message: str, metadata: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The message in one line; else both as they are where they fit, which nearly all do. Otherwise the
    message loses what is in its middle, a long name say: its end tells what to do. The longest of the
    metadata is cut then, a log at its front.
    """
    message, kept = _clipped(one_line(message), MESSAGE_BYTES), dict(metadata)
    # The message goes twice, once with what is not ASCII in three bytes for one; the details as base64.
    left = (STATUS_BYTES - _escaped(message)) * 3 // 4 - len(message.encode())
    while (excess := sum(_size(key) + _size(value) for key, value in kept.items()) - left) > 0:
        longest = max(kept, key=lambda key: _size(kept[key]))
        kept[longest] = _cut(longest, kept[longest], max(0, _size(kept[longest]) - excess))
    return message, kept


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _escaped(text: str) -> int:
    return sum(1 if 0x20 <= byte < 0x7F and byte != 0x25 else 3 for byte in text.encode())


def _cut(name: str, text: str, size: int) -> str:
    data = text.encode(errors="replace")
    return (data[len(data) - size :] if name == LOG else data[:size]).decode(errors="ignore")


def _clipped(text: str, limit: int) -> str:
    """Without its middle where it is longer; what cannot be sent is a question mark."""
    data = text.encode(errors="replace")
    if len(data) > limit:
        room = limit - len(CUT.encode())
        head, tail = data[: room * 2 // 3], data[-(room - room * 2 // 3) :]
        return head.decode(errors="ignore") + CUT + tail.decode(errors="ignore")
    return data.decode()
