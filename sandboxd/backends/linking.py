"""The daemon's way to its launcher: found or started, greeted, and replaced where it has died."""

from __future__ import annotations

import asyncio
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
        self._keeper_end: asyncio.Future[list[None]] | None = None

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
        """Ends the launcher, and with it all that it made."""
        async with self._lock:
            was_open = self.link is not None
            await self._end()
            if was_open and (self._state / "sandboxes").exists():
                await self._end_again()
            launching.remove_state(self._state)

    async def _end_again(self) -> None:
        """What a keeper that was killed would have taken away the next one does."""
        other = await self._find()
        if other is not None:  # of a daemon for which the directory was made anew
            await other.close()
            return
        await self._connect()
        await self._end()

    async def _end(self) -> None:
        link, self.link = self.link, None
        for _ in range(GREETINGS):
            if link is None or await self._told_to_end(link):
                break
            # It has died, and its keeper removes what was left; or another daemon was heard since.
            link = await self._find()
        await self.keeper_ended()

    async def _told_to_end(self, link: Link) -> bool:
        """Whether the connection lasted until it was told."""
        try:
            await link.ask("close")
        except BackendUnavailable:
            return not link.broken
        finally:
            await link.close()
        return True

    async def keeper_ended(self) -> None:
        """Returns when a launcher that let go or died has left nothing. Raises BackendUnavailable."""
        if self._keeper_end is None:
            return
        try:
            async with asyncio.timeout(launching.START_SECONDS):
                await asyncio.shield(self._keeper_end)
        except TimeoutError as error:
            raise BackendUnavailable(
                f"the keeper of {self._state} did not end; its log is {self._state / launching.LOG_FILE}"
            ) from error

    async def let_go(self) -> None:
        """Leaves the launcher, which keeps all for its grace."""
        async with self._lock:
            link, self.link = self.link, None
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

    async def _connect(self) -> Link:
        link, hello = await self._greeted()
        try:
            launching.check_version(hello, VERSION, self._state)
            # A keeper ends after its launcher, unless it was killed.
            ends = [launching.end_of(hello[which]) for which in ("pid", "keeper")]
            self._keeper_end = asyncio.gather(*ends)
        except BackendUnavailable:
            await link.close()
            raise
        self.link = link
        self.image_ids = hello["images"]
        self.enforced = frozenset(hello["enforced"])
        # A launcher that is older than this daemon does not know of it.
        self.has_users = bool(hello.get("users"))
        self.launcher_pid = hello["pid"]
        return link

    async def asked_again(self, what: str) -> dict[str, Any]:
        """The answer of the launcher, or of the next where it dies before it answers."""
        for _ in range(GREETINGS - 1):
            try:
                return await (await self.connected()).ask(what)
            except BackendUnavailable:
                if self.link is None or not self.link.broken:
                    raise
        return await (await self.connected()).ask(what)

    async def _greeted(self) -> tuple[Link, dict[str, Any]]:
        for attempt in range(GREETINGS):
            link = await self._find()
            if link is None:
                await self.start()
                link = await self._find()
            if link is None:
                break
            try:
                return link, await link.ask("hello")
            except BackendUnavailable:
                # It took the connection in its last moment.
                await link.close()
                if attempt == GREETINGS - 1:
                    raise
            except asyncio.CancelledError:
                await link.close()
                raise
        raise BackendUnavailable(f"the launcher in {self._state} does not answer")

    async def _find(self) -> Link | None:
        try:
            sock = await dial(self._state / "launcher.sock")
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise BackendUnavailable(f"{self._state / 'launcher.sock'}: {error.strerror}") from error
        try:
            opening = asyncio.open_unix_connection(sock=sock, limit=CONTROL_LINE_BYTES)
            streams = await whole(opening, lambda made: made[1].close())
        except OSError as error:
            sock.close()
            raise BackendUnavailable(f"{self._state / 'launcher.sock'}: {error.strerror}") from error
        return Link(*streams, answer_seconds=self._options.answer_seconds)

    async def start(self) -> None:
        """Starts a launcher where none runs. Raises BackendUnavailable."""
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
        await launching.launch(options.python, spec)
