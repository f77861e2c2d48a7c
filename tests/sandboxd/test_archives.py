"""Archives from anybody: what they may do to a directory, to what lies outside it, and to who reads them."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.backends.base import Connection
from sandboxd.errors import FileFailed, FileNotFound
from sandboxd.guest import archive, packing

from .archive_kit import member, packed
from .backend_kit import Case, pieces, shell

pytestmark = pytest.mark.anyio


async def test_archives_that_are_none(box: Connection) -> None:
    whole = packed(*(member(f"f{number}") for number in range(5)))
    with pytest.raises(FileFailed):
        await box.files.unpack(b"t", pieces(b"this is no archive" * 100))
    for end in (512 * 2, 700, 512 * 9 + 5):
        with pytest.raises(FileFailed):
            await box.files.unpack(b"t", pieces(whole[:end]))
    with pytest.raises(FileFailed):
        await box.files.unpack(b"t", pieces())
    assert await box.files.unpack(b"t", pieces(whole)) == 5

    async def broken() -> AsyncIterator[bytes]:
        yield whole[:1024]
        raise RuntimeError("the caller failed")

    with pytest.raises(RuntimeError, match="the caller failed"):
        await box.files.unpack(b"u", broken())
    with pytest.raises(FileFailed):
        await box.files.unpack(b"t/f0/below", pieces(whole * 200))
    with pytest.raises(FileNotFound):
        b"".join([piece async for piece in box.files.pack(b"none")])
    with pytest.raises(FileFailed, match="irectory"):
        b"".join([piece async for piece in box.files.pack(b"t/f0")])


def raw_header(name: bytes, kind: bytes, size: int = 0, mtime: bytes = b"0") -> bytes:
    """A header with a right sum, whatever its fields say."""
    block = bytearray(512)
    block[: len(name)] = name
    block[124:136] = b"%011o\0" % size
    block[136 : 136 + len(mtime)] = mtime
    block[156:157] = kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def extended(kind: bytes, body: bytes) -> bytes:
    return (
        raw_header(b"x", kind, len(body))
        + body
        + bytes(-len(body) % 512)
        + raw_header(b"f", b"0")
        + bytes(1024)
    )


@pytest.mark.parametrize(
    "data",
    [
        extended(b"x", b"12 path=a\0b\n"),
        extended(b"L", b"a\0b" + b"c" * 20 + b"\0"),
        extended(b"L", b"n" * (1 << 20)),
        extended(b"x", b"x" * 5000),
        extended(b"x", b"9" * 5000 + b" size=1\n"),
        extended(b"x", b"5019 size=" + b"9" * 5008 + b"\n"),
        extended(b"x", b"3 \n" * 349525),
        extended(b"x", b"26 GNU.sparse.name=sparse\n"),
        raw_header(b"f", b"0", mtime=b"\x80" + b"\xff" * 11) + bytes(1024),
        raw_header(b"d", b"5", mtime=b"\xff" * 12) + bytes(1024),
        raw_header(b"f", b"0", size=0).replace(b"00000000000", b"zzzzzzzzzzz"),
    ],
    ids=[
        *("zero-in-path", "zero-in-name", "long-name", "no-record", "many-digits", "large-size"),
        *("many-records", "sparse", "late", "early", "no-number"),
    ],
)
async def test_archives_made_to_break_who_reads_them(box: Connection, data: bytes) -> None:
    # By the Engine alone it is the image's own tar that reads them, and dies of them if it must.
    with contextlib.suppress(FileFailed, FileNotFound):
        await box.files.unpack(b"t", pieces(data))
    await box.ping()
    assert (await shell(box, "echo alive")).stdout == b"alive\n"


@pytest.mark.parametrize(
    "hostile",
    [
        [member("../out")],
        [member("/workspace/out")],
        [member("a/../../out")],
        [member("l", tarfile.SYMTYPE, linkname=".."), member("l/out")],
        [member("l", tarfile.LNKTYPE, linkname="../secret")],
        [member("null", tarfile.CHRTYPE, devmajor=1, devminor=3)],
    ],
    ids=["parent", "absolute", "hidden-parent", "behind-link", "link-out", "device"],
)
async def test_what_lies_outside_is_refused(
    case: Case, box: Connection, hostile: list[tarfile.TarInfo]
) -> None:
    await box.files.write(b"secret", pieces(b"s"), 0o600)
    if case.by_engine:  # what the image's own tar makes of such names is its own
        with contextlib.suppress(FileFailed):
            await box.files.unpack(b"t", pieces(packed(*hostile)))
        assert (await shell(box, "cat secret")).stdout == b"s"
        return
    with pytest.raises(FileFailed, match=r"outside|behind|cannot be made"):
        await box.files.unpack(b"t", pieces(packed(*hostile)))
    assert b"out" not in [info.name async for info in box.files.list_directory(b".")]


NAMES = st.binary(min_size=1, max_size=300).map(lambda name: name.replace(b"\0", b"_").replace(b"/", b"_"))


@given(
    name=st.lists(NAMES, min_size=1, max_size=3).map(b"/".join),
    target=NAMES,
    kind=st.sampled_from([archive.REGULAR, archive.SYMLINK, archive.HARD_LINK, archive.DIRECTORY]),
    mode=st.integers(0, 0o7777),
    size=st.one_of(st.integers(0, 1 << 40), st.just(archive.OCTAL_LIMIT - 1), st.just(archive.OCTAL_LIMIT)),
    mtime=st.integers(0, archive.OCTAL_LIMIT - 1),
)
def test_headers_are_read_back_by_us_and_by_python(
    name: bytes, target: bytes, kind: bytes, mode: int, size: int, mtime: int
) -> None:
    entry = archive.Entry(kind, name)
    entry.mode, entry.mtime = mode, mtime
    entry.target = target if kind in (archive.SYMLINK, archive.HARD_LINK) else b""
    entry.size = size if kind == archive.REGULAR else 0
    data = archive.header(entry)
    assert len(data) % archive.BLOCK == 0
    assert fields(parsed(data)) == fields(entry)
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as reader:
        seen = reader.next()
    assert seen is not None
    assert os.fsencode(seen.name) == name.rstrip(b"/")
    assert (os.fsencode(seen.linkname), seen.mode, seen.size, seen.mtime, seen.type) == fields(entry)[1:]


def parsed(data: bytes) -> archive.Entry:
    overrides = archive.Overrides()
    while True:
        entry = archive.parse(data[: archive.BLOCK])
        assert entry is not None
        data = data[archive.BLOCK :]
        if entry.kind not in archive.EXTENSIONS:
            overrides.apply(entry)
            return entry
        overrides.add(entry.kind, data[: entry.size])
        data = data[entry.size + archive.padding(entry.size) :]


def fields(entry: archive.Entry) -> tuple[bytes, bytes, int, int, int, bytes]:
    return entry.name, entry.target, entry.mode, entry.size, entry.mtime, entry.kind


def test_a_number_too_large_for_octal_digits_in_gnus_form() -> None:
    info = member("large", size=9 << 30, mtime=-5)
    block = info.tobuf(tarfile.GNU_FORMAT)
    entry = archive.parse(block)
    assert entry is not None
    assert (entry.size, entry.mtime) == (9 << 30, -5)


@given(
    data=st.binary(max_size=3000),
    flips=st.lists(st.tuples(st.integers(0, 2047), st.integers(0, 255)), max_size=9),
)
def test_no_bytes_do_more_than_fail(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, flips: list[tuple[int, int]]
) -> None:
    spoiled = bytearray(packed(member("f"), member("l", tarfile.SYMTYPE, linkname="f")))
    for place, value in flips:
        spoiled[place] = value
    for bad in (data, bytes(spoiled)):
        root = tmp_path_factory.mktemp("root")
        unpacker = packing.Unpacker(os.fsencode(root / "in"))
        try:
            for start in range(0, len(bad), 700):
                unpacker.feed(bad[start : start + 700])
            unpacker.finish()
        except OSError:
            pass
        finally:
            unpacker.abandon()
        assert [path.name for path in root.iterdir()] == ["in"]


def changing(root: Path, *, to: int) -> Iterator[bytes]:
    """The pieces of an archive, one of whose files has another size as soon as its header is written."""
    (root / "f").write_bytes(bytes(500_000))
    for piece in packing.pack(os.fsencode(root)):
        yield piece
        os.truncate(root / "f", to)


def test_a_file_that_grows_is_cut_and_one_that_shrinks_is_an_error(tmp_path: Path) -> None:
    grown = b"".join(changing(tmp_path, to=900_000))
    with tarfile.open(fileobj=io.BytesIO(grown)) as reader:
        assert reader.getmember("./f").size == 500_000
    with pytest.raises(OSError, match="became shorter"):
        b"".join(changing(tmp_path, to=0))


def test_sockets_are_left_out(tmp_path: Path) -> None:
    os.mknod(tmp_path / "s", stat.S_IFSOCK | 0o600)
    (tmp_path / "f").write_bytes(b"x")
    with tarfile.open(fileobj=io.BytesIO(b"".join(packing.pack(os.fsencode(tmp_path))))) as reader:
        assert reader.getnames() == [".", "./f"]
