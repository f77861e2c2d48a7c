"""The files of a container whose guest cannot be reached: a POSIX shell's own tools, run through the Engine.

Paths must be UTF-8. Trees need `tar` in the image, and descriptions `stat`, as busybox has them.
"""

from __future__ import annotations

import secrets
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from sandboxd.errors import FileFailed, FileNotFound, InvalidRequest
from sandboxd.guest.wire import LARGEST
from sandboxd.types import FileInfo, FileKind

if TYPE_CHECKING:
    from sandboxd.backends.engine_exec import EngineExec

# What follows the name of what only the guest does.
NEEDS_GUEST = "needs the guest, whose socket gVisor keeps inside, or which was not built (run `make guest`)"
STDOUT = 1
IS_MISSING, IS_DIRECTORY, IS_REFUSED, IS_NO_DIRECTORY, IS_NO_FILE = 44, 45, 46, 47, 48
MESSAGES = {
    IS_DIRECTORY: "Is a directory (EISDIR)",
    IS_REFUSED: "Permission denied (EACCES)",
    IS_NO_DIRECTORY: "Not a directory (ENOTDIR)",
    IS_NO_FILE: "not a regular file (EINVAL)",
}
# What a directory's list may take, and what a program says of its failure.
LISTED_BYTES, ERROR_BYTES = 64 << 20, 64 << 10
# The file, its directory, the partial file.
STAGE = '[ ! -d "$1" ] || exit 45; mkdir -p "$2" && cat >"$3"'
COMMIT = 'chmod "$4" "$3" && mv -f "$3" "$1"'
DISCARD = 'rm -f "$3"'
FETCH = (
    '[ -e "$1" ] || exit 44; [ ! -d "$1" ] || exit 45; [ -f "$1" ] || exit 48; [ -r "$1" ] || exit 46;'
    ' if [ "$3" = all ]; then tail -c "+$2" "$1"; else tail -c "+$2" "$1" | head -c "$3"; fi'
)
THERE = '[ -e "$1" ] || [ -L "$1" ] || exit 44; '
A_DIRECTORY = '[ -e "$1" ] || exit 44; [ -d "$1" ] || exit 47; [ -r "$1" ] && [ -x "$1" ] || exit 46; '
# The file's raw mode in hexadecimal, its size and time, then its name and where it leads.
# A link's target is read with something behind it: what a shell substitutes loses the line feeds at its end.
SHOW = (
    'show() { stat -c "%f %s %Y" "$1" &&'
    ' if [ -L "$1" ]; then t=$(readlink "$1"; echo x); t=${t%??}; else t=; fi &&'
    ' printf "%s\\0%s\\0" "${1##*/}" "$t"; }; '
)
DESCRIBE = THERE + SHOW + 'show "$1"'
LIST = (
    A_DIRECTORY + SHOW + 'for f in "$1"/* "$1"/.[!.]* "$1"/..?*; do'
    ' if [ -e "$f" ] || [ -L "$f" ]; then show "$f" || exit; fi; done'
)
REMOVE = (
    THERE + 'if [ ! -d "$1" ] || [ -L "$1" ]; then rm -f "$1";'
    ' elif [ "$2" = yes ]; then rm -rf "$1"; else rmdir "$1"; fi'
)
PACK = A_DIRECTORY + 'cd "$1" && exec tar cf - .'
UNPACK = 'mkdir -p "$1" && cd "$1" && exec tar xvf -'
# An archive ends with this many zeros at least.
ARCHIVE_END_BYTES = 1024
KINDS = {
    stat.S_IFREG: FileKind.FILE,
    stat.S_IFDIR: FileKind.DIRECTORY,
    stat.S_IFLNK: FileKind.SYMLINK,
}


