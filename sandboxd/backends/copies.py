"""The launcher's copies of writable layers, each made by a process of its own: a copy may take seconds.

sandboxes/{id}/upper        what a sandbox has written, unless that is in memory
sandboxes/branch.{name}     a copy of it that forks begin with; swept like what a sandbox leaves
partial/{name}/tree         in the image store: one that becomes a layer of an image
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys as python

from sandboxd.backends import syscalls as sys
from sandboxd.backends import users
from sandboxd.backends.copier import Copier
from sandboxd.backends.loop import GONE, IN, Loop
from sandboxd.backends.rootfs import BRANCH_PREFIX

# Of JSON, which takes up to six bytes for a character of an error's text.
ANSWER_BYTES = 64 << 10
# A failed path is the sandbox's to choose, and as long as it likes.
ERROR_CHARACTERS = 4096

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Reply = Callable[[dict[str, Any]], None]


class Copies:
    """Made from the directory of the sandboxes; `partial` is the image store's, -1 for none."""

    def __init__(self, loop: Loop, partial: int) -> None:
        self._loop = loop
        self._partial = partial
        self._running: dict[str, int] = {}

    def begin(self, message: dict[str, Any], upper: int, reply: Reply) -> None:
        """Copies what the message names, or the directory open as `upper`, to where it says; replies at the
        end.
        """
        target = message.get("to_branch") or message["to_partial"]
        try:
            heard, told = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            reply({"error": f"no pipe: {error.strerror}"})
            return
        try:
            pid = os.fork()
        except OSError as error:
            os.close(heard)
            os.close(told)
            reply({"error": f"no process: {error.strerror}"})
            return
        if pid == 0:
            self._copy(message, upper, told)
        os.close(told)
        self._running[target] = pid
        self._loop.watch(heard, IN | GONE, lambda _: self._ended(heard, target, reply))

    def give_up(self, target: str) -> None:
        """Ends a copy, if it is under way: its reply is then an error."""
        if target not in self._running:
            return
        try:
            os.kill(self._running[target], signal.SIGKILL)
        except ProcessLookupError:
            return  # Its answer is on its way.

    def _ended(self, heard: int, target: str, reply: Reply) -> None:
        self._loop.unwatch(heard)
        answer = os.read(heard, ANSWER_BYTES)
        os.close(heard)
        del self._running[target]
        reply(_told(answer))

    def _copy(self, message: dict[str, Any], upper: int, told: int) -> None:
        answer: dict[str, Any] = {"error": "the copying process failed"}
        try:
            sys.prctl(sys.PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.umask(0)
            one_user = users.mapped_users() == 1
            copier = Copier(removable=one_user and "to_partial" in message)
            copier.copy(upper if upper >= 0 else self._source(message), self._target(message))
            answer = {"size": copier.size}
        except OSError as error:
            # The reason comes first: what is cut is the path's.
            where = f": {error.filename}" if error.filename else ""
            answer = {"error": f"{error.strerror}{where}"[:ERROR_CHARACTERS]}
        except Exception:
            python.excepthook(*python.exc_info())
            raise
        finally:
            try:
                os.write(told, json.dumps(answer).encode())
            finally:
                os._exit(0)

    @staticmethod
    def _source(message: dict[str, Any]) -> int:
        branch = message.get("from_branch")
        path = f"{BRANCH_PREFIX}{branch}" if branch else f"{message['id']}/upper"
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise OSError(errno.ENOENT, "no writable layer to copy: it is gone") from None

    def _target(self, message: dict[str, Any]) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if branch := message.get("to_branch"):
            os.mkdir(f"{BRANCH_PREFIX}{branch}", 0o755)
            return os.open(f"{BRANCH_PREFIX}{branch}", flags)
        if self._partial < 0:
            raise OSError(errno.ENOENT, "the image store is younger than this daemon; restart it")
        return os.open(f"{message['to_partial']}/tree", flags, dir_fd=self._partial)


def _told(answer: bytes) -> dict[str, Any]:
    """What a copying process said; nothing that it says may end the launcher."""
    if not answer:
        return {"error": "the copying process was killed"}
    try:
        told: dict[str, Any] = json.loads(answer)
    except ValueError:
        return {"error": "the copying process gave no answer that can be read"}
    return told
