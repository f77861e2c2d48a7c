"""What a hostile archive may do to the directory that it is unpacked into."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from sandboxd.guest.packing import Refused
from sandboxd.unpacking import GuardedUnpacker

ENTRY = {
    "file": tarfile.REGTYPE,
    "directory": tarfile.DIRTYPE,
    "link": tarfile.SYMTYPE,
    "hard": tarfile.LNKTYPE,
    "pipe": tarfile.FIFOTYPE,
    "device": tarfile.CHRTYPE,
}


def tar(*entries: tuple[str, str] | tuple[str, str, str], mode: int = 0o644) -> bytes:
    """Entries are (kind, name) or (kind, name, where it leads)."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for kind, name, *target in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.linkname = ENTRY[kind], mode, "".join(target)
            info.size = 4 if kind == "file" else 0
            archive.addfile(info, io.BytesIO(b"mine"))
    return whole.getvalue()


def unpack(target: Path, data: bytes) -> None:
    unpacker = GuardedUnpacker(os.fsencode(target))
    try:
        for start in range(0, len(data), 700):
            unpacker.feed(data[start : start + 700])
        unpacker.finish()
    finally:
        unpacker.abandon()


@pytest.mark.parametrize(
    "entries",
    [
        [("file", "../out")],
        [("file", "d/../../out")],
        [("file", "/out")],
        [("link", "l", "/etc/passwd")],
        [("link", "l", "..")],
        [("link", "d/l", "../../out")],
        [("link", "d/l", "./../x/../../out")],
        # Each by itself stays inside; the second passes the first and comes out above.
        [("link", "a/b/c/top", "../../.."), ("link", "a/b/c/l", "top/../out")],
        [("link", "d", "."), ("file", "d/f")],
        [("link", "a/b/l", "../../x"), ("hard", "l", "a/b/l")],
        [("hard", "l", "../out")],
        [("hard", "l", "/etc/passwd")],
        [("link", "d", "."), ("hard", "l", "d/f")],
        [("pipe", "p")],
        [("device", "null")],
        [("file", ".")],
    ],
)
def test_what_leads_out_is_refused(tmp_path: Path, entries: list[tuple[str, str]]) -> None:
    outside = tmp_path / "out"
    outside.write_text("theirs")
    with pytest.raises(Refused):
        unpack(tmp_path / "target", tar(*entries))
    assert outside.read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "target"]
    for root, directories, files in os.walk(tmp_path / "target"):
        for name in [*directories, *files]:
            assert Path(root, name).resolve().is_relative_to(tmp_path / "target")


@pytest.mark.parametrize("data", [b"x" * 2048, b"", tar(("file", "f"))[:1000]])
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(Refused):
        unpack(tmp_path / "target", data)


def test_links_within_come_along_and_a_link_there_is_replaced_not_followed(tmp_path: Path) -> None:
    outside, target = tmp_path / "out", tmp_path / "target"
    outside.write_text("theirs")
    target.mkdir()
    (target / "f").symlink_to(outside)
    entries: list[tuple[str, str] | tuple[str, str, str]]
    entries = [("file", "f"), ("link", "a/b/l", "../../f"), ("link", "m", "a/b"), ("hard", "g", "f")]
    unpack(target, tar(*entries))
    assert [(target / name).read_text() for name in ("f", "a/b/l", "m/l", "g")] == ["mine"] * 4
    assert outside.read_text() == "theirs"


def test_modes_give_nothing_to_others_and_keep_the_owner_in(tmp_path: Path) -> None:
    unpack(tmp_path / "open", tar(("directory", "d"), ("file", "d/f"), mode=0o7777))
    unpack(tmp_path / "closed", tar(("directory", "d"), ("file", "d/f"), mode=0))
    modes = [
        stat.S_IMODE((tmp_path / top / name).stat().st_mode)
        for top in ("open", "closed")
        for name in ("d", "d/f")
    ]
    assert modes == [0o755, 0o755, 0o700, 0o600]


@pytest.mark.parametrize("place", ["file", "file/below", "nowhere", "nowhere/below", "/proc/none/below"])
def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path, place: str) -> None:
    """In /proc what is missing cannot be made, and that is told in the words for what is missing."""
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("none")
    with pytest.raises(OSError, match=r"File exists|Not a directory|No such file"):
        GuardedUnpacker(os.fsencode(tmp_path / place))
