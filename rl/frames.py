"""Length-prefixed messages between the loop and the trainer process, over that process's own pipes.

Pickle is safe here: both ends are this program, started by it, joined by a private pipe.
"""

from __future__ import annotations

import pickle
import struct
from asyncio import StreamReader
from typing import Any, BinaryIO

HEADER = struct.Struct("<Q")


def encode(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def read(stream: BinaryIO) -> Any:
    """Blocks for one message. Raises EOFError when the other end is closed, also in mid-message."""
    (size,) = HEADER.unpack(_exactly(stream, HEADER.size))
    return pickle.loads(_exactly(stream, size))  # noqa: S301 - see above


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the pipe was closed")
    return data


async def receive(stream: StreamReader) -> Any:
    """Waits for one message. Raises asyncio.IncompleteReadError when the other end is closed."""
    (size,) = HEADER.unpack(await stream.readexactly(HEADER.size))
    return pickle.loads(await stream.readexactly(size))  # noqa: S301 - see above
