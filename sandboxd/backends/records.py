"""What a launcher holds of the image store: a shared lock on each image that one of its sandboxes uses."""

from __future__ import annotations

import errno
import fcntl
import os


class Records:
    """`directory` is a descriptor of the store's records; -1 when there was no store at the start."""

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._held: dict[str, tuple[int, int]] = {}

    def hold(self, image: str) -> None:
        """One more sandbox uses it. Raises OSError when it was removed."""
        fd, count = self._held.get(image) or (self._lock(image), 0)
        self._held[image] = (fd, count + 1)

    def release(self, image: str) -> None:
        """One of them is gone."""
        fd, count = self._held.pop(image)
        if count > 1:
            self._held[image] = (fd, count - 1)
        else:
            os.close(fd)

    def _lock(self, image: str) -> int:
        if self._directory < 0:
            raise OSError(errno.ENOENT, "the image store is younger than this daemon; restart it")
        name = f"{image}.json"
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._directory)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Removed between the open and the lock: what is locked then is no record any more.
            os.stat(name, dir_fd=self._directory)
        except OSError:
            os.close(fd)
            raise
        return fd
