"""Fills a directory of this host from an archive that nobody vouches for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from sandboxd.guest import archive
from sandboxd.guest.archive import Entry
from sandboxd.guest.packing import Refused, Unpacker


class GuardedUnpacker(Unpacker):
    """What it makes can be walked by whoever owns the directory, and leads nowhere else.

    Refuses links that lead out, or may: `..` only at the beginning, for a later one may come after another
    link. Refuses pipes too. Modes lose set-user-ID and what lets others write; the owner may read and write.
    """

    def _place(self, entry: Entry) -> None:
        if entry.kind == archive.FIFO:
            raise Refused(errno.EPERM, "a pipe is not made here")
        entry.mode = entry.mode & 0o755 | (0o700 if entry.kind == archive.DIRECTORY else 0o600)
        if entry.kind == archive.SYMLINK:
            self._hold(entry.target, self._root + b"/" + entry.name)
        super()._place(entry)

    def _link(self, source: bytes, path: bytes) -> None:
        # The same link leads elsewhere from another place.
        first = Path(os.fsdecode(source))
        if first.is_symlink():
            self._hold(os.fsencode(first.readlink()), path)
        super()._link(source, path)

    def _hold(self, target: bytes, path: bytes) -> None:
        steps = [step for step in target.split(b"/") if step not in (b"", b".")]
        up = 0
        while up < len(steps) and steps[up] == b"..":
            up += 1
        depth = len(os.path.relpath(path, self._root).split(b"/")) - 1
        if target.startswith(b"/") or up > depth or b".." in steps[up:]:
            raise Refused(errno.EPERM, f"a link to {os.fsdecode(target)!r} may lead out of the directory")
