"""The Docker Engine from asyncio: the SDK in threads of its own, raw streams over the Engine's socket.

The SDK is synchronous, so no call of it may run on the event loop. What has no end of its own (attach,
exec, wait) does not go through the SDK: each such call would hold a thread, and the SDK's raw sockets lose
bytes that arrived together with the response's head.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import docker
import docker.errors
import docker.utils
import requests

from sandboxd.backends.engine_client import connected
from sandboxd.errors import BackendUnavailable

DEFAULT_URL = "unix:///var/run/docker.sock"
# More at once make no start faster: the Engine's own knee lies at 2 to 4.
THREADS = 8
# One answer of the Engine under a storm of starts; a call that takes longer is taken for hung.
CALL_SECONDS = 60.0
PIECE_BYTES = 64 * 1024
# An Engine that is only busy answers a ping sooner.
PING_SECONDS = 8.0
# Between two looks whether it is back.
PING_PAUSE_SECONDS = 1.0
# The head of a frame of a stream without a terminal: which stream, three zeros, the payload's length.
FRAME = struct.Struct(">BxxxI")
FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)

T = TypeVar("T")
Api = docker.APIClient


class EngineRefused(Exception):
    """The Engine answered a raw request with an error; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def of_full_disk(text: str) -> dict[str, str]:
    """What an error's metadata says where the Engine's disk is full: as of the daemon's own."""
    return {"host": "DISK_FULL"} if FULL.search(text) else {}


