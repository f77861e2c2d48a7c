"""The guest's archives beside those of `packing`, which the client uses: the same, to the byte."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxd.guest import archive, packing, wire

from .archive_kit import member, packed
from .guest_kit import Raw, Started


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("guest") / "s"
    started = Started(path)
    yield path
    assert started.end() == 0


def pack(path: Path, root: Path) -> bytes:
    raw = Raw(path)
    raw.send(wire.frame(wire.PACK, os.fsencode(root)))
    frames = raw.frames()
    raw.close()
    assert frames[-1] == (wire.DATA, b""), frames[-1]
    return b"".join(payload for _, payload in frames)


def unpack(path: Path, root: Path, data: bytes, size: int) -> int | str:
    """The count of entries, or the error."""
    raw = Raw(path)
    raw.send(wire.frame(wire.UNPACK, os.fsencode(root)))
    for start in range(0, len(data), size):
        raw.send(wire.frame(wire.DATA, data[start : start + size]))
    raw.send(wire.frame(wire.DATA))
    ((kind, payload),) = raw.frames()
    raw.close()
    if kind == wire.DONE:
        (count,) = wire.OFFSET.unpack(payload)
        return int(count)
    return payload[wire.ERROR_FIELDS.size :].decode(errors="surrogateescape")


def unpack_here(root: Path, data: bytes, size: int) -> int | str:
    unpacker = packing.Unpacker(os.fsencode(root))
    try:
        for start in range(0, len(data), size):
            unpacker.feed(data[start : start + size])
        return unpacker.finish()
    except OSError as error:
        return str(error.strerror)
    finally:
        unpacker.abandon()


def tree(root: Path) -> dict[bytes, tuple[object, ...]]:
    """What lies below: kinds, modes, times, and what is in it."""
    found: dict[bytes, tuple[object, ...]] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        inside: object = None
        if stat.S_ISREG(status.st_mode):
            inside = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            inside = path.readlink()
        made = -1.0 if abs(status.st_mtime) > 2e9 or status.st_mtime > 1.7e9 else status.st_mtime
        found[os.fsencode(path.relative_to(root))] = (oct(status.st_mode), made, status.st_nlink, inside)
    return found


NAMES = st.binary(min_size=1, max_size=120).map(lambda name: name.replace(b"\0", b"_").replace(b"/", b"-"))
MODES = st.integers(0, 0o7777).map(lambda mode: mode | 0o700)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        NAMES.filter(lambda name: name not in (b".", b"..")),
        st.tuples(st.sampled_from("fdlph"), MODES, st.integers(0, 1 << 33), st.binary(max_size=200)),
        max_size=8,
    )
)
def test_a_tree_is_packed_as_by_python(
    path: Path, tmp_path_factory: pytest.TempPathFactory, entries: dict[bytes, tuple[str, int, int, bytes]]
) -> None:
    root = directory = tmp_path_factory.mktemp("tree")
    for number, (name, (kind, mode, mtime, data)) in enumerate(entries.items()):
        place = directory / os.fsdecode(name)
        if kind == "l":
            place.symlink_to(os.fsdecode(data.replace(b"\0", b"_") or b"x"))
            continue
        if kind == "d":
            place.mkdir()
            directory = place if mode % 2 else directory
        elif kind == "p":
            os.mkfifo(place)
        else:
            place.write_bytes(data * (1000 if number == 3 else 1))
        if kind == "h":
            (directory / f"~{number}").hardlink_to(place)
        place.chmod(mode)
        os.utime(place, (mtime, mtime))
    whole = pack(path, root)
    assert whole == b"".join(packing.pack(os.fsencode(root)))
    one, other = tmp_path_factory.mktemp("one") / "t", tmp_path_factory.mktemp("other") / "t"
    assert unpack(path, one, whole, 5000) == unpack_here(other, whole, 5000)
    assert tree(one) == tree(other)


SAMPLES = [
    packed(member("f"), member("d/", b"5", mode=0o500, mtime=99), member("d/l", b"2", linkname="../f")),
    packed(member("f", mtime=12345), member("h", b"1", linkname="f"), member("p", b"6"), member("d/e/f/g")),
    packed(member("x" * 200), member("y", b"2", linkname="z" * 200), member("f")),
    b"".join(archive.header(archive.Entry(kind, b"n")) for kind in (b"7", b"\0", b"6", b"5")) + archive.END,
]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    whole=st.sampled_from(SAMPLES),
    flips=st.lists(st.tuples(st.integers(0, 511), st.integers(0, 5), st.integers(0, 255)), max_size=3),
    mend=st.booleans(),
    size=st.sampled_from([100, 512, 1000, 100_000]),
)
def test_whatever_came_python_would_have_made_the_same_of_it(
    path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    whole: bytes,
    flips: list[tuple[int, int, int]],
    mend: bool,
    size: int,
) -> None:
    data = bytearray(whole)
    for place, block, value in flips:
        if block * 512 + 512 > len(data):
            continue
        data[block * 512 + place] = value
        if mend:
            mend_sum(data, block * 512)
    one, other = tmp_path_factory.mktemp("one") / "t", tmp_path_factory.mktemp("other") / "t"
    told, expected = unpack(path, one, bytes(data), size), unpack_here(other, bytes(data), size)
    if told != expected:
        # Who reads first stumbles over another of several things; Python's numbers may have signs and lines.
        assert isinstance(told, str)
        assert "not a tar archive" in told or "of kind" in told or "ends early" in told
        return
    assert tree(one) == tree(other)
    assert sorted(entry.name for entry in one.parent.iterdir()) == ["t"]


def mend_sum(data: bytearray, start: int) -> None:
    """Makes the block a header with a right sum."""
    block = data[start : start + 512]
    block[148:156] = b" " * 8
    data[start + 148 : start + 156] = b"%06o\0 " % sum(block)


def changing(path: Path, root: Path, *, to: int) -> list[tuple[int, bytes]]:
    """The frames of an archive, one of whose files has another size as soon as its header is written."""
    (root / "f").write_bytes(bytes(5_000_000))
    raw = Raw(path)
    raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.send(wire.frame(wire.PACK, os.fsencode(root)))
    first = raw.frame()
    assert first is not None
    os.truncate(root / "f", to)
    frames = [first, *raw.frames()]
    raw.close()
    return frames


def test_a_file_that_grows_is_cut_and_one_that_shrinks_is_an_error(path: Path, tmp_path: Path) -> None:
    grown = b"".join(payload for _, payload in changing(path, tmp_path, to=9_000_000))
    entry = archive.parse(grown[512:1024])
    assert entry is not None
    assert (entry.name, entry.size) == (b"./f", 5_000_000)
    assert len(grown) == 1024 + 5_000_000 + archive.padding(5_000_000) + 1024
    kind, payload = changing(path, tmp_path, to=0)[-1]
    assert kind == wire.ERROR
    assert payload[4:] == os.fsencode(tmp_path / "f") + b": it became shorter while it was read"


def test_sockets_are_left_out(path: Path, tmp_path: Path) -> None:
    os.mknod(tmp_path / "s", stat.S_IFSOCK | 0o600)
    (tmp_path / "f").write_bytes(b"x")
    whole = pack(path, tmp_path)
    assert b"./f" in whole
    assert b"./s" not in whole


def test_a_directory_that_comes_again_and_again_is_held_once(path: Path, tmp_path: Path) -> None:
    block = archive.header(archive.Entry(archive.DIRECTORY, b"d/"))
    count = unpack(path, tmp_path / "t", block * 200_000 + archive.END, 1 << 20)
    assert count == 200_000
    status = Path(f"/proc/{peer_pid(path)}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    assert int(resident.split()[1]) < 16 << 10


def peer_pid(path: Path) -> int:
    raw = Raw(path)
    request = wire.ExecRequest([b"sh", b"-c", b"echo $PPID"], b"/", [(b"PATH", b"/usr/bin:/bin")])
    raw.send(wire.frame(wire.EXEC, request.pack()))
    output = b"".join(payload[8:] for kind, payload in raw.frames() if kind == wire.STDOUT)
    raw.close()
    return int(output)
