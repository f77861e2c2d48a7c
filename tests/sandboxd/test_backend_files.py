"""What every backend owes the pool of its sandboxes' files, checked on each, and what a tree travels as."""

from __future__ import annotations

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
from sandboxd.types import FileInfo, FileKind

from .backend_kit import Case, pieces, read, shell

pytestmark = pytest.mark.anyio
LONG = "d" * 90 + "/" + "e" * 90 + "/" + "ü" * 60


async def test_files_come_back_as_they_were_written(box: Connection) -> None:
    data = os.urandom(3_000_001)
    assert await box.files.write(b"a/b/c", pieces(data[:5], b"", data[5:]), 0o640) == len(data)
    assert await read(box, b"a/b/c") == data
    assert await read(box, b"a/b/c", offset=2_999_990) == data[-11:]
    assert await read(box, b"a/b/c", offset=10, limit=20) == data[10:30]
    assert await read(box, b"a/b/c", limit=0) == b""
    assert (await shell(box, "stat -c %a a/b/c")).stdout == b"640\n"
    assert await box.files.write(b"a/b/c", pieces(b"short"), 0o755) == 5
    assert await read(box, b"a/b/c") == b"short"
    assert await box.files.write(b"empty", pieces(), 0o644) == 0
    assert await read(box, b"empty") == b""


async def test_files_that_cannot_be(box: Connection) -> None:
    with pytest.raises(FileNotFound, match="missing"):
        await read(box, b"missing")
    assert (await shell(box, "mkdir directory; echo x > plain")).code == 0
    with pytest.raises(FileFailed):
        await read(box, b"directory")
    with pytest.raises(FileFailed):
        await box.files.write(b"directory", pieces(b"x"), 0o644)
    with pytest.raises(FileFailed):
        await box.files.write(b"plain/below", pieces(b"x"), 0o644)
    assert (await shell(box, "ls -A")).stdout == b"directory\nplain\n"


async def test_a_write_that_fails_leaves_the_old_file(box: Connection) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"new"
        raise RuntimeError("the caller failed")

    await box.files.write(b"file", pieces(b"old"), 0o644)
    with pytest.raises(RuntimeError, match="the caller failed"):
        await box.files.write(b"file", broken(), 0o644)
    assert await read(box, b"file") == b"old"


async def names(box: Connection, path: bytes) -> list[bytes]:
    return [info.name async for info in box.files.list_directory(path)]


async def test_what_is_at_a_path(box: Connection) -> None:
    script = (
        "mkdir d; printf 12345 >d/f; chmod 640 d/f; ln -s nowhere d/l; mkfifo d/p; touch -d @1000000000 d/f"
    )
    assert (await shell(box, script)).code == 0
    found = await box.files.stat(b"d/f")
    assert found == FileInfo(b"f", FileKind.FILE, 5, 0o640, 1e9)
    link = await box.files.stat(b"/workspace/d/l")
    assert (link.name, link.kind, link.target) == (b"l", FileKind.SYMLINK, b"nowhere")
    assert (await box.files.stat(b"d/p")).kind is FileKind.OTHER
    directory = await box.files.stat(b"d/")
    assert (directory.name, directory.kind) == (b"d", FileKind.DIRECTORY)
    with pytest.raises(FileNotFound, match="none"):
        await box.files.stat(b"none")
    listed = {info.name: info async for info in box.files.list_directory(b"d")}
    assert (listed[b"f"], listed[b"l"]) == (found, link)


async def test_what_a_directory_holds(case: Case, box: Connection) -> None:
    wanted = [b".hidden", b"..dots", b"a b", b"new\nline", b"z"] + ([] if case.by_engine else [b"\xff"])
    for name in wanted:
        await box.files.write(b"d/" + name, pieces(name), 0o644)
    assert await names(box, b"d") == sorted(wanted)
    assert (
        await shell(box, "mkdir empty many; cd many; i=0; while [ $i -lt 3000 ]; do : >$i; i=$((i+1)); done")
    ).code == 0
    assert await names(box, b"empty") == []
    assert await names(box, b"many") == sorted(b"%d" % number for number in range(3000))
    with pytest.raises(FileNotFound):
        await names(box, b"none")
    with pytest.raises(FileFailed, match="irectory"):
        await names(box, b"d/z")