class ExecFiles:
    """Implements `base.Files`; `start` runs a program in the container."""

    def __init__(self, start: Callable[[list[str]], Awaitable[EngineExec]]) -> None:
        self._start = start

    async def write(self, path: bytes, data: AsyncIterator[bytes], mode: int) -> int:
        """See `base.Files`. Two steps, so that a source that fails half-way replaces nothing."""
        name = _argument(path)
        directory = name.rpartition("/")[0] or "/"
        files = (name, directory, f"{directory}/.{secrets.token_hex(8)}.partial")
        counted = _Counted(data)
        try:
            await _result(await self._shell(STAGE, *files), name, counted)
            await _result(await self._shell(COMMIT, *files, f"{mode & 0o7777:o}"), name)
        except BaseException:
            await (await self._shell(DISCARD, *files)).finish()
            raise
        return counted.size

    def read(self, path: bytes, *, offset: int = 0, limit: int | None = None) -> AsyncIterator[bytes]:
        """See `base.Files`."""
        return self._pieces(FETCH, path, str(offset + 1), "all" if limit is None else str(limit))

    def pack(self, path: bytes) -> AsyncIterator[bytes]:
        """See `base.Files`; in the order of the directory."""
        return self._pieces(PACK, path)

    async def list_directory(self, path: bytes) -> AsyncIterator[FileInfo]:
        """See `base.Files`."""
        shown = await self._shown(LIST, path)
        for info in sorted(_infos(shown), key=lambda info: info.name):
            yield info

    async def stat(self, path: bytes) -> FileInfo:
        """See `base.Files`."""
        found = _infos(await self._shown(DESCRIBE, path.rstrip(b"/") or b"/"))
        if len(found) != 1:
            raise FileFailed(f"{text(path)!r}: the image's `stat` says nothing that is understood")
        return found[0]

    async def _shown(self, script: str, path: bytes) -> bytes:
        shown = bytearray()
        async for piece in self._pieces(script, path):
            shown += piece
            if len(shown) > LISTED_BYTES:
                raise FileFailed(f"{text(path)!r}: its description takes more than {LISTED_BYTES} bytes")
        return bytes(shown)

    async def remove(self, path: bytes, *, recursive: bool) -> None:
        """See `base.Files`."""
        name = _argument(path.rstrip(b"/") or b"/")
        await _result(await self._shell(REMOVE, name, "yes" if recursive else "no"), name)

    async def unpack(self, path: bytes, archive: AsyncIterator[bytes]) -> int:
        """See `base.Files`."""
        name = _argument(path)
        counted = _Counted(archive)
        names = await _result(await self._shell(UNPACK, name), name, counted)
        if counted.end != bytes(ARCHIVE_END_BYTES):
            raise FileFailed(f"{name!r}: the archive ends early (EINVAL)")
        return names.count(b"\n")

    async def _shell(self, script: str, *arguments: str) -> EngineExec:
        return await self._start(["sh", "-c", script, "sh", *arguments])

    async def _pieces(self, script: str, path: bytes, *arguments: str) -> AsyncIterator[bytes]:
        """What a script prints, up to its successful end."""
        name = _argument(path)
        running = await self._shell(script, name, *arguments)
        errors = b""
        try:
            async for kind, piece in running.frames():
                if kind == STDOUT:
                    yield piece
                else:
                    errors += piece[: ERROR_BYTES - len(errors)]
            if code := await running.exit_code():
                raise _error(code, name, errors)
        finally:
            running.close()


class _Counted:
    """Data that passes, how much of it there was, and its last bytes."""

    def __init__(self, data: AsyncIterator[bytes]) -> None:
        self._data = data
        self.size = 0
        self.end = b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._data:
            self.size += len(piece)
            self.end = (self.end + piece[-ARCHIVE_END_BYTES:])[-ARCHIVE_END_BYTES:]
            yield piece


async def _result(running: EngineExec, path: str, data: _Counted | None = None) -> bytes:
    """What a program printed, after its successful end."""
    printed = await (running.finish() if data is None else running.fill(aiter(data)))
    if code := await running.exit_code():
        raise _error(code, path, printed.stderr[:ERROR_BYTES])
    return printed.stdout


def _infos(shown: bytes) -> list[FileInfo]:
    """What `SHOW` printed of each file. Raises FileFailed: the container's programs are not ours."""
    found = []
    try:
        while shown:
            fields, _, shown = shown.partition(b"\n")
            name, target, shown = shown.split(b"\0", 2)
            mode, size, modified = fields.split()
            bits = int(mode, 16)
            kind = KINDS.get(stat.S_IFMT(bits), FileKind.OTHER)
            found.append(
                FileInfo(name, kind, int(size) & LARGEST, stat.S_IMODE(bits), float(int(modified)), target)
            )
    except (ValueError, OverflowError) as error:
        raise FileFailed("the image's `stat` prints what is not understood") from error
    return found


def _error(code: int, path: str, output: bytes) -> FileNotFound | FileFailed:
    if code == IS_MISSING:
        return FileNotFound(f"no such file: {path!r}")
    detail = output.decode(errors="replace").strip() or f"the shell ended with status {code}"
    return FileFailed(f"{path!r}: {MESSAGES.get(code, detail)}")


def _argument(path: bytes) -> str:
    """A path that no program takes for an option."""
    name = text(path)
    return name if name.startswith("/") else f"./{name}"


def text(value: bytes) -> str:
    """Raises InvalidRequest for what is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{value!r} is not UTF-8: the Engine's exec API takes text only, anything else {NEEDS_GUEST}"
        ) from error
