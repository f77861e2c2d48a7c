"""What a command would find in a sandbox, as far as a sandbox can tell: equal for those that are as new."""

from __future__ import annotations

from sandboxd.backends.base import Connection
from sandboxd.errors import FileFailed, FileNotFound
from sandboxd.types import Command, Exited, ExitReason, FileInfo, FileKind, Stderr, Stdout, Template

# What everybody may write to, and where a sandbox's user keeps things.
DIRECTORIES = (b"/tmp", b"/var/tmp", b"/dev/shm", b"/run", b"/workspace", b"/home", b"/etc", b"/")
# Objects that outlive their processes, and what the first process hands down to every command.
FILES = (b"/proc/sysvipc/shm", b"/proc/sysvipc/sem", b"/proc/sysvipc/msg", b"/proc/1/limits")
STATUS = b"/proc/1/status"
STATUS_KEYS = (b"Umask", b"Uid", b"Gid", b"Groups", b"Cap", b"NoNewPrivs", b"Seccomp", b"Cpus_", b"Mems_")
STAT = b"/proc/1/stat"
# Fields of `stat` after the name: priority, nice, real-time priority and policy (proc(5) 18, 19, 40, 41).
STAT_FIELDS = (15, 16, 37, 38)
MISSING = "missing"

Portrait = dict[str, str]


async def portray(connection: Connection, template: Template) -> Portrait:
    """What can be seen: directories, processes, ipc objects, the first process, an environment, commands.

    What a sandbox does not have is part of it. Raises SandboxLost, BackendUnavailable.
    """
    portrait = {}
    for path in sorted({*DIRECTORIES, template.cwd}):
        portrait[_text(path)] = await _directory(connection, path)
    for path in FILES:
        portrait[_text(path)] = await _file(connection, path)
    portrait["first process"] = await _first_process(connection)
    portrait["processes"] = await _processes(connection)
    portrait["environment"] = await _environment(connection)
    return portrait


def differences(new: Portrait, other: Portrait) -> list[str]:
    """One line for each thing in which the other differs from a new one."""
    return [
        f"{key} is {_short(other.get(key, MISSING))} and not {_short(new.get(key, MISSING))}"
        for key in sorted({*new, *other})
        if new.get(key, MISSING) != other.get(key, MISSING)
    ]


async def _directory(connection: Connection, path: bytes) -> str:
    try:
        itself = await connection.files.stat(path)
        entries = [entry async for entry in connection.files.list_directory(path)]
    except (FileNotFound, FileFailed):
        return MISSING
    return " ".join([f"{itself.mode:o}", *(_entry(entry) for entry in entries)])


def _entry(entry: FileInfo) -> str:
    # The size of a directory is the file system's business.
    size = "" if entry.kind is FileKind.DIRECTORY else entry.size
    return f"{entry.name!r}:{entry.kind}:{entry.mode:o}:{size}:{entry.target!r}"


async def _read(connection: Connection, path: bytes) -> bytes | None:
    try:
        return b"".join([piece async for piece in connection.files.read(path)])
    except (FileNotFound, FileFailed):
        return None


async def _file(connection: Connection, path: bytes) -> str:
    content = await _read(connection, path)
    return MISSING if content is None else _text(content)


async def _first_process(connection: Connection) -> str:
    status, stat = await _read(connection, STATUS), await _read(connection, STAT)
    if status is None or stat is None:
        return MISSING
    lines = [line for line in status.splitlines() if line.startswith(STATUS_KEYS)]
    fields = stat.rpartition(b")")[2].split()
    return _text(b"\n".join([*lines, *(fields[number] for number in STAT_FIELDS)]))


async def _processes(connection: Connection) -> str:
    try:
        entries = [entry.name async for entry in connection.files.list_directory(b"/proc")]
    except (FileNotFound, FileFailed):
        return MISSING
    return " ".join(_text(name) for name in entries if name.isdigit())


async def _environment(connection: Connection) -> str:
    printed = b""
    async with connection.exec(Command((b"env",), timeout=10.0, output_limit=1 << 20)) as events:
        async for event in events:
            if isinstance(event, Stdout | Stderr):
                printed += event.data
            elif isinstance(event, Exited) and event.reason is ExitReason.NOT_STARTED:
                return MISSING
    # A variable of ours would name the command.
    return _text(
        b"\n".join(sorted(line for line in printed.splitlines() if not line.startswith(b"SANDBOXD_")))
    )


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}…")