async def test_removing(box: Connection) -> None:
    assert (
        await shell(box, "mkdir -p d/e/f; for i in 1 2 3; do : >d/$i; done; ln -s d link; : >file")
    ).code == 0
    await box.files.remove(b"file", recursive=False)
    await box.files.remove(b"link", recursive=True)
    assert await names(box, b"d") == [b"1", b"2", b"3", b"e"], "the link is gone, not what it led to"
    with pytest.raises(FileFailed, match=r"not empty|ENOTEMPTY"):
        await box.files.remove(b"d", recursive=False)
    await box.files.remove(b"d/e/f", recursive=False)
    await box.files.remove(b"d", recursive=True)
    with pytest.raises(FileNotFound):
        await box.files.remove(b"d", recursive=True)
    assert await names(box, b".") == []


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def packed(*members: tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive as Python's own library writes it; a file holds its own name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as writer:
        for info in members:
            data = info.name.encode() if info.isreg() else b""
            info.size = len(data)
            writer.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


async def in_parts(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
async def test_a_tree_is_unpacked(case: Case, box: Connection, form: int) -> None:
    # The image's own tar closes a directory before it fills it.
    closed = 0o755 if case.by_engine else 0o555
    long = "long/" + "x" * 80 + "/" + "y" * 80
    data = packed(
        member("./", tarfile.DIRTYPE, mode=0o755),
        member("closed", tarfile.DIRTYPE, mode=closed, mtime=1_000_000_000),
        member("closed/program", mode=0o755, mtime=1_000_000_001),
        member(long),
        member("link", tarfile.SYMTYPE, linkname="closed/program"),
        member("same", tarfile.LNKTYPE, linkname="closed/program"),
        form=form,
    )
    assert await box.files.unpack(b"tree", in_parts(data, 1000)) == 6
    assert await read(box, b"tree/" + long.encode()) == long.encode()
    seen = await shell(
        box, "cd tree; stat -c %a closed; stat -c '%a %Y' closed/program; cat link same; stat -c %h same"
    )
    assert seen.stdout == b"%o\n755 1000000001\nclosed/programclosed/program2\n" % closed
    if not case.by_engine:
        assert (await box.files.stat(b"tree/closed")).modified == 1_000_000_000


async def test_a_tree_comes_back_as_it_was(box: Connection) -> None:
    script = f"""
    mkdir -p tree/empty tree/{LONG}; cd tree
    head -c 3000000 /dev/urandom >large; : >none; printf x >{LONG}/deep; chmod 750 large
    ln large other; ln -s /nowhere/at/all absolute; mkfifo pipe; touch -d @1234567890 none
    """
    done = await shell(box, script)
    assert done.code == 0, done.stderr
    data = b"".join([piece async for piece in box.files.pack(b"tree")])
    with tarfile.open(fileobj=io.BytesIO(data)) as reader:
        found = {member.name.removeprefix("./"): member for member in reader.getmembers()}
    assert set(found) >= {"large", "other", "none", f"{LONG}/deep", "empty", "absolute", "pipe"}
    assert found["absolute"].linkname == "/nowhere/at/all"
    assert {found["large"].islnk(), found["other"].islnk()} == {True, False}
    assert (found["none"].mtime, found["pipe"].isfifo(), found["empty"].isdir()) == (1234567890, True, True)
    assert await box.files.unpack(b"again", in_parts(data, 100_000)) == len(found)
    for name in ("large", f"{LONG}/deep", "none"):
        path = b"/" + name.encode()
        assert await read(box, b"again" + path) == await read(box, b"tree" + path)
    again = await shell(box, "cd again; stat -c '%a %h' other; readlink absolute")
    assert again.stdout == b"750 2\n/nowhere/at/all\n"


async def test_unpacking_replaces_what_is_in_the_way(box: Connection) -> None:
    assert (
        await shell(box, "mkdir -p t/d; echo old >t/f; ln -s /etc/passwd t/l; echo kept >t/d/k")
    ).code == 0
    data = packed(member("f"), member("l"), member("d", tarfile.DIRTYPE, mode=0o755), member("d/new"))
    assert await box.files.unpack(b"t", pieces(data)) == 4
    assert (await shell(box, "cd t; cat f l d/k d/new; test ! -L l")).stdout == b"flkept\nd/new"


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
    if case.by_engine:
        pytest.skip("what the image's own tar makes of such names is its own")
    await box.files.write(b"secret", pieces(b"s"), 0o600)
    with pytest.raises(FileFailed, match=r"outside|behind|cannot be made"):
        await box.files.unpack(b"t", pieces(packed(*hostile)))
    assert b"out" not in await names(box, b".")


# -- the archive itself, without a sandbox


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
