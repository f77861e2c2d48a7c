"""What a sandbox chooses comes back to the launcher as text, and a host has limits: neither may end it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from sandboxd.backends.cgroup import Cgroups
from sandboxd.backends.copies import Copies
from sandboxd.backends.launcher import _cause
from sandboxd.backends.launching import end_of
from sandboxd.backends.loop import Loop
from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.backends.starter import Starter
from sandboxd.backends.sweeper import sweep_for
from sandboxd.types import Template
from tests.sandboxd.conftest import files_up_to
from tests.sandboxd.docker_kit import run

# What an overlay whose files need not last leaves where it works.
VOLATILE = "incompat/volatile"
LARGE_BYTES = 2 << 20


def deep(top: Path, levels: int) -> None:
    """Directories in each other, each with the longest name that JSON writes the longest, and then a file."""
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(levels):
        os.mkdir(b"\x01" * 255, dir_fd=at)
        below = os.open(b"\x01" * 255, os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    file = os.open("large", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=at)
    os.ftruncate(file, LARGE_BYTES)
    os.pwrite(file, b"x", LARGE_BYTES - 1)
    os.close(file)
    os.close(at)


def test_a_copy_that_fails_at_a_path_without_end(tmp_path: Path) -> None:
    upper, partial = tmp_path / "upper", tmp_path / "partial"
    (partial / "new/tree").mkdir(parents=True)
    upper.mkdir()
    deep(upper, 20)
    loop, answers = Loop(), []
    opened = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (upper, partial)]

    def reply(answer: dict[str, Any]) -> None:
        answers.append(answer)
        loop.stop()

    with files_up_to(LARGE_BYTES // 2):
        Copies(loop, opened[1]).begin({"to_partial": "new"}, opened[0], reply)
    loop.run()
    loop.close()
    for fd in opened:
        os.close(fd)
    (answer,) = answers
    assert len(answer["error"]) == 4096
    assert answer["error"].startswith("File too large: \x01")
    assert answer["error"].endswith("\x01")


def test_the_reason_of_a_start_that_is_cut_in_a_character(tmp_path: Path) -> None:
    (tmp_path / "error").write_bytes(b"No such file or directory (chdir /\xff\xe2\x82)")
    assert _cause(str(tmp_path), 256).startswith("it could not be set up: No such file or directory (chdir /")


class Stubborn(Cgroups):
    """One that holds a group whose name no text is."""

    def remove(self, name: str) -> None:
        raise OSError(16, "Device or resource busy", os.fsdecode(b"a\xff\nb"))


def swept(directory: Path, cgroups: Cgroups, names: list[bytes]) -> list[bytes]:
    """What a sweeper of this directory answers for each of these names."""
    ours, theirs = socket.socketpair()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    sweeper = threading.Thread(target=sweep_for, args=(theirs, fd, cgroups))
    sweeper.start()
    ours.settimeout(20)
    ours.sendall(b"".join(name + b"\n" for name in names))
    with ours.makefile("rb") as lines:
        answers = [lines.readline() for _ in names]
    ours.shutdown(socket.SHUT_RDWR)
    sweeper.join(20)
    for each in (ours, theirs):
        each.close()
    os.close(fd)
    return answers


def test_what_cannot_be_removed_may_have_any_name(tmp_path: Path) -> None:
    for name, answer in zip((b"one", b"two"), swept(tmp_path, Stubborn([]), [b"one", b"two"]), strict=True):
        assert answer == name + b" Device or resource busy: a\xff?b\n"


def test_what_is_left_is_removed_and_nothing_that_its_links_name(tmp_path: Path) -> None:
    kept, state = tmp_path / "kept", tmp_path / "state"
    for marker in (kept, state):
        (marker / "work" / VOLATILE).mkdir(parents=True)
        (marker / "work" / VOLATILE / "dirty").write_text("")
    empty, full, link, branch = (state / name for name in ("empty", "full", "link", "branch.one"))
    for box in (empty, full, link):
        (box / "upper").mkdir(parents=True)
        (box / "work" / "work" / VOLATILE).mkdir(parents=True)
        (box / "work" / "work" / VOLATILE / "dirty").write_text("")
        (box / "guest.sock").write_text("")
    for box in (empty, full):
        (box / "upper/workspace").mkdir()
    (full / "upper/workspace/file").write_text("")
    (link / "upper/workspace").symlink_to(kept)
    # All of it may be a sandbox's own.
    branch.mkdir()
    (branch / "guest.sock").write_text("")
    (branch / "work").symlink_to(kept)
    names = [box.name.encode() for box in (empty, full, link, branch)]
    assert swept(state, Cgroups([]), [*names, b"never"]) == [name + b"\n" for name in (*names, b"never")]
    assert sorted(path.name for path in state.iterdir()) == ["work"]
    assert (kept / "work" / VOLATILE / "dirty").exists()


def test_a_descriptor_that_could_not_be_taken_is_not_the_starters_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    loop = Loop()
    heard: list[str | tuple[int, int]] = []

    def ended(pid: int, status: int) -> None:
        heard.append((pid, status))
        loop.stop()

    starter = Starter(
        loop,
        ours,
        ended,
        lambda name, fd: heard.append(name),
        lambda: heard.append("gone"),
    )
    assert starter
    theirs.send(b"dbox")
    theirs.send(b"e\x07\0\0\0\x09\0\0\0")
    loop.run()
    assert heard == [(7, 9)]
    loop.close()
    ours.close()
    theirs.close()


class Talk:
    """A connection to a launcher beside the daemon's."""

    def __init__(self, backend: NamespaceBackend) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(20)
        self._sock.connect(str(backend._state / "launcher.sock"))
        self._lines = self._sock.makefile("rb")

    def ask(self, line: bytes) -> dict[str, Any] | None:
        """The answer; None where the connection ended instead."""
        self._sock.sendall(line + b"\n")
        answer = self._lines.readline()
        return json.loads(answer) if answer else None

    def close(self) -> None:
        self._lines.close()
        self._sock.close()


