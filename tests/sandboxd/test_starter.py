"""The program that makes sandboxes, step by step: what it does without rights, what it says of a fault."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.backends import steps
from sandboxd.backends.bare import PACKAGE
from sandboxd.backends.native import guest_program
from sandboxd.backends.steps import GROUP, HERE, INHERITED, LISTENER, PROC, Step, encode
from sandboxd.guest import wire

from .starter_kit import Bench

END: Step = ("write", HERE, "no such file", "", False)
ENDED = "No such file or directory: write no such file"
NATIVE = PACKAGE / "native"


@pytest.fixture(params=["plain", "sanitized"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    program = request.getfixturevalue("sanitized") if request.param == "sanitized" else None
    with Bench(tmp_path, program=program) as bench:
        yield bench


def test_both_languages_name_the_same_steps_and_slots() -> None:
    table = re.findall(r'\{"(\w+)", "(\w*)", \w+\}', (NATIVE / "steps.c").read_text())
    assert tuple(table) == steps.OPS
    header = (NATIVE / "steps.h").read_text()
    slots = header.partition("enum slot {")[2].partition("SLOT_FREE")[0]
    names = re.findall(r"SLOT_(\w+)", slots)
    assert [getattr(steps, name) for name in names] == list(range(len(names)))
    numbers = dict(re.findall(r"(SLOT_INHERITED|SLOTS|BLOCKS) = (\d+)", header))
    assert int(numbers["SLOT_INHERITED"]) == steps.INHERITED
    assert int(numbers["SLOTS"]) == steps.INHERITED + steps.INHERITED_MOST
    assert int(numbers["BLOCKS"]) == steps.BLOCKS


def test_files_are_made_opened_and_written(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "value").write_text("old")
    done: list[Step] = [
        ("mkdir", HERE, "group", 0o711),
        ("open", HERE, "group", os.O_RDONLY | os.O_DIRECTORY, PROC, False),
        ("mkdir", PROC, "inner", 0o755),
        ("write", HERE, "value", "new", False),
        ("write", PROC, "missing", "x", True),
        ("open", PROC, "missing", os.O_RDONLY, steps.PEAK, True),
        ("makedirs", str(tmp_path / "a/b/c")),
        ("makedirs", str(tmp_path / "a/b")),
        ("close", PROC),
        END,
    ]
    assert bench.failure(done) == ENDED
    assert (tmp_path / "group").stat().st_mode & 0o777 == 0o711
    assert (tmp_path / "group/inner").is_dir()
    assert (tmp_path / "value").read_text() == "new"
    assert (tmp_path / "a/b/c").is_dir()


def test_a_socket_takes_connections_once_it_was_made(bench: Bench, tmp_path: Path) -> None:
    assert bench.failure([("listen", "s", 5, LISTENER), END]) == ENDED
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(str(tmp_path / "s"))  # It was closed with the order that failed.
    assert bench.failure([("listen", "s", 5, LISTENER)]) == "Address already in use: listen s"
    assert bench.failure([("listen", "s" * 200, 5, LISTENER)]).startswith("File name too long: listen sss")


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (("mkdir", HERE, "there", 0o755), "File exists: mkdir there"),
        (("makedirs", "there/file/more"), "File exists: makedirs there/file/more"),
        (("makedirs", "there/file"), "File exists: makedirs there/file"),
        (("open", HERE, "missing", os.O_RDONLY, PROC, False), "No such file or directory: open missing"),
        (("open", PROC, "missing", os.O_RDONLY, PROC, False), "Bad file descriptor: open"),
        (("mkdir", HERE, "x" * 300, 0o755), f"File name too long: mkdir {'x' * 300}"),
        (("block", 3), "Bad message: block"),
        (("block", -1), "Bad message: block"),
        (("chdir", "missing"), "No such file or directory: chdir missing"),
        (("workspace", "there/" + "a/" * 3000, 0, True), "File name too long: workspace there/a/"),
    ],
)
def test_a_step_that_fails_says_what_and_where(bench: Bench, tmp_path: Path, step: Step, fault: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    assert bench.failure([step, END]).startswith(fault)


@pytest.mark.parametrize(
    "order", [b"\xff", b"\x01", b"\x01\x00\xff\xff", b"\x02\x01\x00ab", b"\x06\x63", b"\x02\x05\x00/etc"]
)
def test_steps_that_make_no_sense_are_refused(bench: Bench, order: bytes) -> None:
    bench.start(order)
    kind, body = bench.answer()
    assert kind == "f"
    assert body.startswith(b"Bad message: ")
    bench.sock.send(b"s\xff\xff\xff\xff")
    assert bench.answer() == ("f", b"Bad message: order")


def test_blocks_stand_for_their_steps_and_do_not_nest_for_ever(bench: Bench, tmp_path: Path) -> None:
    inner = encode([("mkdir", HERE, "inner", 0o755)])
    bench.sock.send(b"b\x00" + inner)
    bench.sock.send(b"b\x01" + encode([("block", 0), ("mkdir", HERE, "outer", 0o755)]))
    bench.sock.send(b"b\x02" + encode([("block", 2)]))
    assert bench.failure([("block", 1), END]) == ENDED
    assert (tmp_path / "inner").is_dir()
    assert (tmp_path / "outer").is_dir()
    assert bench.failure([("block", 1), END]) == "File exists: mkdir inner"
    assert bench.failure([("block", 2)]).startswith("Bad message: block")


def test_what_it_does_for_itself_is_done_before_the_first_start(bench: Bench, tmp_path: Path) -> None:
    bench.sock.send(b"o" + encode([("mkdir", HERE, "own", 0o755), ("setrlimit", resource.RLIMIT_CORE, 0)]))
    assert bench.failure([("mkdir", HERE, "own", 0o755)]) == "File exists: mkdir own"
    limits = Path(f"/proc/{bench.process.pid}/limits").read_text()
    assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE)


def test_it_starts_nothing_where_what_it_does_for_itself_fails(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.sock.send(b"o" + encode([END]))
    assert bench.process.wait(20) == 2
    bench.sock.close()


def test_a_workspace_is_where_its_links_say_as_text(bench: Bench, tmp_path: Path) -> None:
    own = os.getuid()
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "absolute").symlink_to(tmp_path / "link" / "..")
    for path, made in (
        ("link/new/../deep", "real/deep"),
        ("absolute/real/./one//two/", "real/one/two"),
        ("missing/../link/three", "real/three"),
        ("link", "real"),
    ):
        assert bench.failure([("workspace", f"{tmp_path}/{path}", own, False), END]) == ENDED
        assert (tmp_path / made).is_dir()
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "real/new").exists()
    looped = bench.failure([("workspace", f"{tmp_path}/loop/x", own, False)])
    assert looped == f"Too many levels of symbolic links: workspace {tmp_path}/loop/x"


def test_magic_links_lead_nowhere_but_where_their_text_does(tmp_path: Path) -> None:
    """The kernel would follow /proc/self/fd/N to what is open there, whatever the root."""
    (tmp_path / "outside").mkdir()
    outside = os.open(tmp_path / "outside", os.O_PATH)
    (tmp_path / "outside").rmdir()
    with Bench(tmp_path, [outside]) as bench:
        path = f"{tmp_path}/link/made"
        (tmp_path / "link").symlink_to(f"/proc/{bench.process.pid}/fd/{outside}")
        # Its text ends in " (deleted)"; the kernel would find no place there.
        assert bench.failure([("workspace", path, os.getuid(), False), END]) == ENDED
    assert (tmp_path / "outside (deleted)/made").is_dir()
    os.close(outside)


def test_descriptors_are_given_by_number(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    fds = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (first, second)]
    with Bench(inherited=fds) as bench:
        made: list[Step] = [("mkdir", INHERITED, "a", 0o755), ("mkdir", INHERITED + 1, "b", 0o755), END]
        assert bench.failure(made) == ENDED
        assert bench.failure([("mkdir", INHERITED + 2, "c", 0o755)]).startswith("Bad file descriptor")
    for fd in fds:
        os.close(fd)
    assert [path.name for path in (*first.iterdir(), *second.iterdir())] == ["a", "b"]


def test_answers_that_nobody_takes_hold_it_up_and_are_not_lost(bench: Bench) -> None:
    """More than both directions of the socket hold: orders wait on this side."""
    bench.sock.setblocking(False)
    order = encode([("chdir", f"{'x' * 400}"), END])
    count = 0
    with pytest.raises(BlockingIOError):
        while True:
            bench.start(order)
            count += 1
    assert count > 10
    bench.sock.settimeout(20)
    for _ in range(count):
        assert bench.answer()[1].startswith(b"File name too long: chdir xxx")


def test_only_its_own_children_are_killed(bench: Bench) -> None:
    for pid in (os.getpid(), 1, 0, -1):
        bench.sock.send(b"k" + struct.pack("=i", pid))
    assert bench.failure([END]) == ENDED


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to make pid namespaces")
@pytest.mark.parametrize("ordered", [True, False])
def test_every_end_is_told_however_many_come_at_once(bench: Bench, *, ordered: bool) -> None:
    """More than are remembered; and of those that nobody ordered a signal tells of some alone."""
    pids = set()
    for number in range(100):
        bench.start(encode([("listen", str(number), 1, LISTENER)]))
        kind, body = bench.answer()
        assert kind == "s"
        pids.add(body)
    for body in pids:
        if ordered:
            bench.sock.send(b"k" + body)
        else:
            os.kill(struct.unpack("=i", body)[0], signal.SIGKILL)
    told = [bench.answer() for _ in pids]
    assert {(kind, body[:4]) for kind, body in told} == {("e", body) for body in pids}
    assert {body[4:] for _, body in told} == {struct.pack("=i", signal.SIGKILL)}


def test_it_starts_for_its_parent_alone() -> None:
    done = subprocess.run(
        ["sandboxd-guest", "starter", "1", "0"],
        executable=guest_program(),
        stdin=subprocess.DEVNULL,
        timeout=20,
    )
    assert done.returncode == 1


UNIFIED = [
    path
    for path in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
    if (path / "cgroup.controllers").exists()
]


@pytest.mark.skipif(os.geteuid() != 0 or not UNIFIED, reason="needs root and control groups of version 2")
@pytest.mark.parametrize("at_once", [True, False])
def test_the_new_process_is_in_its_control_group(tmp_path: Path, *, at_once: bool) -> None:
    parent = UNIFIED[0] / f"sandboxd-test-{os.getpid()}"
    parent.mkdir()
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    made: list[Step] = [
        ("listen", "s", 1, LISTENER),
        ("mkdir", INHERITED, "group", 0o755),
        ("open", INHERITED, "group", os.O_RDONLY | os.O_DIRECTORY, GROUP, False),
    ]
    try:
        with Bench(tmp_path, [descriptor]) as bench:
            bench.start(encode([*made, ("into", GROUP)] if at_once else made), encode([("join", GROUP)]))
            kind, body = bench.answer()
            assert kind == "s"
            (pid,) = struct.unpack("=i", body)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(tmp_path / "s"))
                sock.sendall(wire.frame(wire.PING))
                assert sock.recv(64) == wire.frame(wire.PING)
            assert (parent / "group/cgroup.procs").read_text() == f"{pid}\n"
            bench.sock.send(b"k" + body)
            assert bench.answer() == ("e", body + struct.pack("=i", signal.SIGKILL))
    finally:
        os.close(descriptor)
        (parent / "group").rmdir()
        parent.rmdir()


def test_a_text_that_no_call_takes_is_refused_before_it_is_sent() -> None:
    with pytest.raises(OSError, match="zero byte"):
        encode([("chdir", "a\0b")])
    with pytest.raises(OSError, match="more than a step takes"):
        encode([("chdir", "x" * 70_000)])