class Engine:
    """One Docker Engine on this host. `url` is a `unix://` URL; by default the SDK's own (DOCKER_HOST)."""

    def __init__(self, url: str | None = None, *, call_seconds: float = CALL_SECONDS) -> None:
        self.url = url or docker.utils.kwargs_from_env().get("base_url") or DEFAULT_URL
        self._call_seconds = call_seconds
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._api: Api | None = None
        # Why it gave no answer when it was last looked at: calls then fail at once, none waits for its turn.
        self._trouble = ""

    @property
    def socket_path(self) -> str:
        """The Engine's socket."""
        return "/" + self.url.partition("://")[2].lstrip("/")

    async def open(self) -> dict[str, Any]:
        """Connects and returns the Engine's `info`. Raises BackendUnavailable with the way out."""
        if not self.url.startswith(("unix://", "http+unix://")):
            raise BackendUnavailable(
                f"the Docker backend needs an Engine on this host, not DOCKER_HOST={self.url}: sandboxes are"
                " reached through sockets in the state directory; name a unix:// URL"
            )
        self._check_socket()

        seconds = int(self._call_seconds)
        self._api, info = await self._in_thread(lambda: connected(self.url, seconds, THREADS))
        return info

    def close(self) -> None:
        """Lets go of the Engine. Every call is over by now, so that this waits for no thread."""
        if self._api is not None:
            self._api.close()
            self._api = None
        self._threads.shutdown(wait=False)

    @property
    def is_open(self) -> bool:
        """True between a successful `open` and `close`."""
        return self._api is not None

    async def call(self, function: Callable[[Api], T]) -> T:
        """Runs `function` with the SDK's client in a thread.

        Raises BackendUnavailable when the Engine does not answer, and the SDK's own APIError when it
        refuses. A cancelled call ends only when its thread has: what it did can then be undone.
        """
        api = self._api
        if api is None:
            raise BackendUnavailable(f"the connection to the Docker Engine at {self.url} is closed")

        def call() -> T:
            if self._trouble:
                raise BackendUnavailable(self._trouble)
            return function(api)

        return await self._in_thread(call)

    async def ping(self, within: float = PING_SECONDS) -> None:
        """Returns when it answers. Until a ping does, every `call` that has not begun fails at once.

        Raises BackendUnavailable after so many seconds, or when nobody listens.
        """
        try:
            async with asyncio.timeout(within), self.lines("GET", "/_ping"):
                self._trouble = ""
        except TimeoutError as error:
            self._trouble = f"the Docker Engine at {self.url} gave no answer within {within:g} s"
            raise BackendUnavailable(self._trouble) from error
        except EngineRefused as error:
            self._trouble = f"the Docker Engine at {self.url} is in trouble: {error}"
            raise BackendUnavailable(self._trouble) from error
        except BackendUnavailable as error:
            self._trouble = error.message
            raise

    async def answers(self) -> None:
        """Returns when it answers, however long that takes."""
        while True:
            try:
                await self.ping()
                return
            except BackendUnavailable:
                await asyncio.sleep(PING_PAUSE_SECONDS)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        try:
            job = self._threads.submit(function)
        except RuntimeError as error:
            raise BackendUnavailable(
                f"no thread for a call of the Docker Engine at {self.url}: {error}; raise this user's limit"
                " on processes (ulimit -u)"
            ) from error
        done = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await _over(job, done)
            raise
        except requests.exceptions.Timeout as error:
            raise BackendUnavailable(
                f"the Docker Engine at {self.url} gave no answer within {self._call_seconds:g} s; see its log"
                " (journalctl -u docker)"
            ) from error
        except docker.errors.APIError:
            raise
        except requests.exceptions.RequestException as error:
            self._check_socket()
            raise BackendUnavailable(f"the Docker Engine at {self.url} broke off: {error}") from error
        except docker.errors.DockerException as error:
            raise BackendUnavailable(f"no Docker Engine at {self.url}: {error}") from error

    def _check_socket(self) -> None:
        """Raises BackendUnavailable with the exact cause when nobody listens."""
        try:
            probe = socket.socket(socket.AF_UNIX)
        except OSError as error:
            raise self._unreachable(error) from error
        with probe:
            # One that is hung takes no more connections once its queue is full.
            probe.setblocking(False)
            try:
                probe.connect(self.socket_path)
            except PermissionError as error:
                raise BackendUnavailable(
                    f"no permission to use the Docker Engine at {self.url}: add this user to the group that"
                    " owns the socket (sudo usermod -aG docker $USER, then log in again) or run as root"
                ) from error
            except OSError as error:
                raise BackendUnavailable(
                    f"no Docker Engine answers at {self.url} ({os.strerror(error.errno or 0)}): start it"
                    " (sudo systemctl start docker), or name another socket by DOCKER_HOST"
                ) from error

    def _unreachable(self, error: OSError) -> BackendUnavailable:
        """For a fault on this side."""
        return BackendUnavailable(
            f"the Docker Engine at {self.url} cannot be reached: {error.strerror or error}; where these are"
            " too many open files, raise the limit (ulimit -n)"
        )

    async def ended(self, container: str) -> str | None:
        """None while the container runs, else what became of it, in words. Raises BackendUnavailable."""
        try:
            found = await self.call(lambda api: api.inspect_container(container))
        except docker.errors.NotFound:
            return "its container does not exist"
        except docker.errors.APIError as error:
            raise BackendUnavailable(f"container {container} could not be looked at: {error}") from error
        state = found["State"]
        if state["Running"]:
            return None
        memory = " after it ran out of memory" if state.get("OOMKilled") else ""
        return f"its first process ended with status {state['ExitCode']}{memory}"

    async def wait_ended(self, container: str) -> str:
        """Returns, when the container has ended, what became of it."""
        target = f"/containers/{container}/wait?condition=not-running"
        while True:
            try:
                async with self.lines("POST", target) as answers:
                    await anext(aiter(answers), None)
            except EngineRefused as error:
                return str(error)
            # The Engine may have ended, and not the container.
            if (end := await self.ended(container)) is not None:
                return end

    async def stream(self, target: str, body: dict[str, Any] | None = None) -> EngineStream:
        """POSTs to `target` and takes the connection over for raw bytes both ways.

        Raises EngineRefused, and BackendUnavailable when the Engine is not there.
        """
        headers = {"Connection": "Upgrade", "Upgrade": "tcp"}
        return await self._answered("POST", target, body, headers, within=self._call_seconds)

    @contextlib.asynccontextmanager
    async def lines(
        self, method: str, target: str, headers: dict[str, str] | None = None, *, patient: bool = False
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The JSON objects that an answer of the Engine is made of, one a line, as they come.

        Leaving the block ends what the Engine does for it. Raises EngineRefused, and BackendUnavailable where
        no answer begins; if `patient`, that may take any time.
        """
        headers = {"Connection": "close", **(headers or {})}
        within = None if patient else self._call_seconds
        stream = await self._answered(method, target, None, headers, within=within)
        try:
            yield stream.objects()
        finally:
            stream.close()

    async def _answered(
        self,
        method: str,
        target: str,
        body: dict[str, Any] | None,
        headers: dict[str, str],
        *,
        within: float | None,
    ) -> EngineStream:
        """A connection on which the answer has begun, after so many seconds at most."""
        try:
            async with asyncio.timeout(within):
                stream = await self._connect()
                try:
                    await stream.request(method, target, body, headers=headers)
                except BaseException:
                    stream.close()
                    raise
                return stream
        except TimeoutError as error:
            raise BackendUnavailable(
                f"the Docker Engine at {self.url} gave no answer within {within:g} s; see its log"
                " (journalctl -u docker)"
            ) from error

    async def _connect(self) -> EngineStream:
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket_path, limit=PIECE_BYTES)
        except OSError as error:
            self._check_socket()
            raise self._unreachable(error) from error
        return EngineStream(reader, writer)


async def _over(job: Future[T], done: asyncio.Future[T]) -> None:
    """Returns when the job is cancelled before it began, or has ended; further cancellations wait, too."""
    job.cancel()
    while not done.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([done])
    if not done.cancelled():
        done.exception()


class EngineStream:
    """One raw connection to the Engine after its response's head."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def request(
        self, method: str, target: str, body: dict[str, Any] | None, *, headers: dict[str, str]
    ) -> None:
        """Sends the request and reads the response's head. Raises EngineRefused for an error status."""
        payload = json.dumps(body or {}).encode() if method == "POST" else b""
        fields = {
            "Host": "docker",
            "Content-Type": "application/json",
            "Content-Length": str(len(payload)),
            **headers,
        }
        head = "".join(f"{key}: {value}\r\n" for key, value in fields.items())
        self.writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + payload)
        try:
            answer = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise BackendUnavailable("the Docker Engine closed the connection without an answer") from error
        status = int(answer.split(b" ", 2)[1])
        if status >= 400:
            text = (await self._reader.read(PIECE_BYTES)).decode(errors="replace")
            found = re.search(r'\{"message":(".*")\}', text)
            raise EngineRefused(status, json.loads(found[1]) if found else text.strip())

    async def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yields (1 for stdout or 2 for stderr, a piece of up to 64 KiB) until the Engine ends the stream."""
        while True:
            try:
                kind, left = FRAME.unpack(await self._reader.readexactly(FRAME.size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            while left:
                piece = await self._reader.read(min(left, PIECE_BYTES))
                if not piece:
                    return
                left -= len(piece)
                yield kind, piece

    async def objects(self) -> AsyncIterator[dict[str, Any]]:
        """Yields each line that is a JSON object; lines between them are the sizes of HTTP's chunks."""
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                if line.startswith(b"{"):
                    yield json.loads(line)

    def close(self) -> None:
        """Drops the connection, and what was still to be sent: nobody reads it."""
        self.writer.transport.abort()
