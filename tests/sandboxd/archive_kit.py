"""Tar archives as Python's own library writes them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def packed(*members: tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive as Python's own library writes it; a file holds its own name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as writer:
        for info in members:
            data = info.name.encode() if info.isreg() else b""
            info.size = len(data)
            writer.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


async def in_parts(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
