"""How the C library keeps memory that was freed: for a process that passes on large pieces all the time."""

from __future__ import annotations

import ctypes
import sys

# Of <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Pieces up to this size are not mapped each for itself, and so much that was freed is kept for the next.
PIECE_BYTES, KEPT_BYTES = 4 << 20, 16 << 20


def keep_freed() -> None:
    """Has the memory of one message serve the next: mapped anew, each page of it is one more fault and is
    zeroed before it is written. Does nothing where the C library is not GNU's.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, PIECE_BYTES)
