"""What can be set of the namespace backend, and the image store that it names."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from sandboxd.backends.link import ASK_SECONDS
from sandboxd.backends.users import UID_BASE
from sandboxd.images.store import ImageError, ImageStore

logger = logging.getLogger(__name__)

# A launcher without a daemon keeps its sandboxes for this long.
GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class NamespaceOptions:
    """What can be set; the defaults fit.

    `read_only_paths` are host directories that sandboxes of the host's own system see besides its own.
    `images_dir` is the image store, if there is one. `python` runs the launcher, which is given up when it
    does not answer for `answer_seconds`.
    """

    read_only_paths: tuple[Path, ...] = ()
    images_dir: Path | None = None
    python: str = sys.executable
    uid_base: int = UID_BASE
    grace_seconds: float = GRACE_SECONDS
    answer_seconds: float = ASK_SECONDS
    cgroup_root: Path = Path("/sys/fs/cgroup")

    def store(self) -> ImageStore:
        """The image store. Raises ImageError where there is none."""
        if self.images_dir is None:
            raise ImageError("this backend has no image store")
        return ImageStore(self.images_dir)

    def open_store(self) -> str:
        """Where the image store is, made if it was missing; empty when there is none."""
        try:
            store = self.store()
            store.open()
        except ImageError as error:
            logger.warning("no images: %s", error)
            return ""
        return str(store.root.resolve())