@pytest.mark.anyio
async def test_a_request_that_makes_no_sense_fails_alone(backend: NamespaceBackend) -> None:
    box = await backend.create("one", Template("t"))
    for line in (b"no json", b"\xff", b"[]", b'{"do": "prune"}'):
        talk = Talk(backend)
        assert talk.ask(line) is None
        talk.close()
    talk = Talk(backend)
    for line in (
        b'{"n": 1}',
        b'{"n": 1, "do": "create"}',
        b'{"n": 1, "do": "create", "id": "two"}',
        b'{"n": 1, "do": "copy"}',
        b'{"n": 1, "do": "prune"}',
        b'{"n": 1, "do": "give up"}',
        b'{"n": 1, "do": "what"}',
    ):
        answer = talk.ask(line)
        assert answer is not None, line
        assert answer["error"], line
    talk.close()
    assert (await run(box, "echo", "on")).stdout == b"on\n"
    await backend.create("two", Template("t"))


@pytest.mark.anyio
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it takes a launcher's descriptors away")
async def test_a_launcher_without_a_free_descriptor_goes_on(backend: NamespaceBackend) -> None:
    await backend.create("one", Template("t"))
    pid = backend.launcher_pid
    assert pid is not None
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        talk = Talk(backend)
        assert "one" in await backend.list_ids()
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    answer = talk.ask(b'{"n": 1, "do": "what"}')
    assert answer == {"n": 1, "error": "no request 'what'"}
    talk.close()


@pytest.mark.anyio
async def test_a_launcher_that_fails_late_tells_its_log_and_no_daemon(tmp_path: Path) -> None:
    """What it reports on at its start is closed by then, and its number is the first connection's."""
    backend = NamespaceBackend(tmp_path / "state")
    backend._state.mkdir()
    await backend._linking.start()
    talks = [Talk(backend) for _ in range(2)]
    hello = talks[0].ask(b'{"n": 1, "do": "hello"}')
    assert hello is not None
    children = Path(f"/proc/{hello['pid']}/task/{hello['pid']}/children").read_text().split()
    names = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]: int(pid) for pid in children}
    log = (backend._state / "launcher.log").open()
    ended = end_of(hello["keeper"])
    os.kill(names[b"sandboxd-sweeper"], signal.SIGKILL)
    assert [talk._lines.read() for talk in talks] == [b"", b""]
    await asyncio.wait_for(ended, 20)
    assert log.read().endswith("OSError: the sweeper died\n")
    log.close()
    for talk in talks:
        talk.close()
