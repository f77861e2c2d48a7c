"""The daemon's way to its launcher: found or started, greeted, and replaced where it has died."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from pathlib import Path
from typing import Any

from sandboxd.backends import launching
from sandboxd.backends.channel import dial
from sandboxd.backends.instance import instance
from sandboxd.backends.link import Link
from sandboxd.backends.namespace_options import NamespaceOptions
from sandboxd.backends.native import guest_program
from sandboxd.errors import BackendUnavailable
from sandboxd.lifetime import whole

# So many launchers are greeted before one that dies under the first words is an error.
GREETINGS = 3
CONTROL_LINE_BYTES = 4 << 20
VERSION = 3
# Of unix(7): pid, uid and gid of the other end.
PID, PEER_BYTES = struct.Struct("i"), 12


class Linking:
    """Of one state directory. `link` is the present connection, if there is one; `image_ids` (of each
    sandbox that an earlier daemon left), `enforced` (limits by control group), `has_users` (commands can have
    users) and `launcher_pid` are what the launcher said when it was greeted.
    """

    def __init__(self, state: Path, options: NamespaceOptions) -> None:
        self.link: Link | None = None
        self.image_ids: dict[str, str] = {}
        self.enforced: frozenset[str] = frozenset()
        self.has_users = False
        self.launcher_pid: int | None = None
        self._state = state
        self._options = options
        self._lock = asyncio.Lock()
        self._starting: asyncio.Task[bool] | None = None
        self._listener = 0
        self._watched: tuple[int, ...] = ()
        self._ends: list[asyncio.Future[None]] = []

    @property
    def instance(self) -> str:
        """What this backend's control groups are called."""
        return f"sandboxd-{instance(self._state)}"

    async def open(self) -> None:
        """Starts the launcher, or takes over one that runs. Raises BackendUnavailable."""
        try:
            self._state.mkdir(mode=0o711, parents=True, exist_ok=True)
        except OSError as error:
            raise BackendUnavailable(f"{self._state} cannot be made: {error.strerror}") from error
        await self.connected()

    async def close(self) -> None:
        """Ends the launcher, and with it all that it made. Goes on where it was when cancelled before."""
        async with self._lock:
            await self._take_started()
            await self._end()
            if self._ends and (self._state / "sandboxes").exists():
                await self._end_again()
            self._ends = []
            launching.remove_state(self._state)

    async def _take_started(self) -> None:
        """One that was begun by whoever was cancelled meanwhile: nobody else would end it."""
        if self._starting is None:
            return
        await asyncio.wait([self._starting])
        started = not self._starting.cancelled() and self._starting.exception() is None
        if started and self._starting.result():
            found = await self._greeted(starts=False)
            if found is not None:
                await self._taken(*found)
        self._starting = None

    async def _end_again(self) -> None:
        """What a keeper that was killed would have taken away the next one does."""
        if await self.start():  # else one answers, of a daemon for which the directory was made anew
            await self._connect()
            await self._end()
        self._starting = None

    async def _end(self) -> None:
        for _ in range(GREETINGS):
            if self.link is None or await self._told_to_end(self.link):
                break
            # It has died, and its keeper removes what was left; or another daemon was heard since.
            self.link = await self._find_same()
        link, self.link = self.link, None
        if link is not None:
            await link.close()
        await self.keeper_ended()

    async def _told_to_end(self, link: Link) -> bool:
        """Whether the connection lasted until it was told."""
        try:
            answer = await link.ask("close")
        except BackendUnavailable:
            return not link.broken
        finally:
            await link.close()
        if "taken" in answer:
            self._look_away()
        return True

    def _look_away(self) -> None:
        """The launcher is another daemon's, whenever it may end."""
        for end in self._ends:
            end.cancel()
        self._ends = []

    async def _find_same(self) -> Link | None:
        """To the launcher that was greeted last, not to one that another daemon has started since it died."""
        link = await self._find()
        if link is not None and link.listener != self._listener:
            await link.close()
            return None
        return link

    async def keeper_ended(self) -> None:
        """Returns when a launcher that ends or died has left nothing. Raises BackendUnavailable."""
        if not self._ends:
            return
        _, living = await asyncio.wait(self._ends, timeout=launching.START_SECONDS)
        if living:
            raise BackendUnavailable(
                f"the keeper of {self._state} did not end; its log is {self._state / launching.LOG_FILE}"
            )

    async def let_go(self) -> None:
        """Leaves the launcher, which keeps all for its grace. One that has nothing yet ends."""
        async with self._lock:
            if self._starting is not None:
                # Whatever stands against that, it ends by itself.
                with contextlib.suppress(BackendUnavailable):
                    await self._take_started()
                    await self._end()
            link, self.link = self.link, None
            self._look_away()
            if link is None:
                launching.remove_state(self._state)
            else:
                await link.close()

    async def connected(self) -> Link:
        """To a launcher that has been greeted. Raises BackendUnavailable."""
        async with self._lock:
            if self.link is not None and not self.link.broken:
                return self.link
            if self.link is not None:
                await self.link.close()
            return await self._connect()

    async def survivor(self) -> Link | None:
        """To the launcher that was greeted last, also where another daemon was heard since; None where there
        is none, or it has died and left nothing. Raises BackendUnavailable.
        """
        async with self._lock:
            link = self.link
            if link is None or not link.broken:
                return link
            link = await self._find_same()
            if link is not None:
                return await self._taken(link, await self._greet(link))
        await self.keeper_ended()
        return None

    async def _connect(self) -> Link:
        found = await self._greeted()
        if found is None:
            raise BackendUnavailable(f"the launcher in {self._state} does not answer")
        return await self._taken(*found)

    async def _taken(self, link: Link, hello: dict[str, Any]) -> Link:
        try:
            launching.check_version(hello, VERSION, self._state)
            self._watch(hello["pid"], hello["keeper"])
        except BackendUnavailable:
            await link.close()
            raise
        self.link = link
        self.image_ids = hello["images"]
        self.enforced = frozenset(hello["enforced"])
        # A launcher that is older than this daemon does not know of it.
        self.has_users = bool(hello.get("users"))
        self.launcher_pid = hello["pid"]
        self._listener = link.listener
        self._starting = None
        return link

    def _watch(self, *pids: int) -> None:
        """A keeper ends after its launcher, unless it was killed."""
        if self._watched != pids or all(end.done() for end in self._ends):
            # Those before have ended, or are about to: whoever waits for them goes on.
            self._ends = launching.ends_of(*pids)
            self._watched = pids

    async def asked_again(self, what: str) -> dict[str, Any]:
        """The answer of the launcher, or of the next where it dies before it answers."""
        for _ in range(GREETINGS - 1):
            try:
                return await (await self.connected()).ask(what)
            except BackendUnavailable:
                if self.link is None or not self.link.broken:
                    raise
        return await (await self.connected()).ask(what)

    async def _greeted(self, *, starts: bool = True) -> tuple[Link, dict[str, Any]] | None:
        """None where there is none, also none that was started."""
        for attempt in range(GREETINGS):
            link = await self._find()
            if link is None:
                if not starts:
                    return None
                await self.start()
                link = await self._find()
            try:
                if link is not None:
                    return link, await self._greet(link)
            except BackendUnavailable:
                # It took the connection in its last moment.
                if attempt == GREETINGS - 1:
                    raise
        return None

    @staticmethod
    async def _greet(link: Link) -> dict[str, Any]:
        try:
            return await link.ask("hello")
        except BaseException:
            await link.close()
            raise

    async def _find(self) -> Link | None:
        try:
            sock = await dial(self._state / "launcher.sock")
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise BackendUnavailable(f"{self._state / 'launcher.sock'}: {error.strerror}") from error
        try:
            (listener,) = PID.unpack_from(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_BYTES))
            opening = asyncio.open_unix_connection(sock=sock, limit=CONTROL_LINE_BYTES)
            streams = await whole(opening, lambda made: made[1].close())
        except OSError as error:
            sock.close()
            raise BackendUnavailable(f"{self._state / 'launcher.sock'}: {error.strerror}") from error
        return Link(*streams, answer_seconds=self._options.answer_seconds, listener=listener)

    async def start(self) -> bool:
        """Starts a launcher where none runs; False where one does by now. Raises BackendUnavailable.

        When cancelled it comes up all the same; whoever asks next has that one.
        """
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start(), name="launcher start")
        try:
            return await asyncio.shield(self._starting)
        except BackendUnavailable:
            self._starting = None
            raise

    async def _start(self) -> bool:
        options = self._options
        state, images = self._state.resolve(), await asyncio.to_thread(options.open_store)
        spec = {
            "state": str(state),
            "name": self.instance,
            "cgroup_root": str(options.cgroup_root),
            "read_only_paths": [str(path) for path in options.read_only_paths],
            "images": images,
            "guest": str(guest_program()),
            "uid_base": options.uid_base,
            "grace": options.grace_seconds,
        }
        return await launching.launch(options.python, spec)
